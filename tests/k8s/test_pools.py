"""k8s/overlays/two-pools: a second pool of workers next to a running system, with the same served
name."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.manifests import (
    NO_KUBECTL,
    ROOT,
    SOURCES,
    TOGETHER,
    Manifest,
    of_kind,
    parsed,
    rendered,
    selects,
    workloads,
)
from oracles.manifest_rules import ALWAYS

from pdserve.engine.checkpoints.resolve import find, served_name
from pdserve.gateway.settings import GatewaySettings
from pdserve.services.common.options import GRACE_S, STOP_S
from pdserve.services.worker.settings import DEREGISTER_S, ENGINE_CLOSE_S

POOLS = ("first", "b")
ROLES = ("prefill", "decode")
WORKERS = ("pdserve-prefill", "pdserve-decode")


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return rendered("overlays/two-pools")


def pod_of(deployment: Manifest) -> tuple[Manifest, dict[str, str]]:
    """Return the spec of a deployment's pods and their variables."""
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, {entry["name"]: entry.get("value", "") for entry in container["env"]}


def workers(manifests: list[Manifest], pool: str) -> list[Manifest]:
    deployments = of_kind(manifests, "Deployment")
    found = [d for d in deployments.values() if pool_of(d) == pool]
    assert len(found) == len(WORKERS)
    return found


def pool_of(deployment: Manifest) -> str | None:
    labels: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return labels.get("pdserve.internal/pool")


def test_a_second_pool_leaves_existing_objects_unchanged(manifests: list[Manifest]) -> None:
    """All objects of the overlay cpu remain; only objects of workers exist a second time."""
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)
    runs = rendered("overlays/cpu")
    assert [m for m in manifests if m in runs] == [m for m in runs if m in manifests] == runs
    new = {(m["kind"], m["metadata"]["name"]) for m in manifests if m not in runs}
    kinds = ("Deployment", "PodDisruptionBudget")
    assert new == {(kind, f"{name}-b") for kind in kinds for name in WORKERS}


def test_each_selector_matches_one_deployment(manifests: list[Manifest]) -> None:
    deployments = of_kind(manifests, "Deployment")
    labels = {name: d["spec"]["template"]["metadata"]["labels"] for name, d in deployments.items()}
    for kind in ("Deployment", "PodDisruptionBudget"):
        for name, found in of_kind(manifests, kind).items():
            wanted = found["spec"]["selector"]["matchLabels"].items()
            assert [n for n, has in labels.items() if wanted <= has.items()] == [name]


def test_two_pools_serve_two_models_by_one_name(manifests: list[Manifest]) -> None:
    """The first pool's served name is that of the model in the image."""
    shipped = find("")
    assert isinstance(shipped, Path)
    models, served = set(), {served_name(shipped)}
    for pool in POOLS:
        variables = [pod_of(deployment)[1] for deployment in workers(manifests, pool)]
        of_pool = {v["PDSERVE_MODEL"] for v in variables}
        assert len(of_pool) == 1, "prefill and decode workers of a pool have different models"
        models |= of_pool
        served |= {v["PDSERVE_SERVED_NAME"] for v in variables if "PDSERVE_SERVED_NAME" in v}
        assert all(v["PDSERVE_MODEL"] == "" or "PDSERVE_SERVED_NAME" in v for v in variables)
        assert len({v["PDSERVE_ROUTERS"] for v in variables}) == 1
    assert len(models) == 2
    assert len(served) == 1


def test_each_pool_can_drain_its_longest_stream(manifests: list[Manifest]) -> None:
    _, gateway = pod_of(of_kind(manifests, "Deployment")["pdserve-gateway"])
    longest_s = float(
        gateway.get("PDSERVE_REQUEST_TIMEOUT_S") or GatewaySettings().request_timeout_s
    )
    for pool in POOLS:
        for deployment in workers(manifests, pool):
            spec, variables = pod_of(deployment)
            drain_s = float(variables["PDSERVE_DRAIN_S"])
            assert drain_s >= longest_s
            stop_s = GRACE_S + STOP_S + DEREGISTER_S + ENGINE_CLOSE_S
            assert spec["terminationGracePeriodSeconds"] > drain_s + stop_s


SECTION = re.compile(r"k8s/overlays/two-pools adds.*", re.DOTALL)


def test_commands_in_the_upgrade_guide_name_existing_objects(manifests: list[Manifest]) -> None:
    """Checks the deployments and pod labels in docs/upgrades.md."""
    match = SECTION.search((ROOT / "docs/upgrades.md").read_text())
    assert match is not None
    named = set(re.findall(r"deployment/([\w-]+)", match[0]))
    assert named == {f"{name}{suffix}" for name in WORKERS for suffix in ("", "-b")}
    (retired,) = set(re.findall(r"pdserve\.internal/pool=(\w+)", match[0]))
    assert retired in {pool_of(d) for d in of_kind(manifests, "Deployment").values()}


def kustomized(folder: Path) -> list[Manifest]:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


REPEATED = re.compile(r"^\| (components/\S+) \| (\S+) \|", re.MULTILINE)


