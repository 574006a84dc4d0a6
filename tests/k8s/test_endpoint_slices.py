"""The component that discovers routers through EndpointSlices: in an overlay with a namespace, and
together with pickers and the gateways of decode pods."""

import kubernetes_validate
import pytest
from builders.manifests import Manifest, of_kind, rendered, selects

from pdserve.services.common.endpoint_slices import parse_kubernetes
from pdserve.services.common.kubernetes_api import SERVICE_ACCOUNT

NAME = "pdserve-discovery"


TOGETHER = ("components/inference-gateway", "components/endpoint-slices")


@pytest.fixture(scope="module", params=["cpu", "gpu", "inference-gateway"])
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    if request.param == "inference-gateway":
        return rendered(*TOGETHER, namespace="llm")
    return rendered(TOGETHER[1], under=f"overlays/{request.param}", namespace="llm")


def finding(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return the pod specs of the roles that look up routers, by role."""
    pods = {
        name.removeprefix("pdserve-"): deployment["spec"]["template"]["spec"]
        for name, deployment in of_kind(manifests, "Deployment").items()
    }
    return {role: pod for role, pod in pods.items() if role != "router"}


def watching(manifests: list[Manifest]) -> list[tuple[Manifest, Manifest]]:
    """Return the containers of those pods, each with its pod's spec."""
    return [(pod, one) for pod in finding(manifests).values() for one in pod["containers"]]


def test_schemas(manifests: list[Manifest]) -> None:
    own = [m for m in manifests if m["metadata"]["name"] == NAME]
    assert len(own) == 4
    for manifest in [*own, *of_kind(manifests, "Deployment").values()]:
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_the_account_may_read_endpoint_slices_and_nothing_else(manifests: list[Manifest]) -> None:
    role = of_kind(manifests, "Role")[NAME]
    (rule,) = role["rules"]
    assert rule == {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }
    binding = of_kind(manifests, "RoleBinding")[NAME]
    assert binding["roleRef"]["name"] == NAME
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": "llm"}]
    assert of_kind(manifests, "ServiceAccount")[NAME]["automountServiceAccountToken"] is False


def test_only_roles_that_look_up_routers_have_a_token(manifests: list[Manifest]) -> None:
    looking = finding(manifests)
    for name, deployment in of_kind(manifests, "Deployment").items():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        tokens = [v for v in pod["volumes"] if "projected" in v]
        assert len(tokens) == (name.removeprefix("pdserve-") in looking), name
        assert ("serviceAccountName" in pod) == bool(tokens)


def test_token_and_certificate_are_mounted_where_the_client_reads_them(
    manifests: list[Manifest],
) -> None:
    for pod, container in watching(manifests):
        (volume,) = [v for v in pod["volumes"] if "projected" in v]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
        assert mount["mountPath"] == SERVICE_ACCOUNT
        assert "subPath" not in mount, "a subPath mount would never be refreshed"
        token, authority, namespace = volume["projected"]["sources"]
        assert token["serviceAccountToken"]["path"] == "token"
        assert token["serviceAccountToken"]["expirationSeconds"] <= 3600
        assert [item["path"] for item in authority["configMap"]["items"]] == ["ca.crt"]
        assert [item["path"] for item in namespace["downwardAPI"]["items"]] == ["namespace"]
        assert volume["projected"]["defaultMode"] == 0o440


def test_the_target_is_a_service_and_its_port(manifests: list[Manifest]) -> None:
    services = of_kind(manifests, "Service")
    for _, container in watching(manifests):
        env = {entry["name"]: entry for entry in container["env"]}
        target = parse_kubernetes(env["PDSERVE_ROUTERS"]["value"])
        assert target is not None
        assert target.namespace == "", "must be empty, which means the pod's namespace"
        assert target.service in services
        spec = services[target.service]["spec"]
        assert target.port in [port["name"] for port in spec["ports"]]
        assert "publishNotReadyAddresses" not in spec, "it would list unready endpoints as ready"


def test_roles_that_watch_endpoints_may_reach_the_api_server(manifests: list[Manifest]) -> None:
    selector = of_kind(manifests, "NetworkPolicy")[NAME]["spec"]["podSelector"]
    for name, deployment in of_kind(manifests, "Deployment").items():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert selects(selector, labels) == (name != "pdserve-router"), name


def test_pickers_and_the_gateways_of_decode_pods_watch_too() -> None:
    found = finding(rendered(*TOGETHER, namespace="llm"))
    assert {len(found[role]["containers"]) for role in ("gateway", "prefill", "picker")} == {1}
    assert [one["name"] for one in found["decode"]["containers"]] == ["gateway", "pdserve"]
    (picker,) = found["picker"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in picker["env"]}
    target = parse_kubernetes(env["PDSERVE_ENDPOINTS"] or "")
    assert target is not None
    service = of_kind(rendered(*TOGETHER), "Service")[target.service]["spec"]
    assert [port["name"] for port in service["ports"]] == [target.port]
    assert "publishNotReadyAddresses" not in service
