"""The component that finds routers by EndpointSlices, in an overlay with a namespace."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pdserve.services.host.discovery.api_server import SERVICE_ACCOUNT
from pdserve.services.host.discovery.target import parse_kubernetes

K8S = Path(__file__).parents[2] / "k8s"
NAME = "pdserve-discovery"
Manifest = dict[str, Any]


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def manifests(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[Manifest]:
    if not (kubectl := shutil.which("kubectl")):
        pytest.skip("NO KUBECTL: the manifests were not rendered and nothing about them is known")
    folder = tmp_path_factory.mktemp("k8s") / "k8s"
    shutil.copytree(K8S, folder)
    overlay = folder / "overlays/mine"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        f"namespace: llm\nresources: [../{request.param}]\n"
        "components: [../../components/endpoint-slices]\n"
    )
    done = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [m for m in yaml.safe_load_all(done.stdout) if m]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


def finding(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Pod specs of what looks for routers, by role."""
    pods = {
        name.removeprefix("pdserve-"): deployment["spec"]["template"]["spec"]
        for name, deployment in of_kind(manifests, "Deployment").items()
    }
    return {role: pods[role] for role in ("gateway", "prefill", "decode")}


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


def test_only_those_who_look_for_routers_have_a_token(manifests: list[Manifest]) -> None:
    looking = finding(manifests)
    for name, deployment in of_kind(manifests, "Deployment").items():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        tokens = [v for v in pod["volumes"] if "projected" in v]
        assert len(tokens) == (name.removeprefix("pdserve-") in looking), name
        assert ("serviceAccountName" in pod) == bool(tokens)


def test_the_files_are_where_they_are_looked_for(manifests: list[Manifest]) -> None:
    for pod in finding(manifests).values():
        (container,) = pod["containers"]
        (volume,) = [v for v in pod["volumes"] if "projected" in v]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
        assert mount["mountPath"] == SERVICE_ACCOUNT
        assert "subPath" not in mount, "the token would stay as it was"
        token, authority, namespace = volume["projected"]["sources"]
        assert token["serviceAccountToken"]["path"] == "token"
        assert token["serviceAccountToken"]["expirationSeconds"] <= 3600
        assert [item["path"] for item in authority["configMap"]["items"]] == ["ca.crt"]
        assert [item["path"] for item in namespace["downwardAPI"]["items"]] == ["namespace"]
        assert volume["projected"]["defaultMode"] == 0o440


def test_the_target_is_a_service_and_its_port(manifests: list[Manifest]) -> None:
    services = of_kind(manifests, "Service")
    for pod in finding(manifests).values():
        env = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
        target = parse_kubernetes(env["PDSERVE_ROUTERS"]["value"])
        assert target is not None
        assert target.namespace == "", "the pod's own"
        assert target.service in services
        spec = services[target.service]["spec"]
        assert target.port in [port["name"] for port in spec["ports"]]
        assert "publishNotReadyAddresses" not in spec, "its endpoints would all be ready"
