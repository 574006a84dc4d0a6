"""k8s/overlays/two-pools: two pools of workers under one name, of which one can be retired."""

import pytest
from manifests import Manifest, of_kind, rendered

from pdserve.gateway.settings import GatewaySettings
from pdserve.services.host.options import GRACE_S, STOP_S
from pdserve.services.worker.settings import CLOSE_S, LEAVE_S

POOLS = ("a", "b")
WORKERS = ("pdserve-prefill", "pdserve-decode")


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return rendered("overlays/two-pools")


def pod_of(deployment: Manifest) -> tuple[Manifest, dict[str, str]]:
    """Its pods' spec, and their variables."""
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, {entry["name"]: entry.get("value", "") for entry in container["env"]}


def workers(manifests: list[Manifest], pool: str) -> list[Manifest]:
    deployments = of_kind(manifests, "Deployment")
    return [deployments[f"{name}-{pool}"] for name in WORKERS]


def test_only_workers_are_there_twice(manifests: list[Manifest]) -> None:
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)
    twice = {(kind, name[:-2]) for kind, name in names if name.endswith(("-a", "-b"))}
    kinds = ("Deployment", "PodDisruptionBudget")
    assert {kind for kind, _ in twice} == set(kinds)
    assert {name for _, name in twice} == {*WORKERS}
    assert set(of_kind(manifests, "Deployment")) == {
        "pdserve-gateway",
        "pdserve-router",
        *(f"{name}-{pool}" for name in WORKERS for pool in POOLS),
    }


def test_no_pod_is_of_two_deployments(manifests: list[Manifest]) -> None:
    deployments = of_kind(manifests, "Deployment")
    labels = {name: d["spec"]["template"]["metadata"]["labels"] for name, d in deployments.items()}
    for kind in ("Deployment", "PodDisruptionBudget"):
        for name, found in of_kind(manifests, kind).items():
            wanted = found["spec"]["selector"]["matchLabels"].items()
            assert [n for n, has in labels.items() if wanted <= has.items()] == [name]


def test_one_name_and_two_models(manifests: list[Manifest]) -> None:
    models = set()
    served = set()
    for pool in POOLS:
        variables = [pod_of(deployment)[1] for deployment in workers(manifests, pool)]
        of_pool = {v["PDSERVE_MODEL"] for v in variables}
        assert len(of_pool) == 1, "prefill sends to decode of its own pool"
        models |= of_pool
        served |= {v["PDSERVE_SERVED_NAME"] for v in variables}
        assert len({v["PDSERVE_ROUTERS"] for v in variables}) == 1
    assert len(models) == 2
    assert len(served) == 1


def test_a_pool_drains_for_as_long_as_the_longest_stream(manifests: list[Manifest]) -> None:
    _, gateway = pod_of(of_kind(manifests, "Deployment")["pdserve-gateway"])
    longest_s = float(
        gateway.get("PDSERVE_REQUEST_TIMEOUT_S") or GatewaySettings().request_timeout_s
    )
    for pool in POOLS:
        for deployment in workers(manifests, pool):
            spec, variables = pod_of(deployment)
            drain_s = float(variables["PDSERVE_DRAIN_S"])
            assert drain_s >= longest_s
            stop_s = GRACE_S + STOP_S + LEAVE_S + CLOSE_S
            assert spec["terminationGracePeriodSeconds"] > drain_s + stop_s
