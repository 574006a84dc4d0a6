"""Check every object of every kustomization under k8s/, and of the Helm chart, against its strict
schema."""

from collections.abc import Callable
from typing import Any

import pytest
from builders.chart import EXAMPLES, Chart
from builders.manifests import TOGETHER, Manifest, kustomizations, of_kind, rendered
from oracles import manifest_schemas

NO_PACKAGE = "NO SCHEMAS OF THE GATEWAY API: `make setup` packs them where there is npm"


def needs(manifests: list[Manifest]) -> None:
    """Skip the test if an object's schema is missing on this machine."""
    found = any(m["apiVersion"].startswith(manifest_schemas.GATEWAY_API) for m in manifests)
    if found and not manifest_schemas.has_gateway_api():
        pytest.skip(NO_PACKAGE)


@pytest.mark.parametrize(
    "names", [*((name,) for name in kustomizations()), *TOGETHER], ids="+".join
)
def test_objects_match_their_schemas(names: tuple[str, ...]) -> None:
    manifests = rendered(*names)
    needs(manifests)
    assert manifests
    wrong = {
        f"{m['kind']} {m['metadata']['name']}": found
        for m in manifests
        if (found := manifest_schemas.errors(m))
    }
    assert wrong == {}


def test_objects_of_the_chart_match_their_schemas(chart: Chart, subtests: pytest.Subtests) -> None:
    for what, values in EXAMPLES.items():
        with subtests.test(what):
            for manifest in chart.objects(values):
                if manifest["apiVersion"].startswith(manifest_schemas.GATEWAY_API):
                    continue  # equal to kustomize's
                assert manifest_schemas.errors(manifest) == [], manifest["metadata"]


def misspell(name: str) -> Callable[[Any], None]:
    """Rename a field wherever it occurs in an object."""

    def change(value: Any) -> None:
        if isinstance(value, dict):
            if name in value:
                value[f"{name}z"] = value.pop(name)
                return
            for inner in value.values():
                change(inner)
        elif isinstance(value, list):
            for inner in value:
                change(inner)

    return change


MISSPELT = (
    ("overlays/cpu", "Deployment", "minReadySeconds"),
    ("overlays/cpu", "Deployment", "sizeLimit"),
    ("overlays/cpu", "HorizontalPodAutoscaler", "averageUtilization"),
    ("overlays/cpu", "NetworkPolicy", "policyTypes"),
    ("overlays/cpu", "PodDisruptionBudget", "maxUnavailable"),
    ("overlays/cpu", "Certificate", "rotationPolicy"),
    ("overlays/cpu", "Issuer", "secretName"),
    ("overlays/release", "ScaledObject", "pollingInterval"),
    ("overlays/release", "ScaledObject", "stabilizationWindowSeconds"),
    ("overlays/release", "Gateway", "allowedRoutes"),
    ("overlays/release", "HTTPRoute", "backendRequest"),
    ("overlays/release", "GRPCRoute", "service"),
    ("overlays/release", "Job", "backoffLimit"),
    ("overlays/release", "PersistentVolumeClaim", "accessModes"),
    ("overlays/racks", "LeaderWorkerSet", "restartPolicy"),
    ("overlays/racks", "LeaderWorkerSet", "terminationGracePeriodSeconds"),
)


def test_a_misspelt_field_is_reported(subtests: pytest.Subtests) -> None:
    for where, kind, field in MISSPELT:
        with subtests.test(where=where, kind=kind, field=field):
            manifests = [m for m in rendered(where) if m["kind"] == kind]
            needs(manifests)
            assert manifests
            for manifest in manifests:
                misspell(field)(manifest)
            assert any(manifest_schemas.errors(m) for m in manifests)


POOL = {
    "apiVersion": "inference.networking.k8s.io/v1",
    "kind": "InferencePool",
    "metadata": {"name": "pdserve"},
    "spec": {
        "selector": {"matchLabels": {"app.kubernetes.io/name": "pdserve"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "pdserve-picker", "port": {"number": 9002}},
    },
}
MONITOR = {
    "apiVersion": "monitoring.coreos.com/v1",
    "kind": "PodMonitor",
    "metadata": {"name": "pdserve"},
    "spec": {
        "selector": {"matchLabels": {"app.kubernetes.io/name": "pdserve"}},
        "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
    },
}


def test_kinds_of_other_operators(subtests: pytest.Subtests) -> None:
    for manifest, field in (
        (POOL, "failureMode"),
        (POOL, "number"),
        (MONITOR, "interval"),
        (MONITOR, "matchLabels"),
    ):
        with subtests.test(field):
            assert manifest_schemas.errors(manifest) == []
            again = {**manifest, "spec": {**manifest["spec"], f"{field}s": 1}}
            assert manifest_schemas.errors(again)


def test_wrong_values_are_reported() -> None:
    scaled = of_kind(rendered("components/autoscaling"), "ScaledObject")["pdserve-decode"]
    scaled["spec"]["maxReplicaCount"] = "many"
    assert manifest_schemas.errors(scaled)
    groups = of_kind(rendered("overlays/racks"), "LeaderWorkerSet")["pdserve-workers"]
    groups["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
    assert manifest_schemas.errors(groups) == [
        "spec.leaderWorkerTemplate.restartPolicy: 'Never' is none of "
        "['None', 'RecreateGroupAfterStart', 'RecreateGroupOnPodRestart']"
    ]
    assert manifest_schemas.errors({**groups, "apiVersion": "example.com/v1"})