@pytest.fixture(scope="module", params=TOGETHER, ids=len)
def beside(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Manifest]:
    """Return pool b next to an overlay of many components, as docs/upgrades.md describes."""
    if shutil.which("kubectl") is None:
        pytest.skip(NO_KUBECTL)
    overlays = tmp_path_factory.mktemp("pools") / "k8s/overlays"
    shutil.copytree(SOURCES, overlays.parent)
    shutil.copytree(overlays / "cpu", overlays / "mine")
    mine = request.param
    change(overlays / "mine", components=[f"../../{name}" for name in mine])
    change(overlays / "two-pools", without=["../cpu"], resources=["../mine"])
    repeated = REPEATED.findall((ROOT / "docs/upgrades.md").read_text())
    assert repeated
    names = [f"../../../{name}" for component, name in repeated if component in mine]
    patches = queue_patches() if "components/autoscaling" in mine else []
    image = ["../../../components/model-image"] if "components/model-volume" in mine else []
    change(overlays / "two-pools/pool-b", without=image, components=names, patches=patches)
    runs, found = kustomized(overlays / "mine"), kustomized(overlays / "two-pools")
    assert [m for m in runs if m not in found] == [], "existing objects changed"
    return found


def queue_patches() -> list[Manifest]:
    content = (SOURCES / "components/autoscaling/kustomization.yaml").read_text()
    return [one for one in yaml.safe_load(content)["patches"] if "PDSERVE_MAX_" in one["patch"]]


def change(folder: Path, without: Sequence[str] = (), **more: list[Any]) -> None:
    """Append entries to fields of a kustomization, and drop the entries in `without`."""
    path = folder / "kustomization.yaml"
    content = yaml.safe_load(path.read_text())
    for field, names in more.items():
        kept = [name for name in content.get(field, []) if name not in without]
        content[field] = kept + names
    path.write_text(yaml.safe_dump(content))


def test_requests_reach_both_pools(beside: list[Manifest]) -> None:
    """Each decode pod is an endpoint, and a container listens there. Otherwise the second pool
    would get no requests, or failing ones once the first pool is gone."""
    pool = of_kind(beside, "InferencePool")["pdserve"]["spec"]
    service = of_kind(beside, "Service")["pdserve-decode-http"]["spec"]
    (target,) = pool["targetPorts"]
    met = []
    for workload in workloads(beside):
        ports = {
            p["name"]: p["containerPort"] for c in workload.containers for p in c.get("ports", [])
        }
        endpoint = selects(pool["selector"], workload.labels)
        assert selects({"matchLabels": service["selector"]}, workload.labels) == endpoint
        if endpoint:
            assert ports[service["ports"][0]["targetPort"]] == target["number"]
            met.append(pool_of(workload.manifest) or "")
    assert sorted(met) == sorted(POOLS)


def test_a_pool_next_to_components_keeps_the_rules(
    subtests: pytest.Subtests, beside: list[Manifest]
) -> None:
    for rule in ALWAYS:
        with subtests.test(rule.__name__):
            assert list(rule(beside)) == []


def test_both_pools_have_the_same_variables_except_for_the_model(beside: list[Manifest]) -> None:
    """Settings that components apply to the first pool also apply to the second."""
    of_pools = []
    for pool in POOLS:
        found = {}
        for workload in workloads(workers(beside, pool)):
            for container in workload.containers:
                variables = {e["name"]: e for e in container["env"] if e["name"] not in OF_MODEL}
                found[workload.role, container["name"]] = variables
        of_pools.append(found)
    assert of_pools[0] == of_pools[1]


@pytest.mark.parametrize("beside", [TOGETHER[1]], ids=len, indirect=True)
def test_two_models_on_one_volume(beside: list[Manifest]) -> None:
    """Each pool waits for the model of its Job. All share one claim, which keeps its name."""
    claims = of_kind(beside, "PersistentVolumeClaim")
    of_model: dict[str, set[str]] = {}
    for workload in workloads(beside):
        volumes = {v["name"]: v for v in workload.pod["volumes"]}
        if "models" in volumes:
            named = volumes["models"]["persistentVolumeClaim"]["claimName"]
            assert [named] == list(claims) == ["pdserve-models"]
            source = workload.environment()["PDSERVE_MODEL"]["valueFrom"]["configMapKeyRef"]
            of_model.setdefault(source["name"], set()).add(workload.name)
    for suffix in ("", "-b"):
        (model,) = (m for m, names in of_model.items() if f"pdserve-decode{suffix}" in names)
        assert of_model[model] == {model, *(f"{name}{suffix}" for name in WORKERS)}
    assert len(of_model) == len(POOLS)


OF_MODEL = {"PDSERVE_MODEL", "PDSERVE_SERVED_NAME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason=NO_KUBECTL)
def test_a_pool_is_retired_and_a_third_one_is_added(tmp_path: Path) -> None:
    """Follows docs/upgrades.md: a patch in the overlay, and a folder copied from pool-b."""
    (match,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/upgrades.md").read_text(), re.DOTALL)
    shutil.copytree(SOURCES, tmp_path / "k8s")
    overlay = tmp_path / "k8s/overlays/two-pools"
    shutil.copytree(overlay / "pool-b", overlay / "pool-c")
    text = (overlay / "pool-c/kustomization.yaml").read_text()
    changed = text.replace("nameSuffix: -b", "nameSuffix: -c").replace("pool: b", "pool: c")
    (overlay / "pool-c/kustomization.yaml").write_text(changed)
    text = (overlay / "kustomization.yaml").read_text().replace("pool-b]", "pool-b, pool-c]")
    (overlay / "kustomization.yaml").write_text(text + match)
    found = [w for w in workloads(kustomized(overlay)) if w.role in ROLES]
    replicas: dict[str, list[int]] = {}
    for workload in found:
        replicas.setdefault(pool_of(workload.manifest) or "", []).append(
            workload.manifest["spec"]["replicas"]
        )
    assert replicas == {"first": [0, 0], "b": [2, 1], "c": [2, 1]}
