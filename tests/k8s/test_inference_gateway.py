"""The component for Inference Gateways on the overlay cpu: rendered, and consistent with the
program."""

import pytest
from builders.manifests import Manifest, rendered, selects, workloads

from pdserve.cli.commands import COMMANDS
from pdserve.services.picker.main import LIVE, NAMES


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], Manifest]:
    found = rendered("components/inference-gateway")
    return {(m["kind"], m["metadata"]["name"]): m for m in found}


def containers(deployment: Manifest) -> dict[str, Manifest]:
    return {one["name"]: one for one in deployment["spec"]["template"]["spec"]["containers"]}


def env(container: Manifest) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container["env"]}


def test_the_pool_selects_the_decode_pods(manifests: dict[tuple[str, str], Manifest]) -> None:
    pool = manifests["InferencePool", "pdserve"]["spec"]
    assert set(pool) == {"selector", "targetPorts", "endpointPickerRef"}
    decode = manifests["Deployment", "pdserve-decode"]["spec"]["template"]
    wanted = pool["selector"]["matchLabels"]
    assert wanted.items() <= decode["metadata"]["labels"].items()
    gateway = containers(manifests["Deployment", "pdserve-decode"])["gateway"]
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
    assert pool["targetPorts"] == [{"number": ports["http"]}]
    assert env(gateway)["PDSERVE_PORT"] == str(ports["http"])
    seen = manifests["Service", "pdserve-decode-http"]["spec"]
    assert (seen["clusterIP"], seen["selector"]) == ("None", wanted)
    request = env(containers(manifests["Deployment", "pdserve-picker"])["pdserve"])
    assert request["PDSERVE_ENDPOINTS"] == f"pdserve-decode-http:{ports['http']}"
    worker = env(containers(manifests["Deployment", "pdserve-decode"])["pdserve"])
    assert worker["PDSERVE_ADVERTISE"].startswith("$(POD_IP):")  # the router compares this host


def test_the_picker_is_at_the_address_that_the_pool_names(
    manifests: dict[tuple[str, str], Manifest],
) -> None:
    named = manifests["InferencePool", "pdserve"]["spec"]["endpointPickerRef"]
    service = manifests["Service", named["name"]]["spec"]
    (port,) = service["ports"]
    assert (port["port"], port["appProtocol"]) == (named["port"]["number"], "http2")
    picker = manifests["Deployment", "pdserve-picker"]
    labels = picker["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    own = containers(picker)["pdserve"]
    ports = {one["name"]: one["containerPort"] for one in own["ports"]}
    bind, probe = env(own)["PDSERVE_BIND"], env(own)["PDSERVE_PROBE_PORT"]
    assert bind.endswith(f":{ports[port['targetPort']]}")
    for name, checked in (("readinessProbe", NAMES), ("livenessProbe", (LIVE,))):
        assert own[name]["grpc"]["service"] in checked
        assert str(own[name]["grpc"]["port"]) == probe == str(ports["probe"])


def test_variables_of_picker_and_gateway_are_known_options(
    manifests: dict[tuple[str, str], Manifest],
) -> None:
    for deployment, name, command in (
        ("pdserve-picker", "pdserve", "picker"),
        ("pdserve-decode", "gateway", "gateway"),
    ):
        container = containers(manifests["Deployment", deployment])[name]
        assert container["args"] == [command]
        known = {o.env for s in COMMANDS[command].sections() for o in s.options}
        assert set(env(container)) <= known


def test_the_picker_drains_within_its_grace_period(
    manifests: dict[tuple[str, str], Manifest],
) -> None:
    pod = manifests["Deployment", "pdserve-picker"]["spec"]["template"]["spec"]
    drain_s = float(env(pod["containers"][0])["PDSERVE_DRAIN_S"])
    assert pod["terminationGracePeriodSeconds"] > drain_s + 10


def test_the_route_leads_to_the_pool(manifests: dict[tuple[str, str], Manifest]) -> None:
    (rule,) = manifests["HTTPRoute", "pdserve"]["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    pool = manifests[backend["kind"], backend["name"]]
    assert pool["apiVersion"].partition("/")[0] == backend["group"]


def test_network_policies_admit_pickers_and_clients(
    manifests: dict[tuple[str, str], Manifest],
) -> None:
    allowed = manifests["NetworkPolicy", "pdserve-picker-to-router"]["spec"]["ingress"][0]
    labels = manifests["Deployment", "pdserve-picker"]["spec"]["template"]["metadata"]["labels"]
    assert allowed["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    decode = manifests["NetworkPolicy", "pdserve-decode-http"]["spec"]
    assert decode["ingress"] == [{"ports": [{"port": "http"}]}]


def test_every_gateway_has_the_database() -> None:
    """Includes the gateways in decode pods, which clients also reach. Without the database there,
    files would exist depending on which gateway answers, and its requests would be missing from the
    usage records."""
    found = rendered("components/inference-gateway", "components/database")
    (policy,) = (m["spec"] for m in found if m["metadata"]["name"] == "pdserve-database")
    having = set()
    for workload in workloads(found):
        gateways = [c for c in workload.containers if c["args"] == ["gateway"]]
        assert selects(policy["podSelector"], workload.labels) == bool(gateways), workload.name
        for container in gateways:
            (entry,) = (e for e in container["env"] if e["name"] == "PDSERVE_DATABASE_URL")
            wanted = {"name": "pdserve-database", "key": "url"}
            assert entry["valueFrom"]["secretKeyRef"] == wanted, "the secret must be required"
            having.add(workload.name)
    assert having == {"pdserve-gateway", "pdserve-decode"}


def test_a_secret_without_the_component_configures_no_database(
    manifests: dict[tuple[str, str], Manifest],
) -> None:
    """Without the component, no policy lets a gateway reach a database."""
    for workload in workloads([*manifests.values()]):
        assert "PDSERVE_DATABASE_URL" not in workload.environment()


def test_the_default_container_of_a_pod_runs_its_role(
    manifests: dict[tuple[str, str], Manifest],
) -> None:
    """The runbook's `kubectl logs` and `kubectl exec` name no container. In a decode pod a gateway
    comes first."""
    named = {}
    for workload in workloads([*manifests.values()]):
        notes = workload.template["metadata"]["annotations"]
        name = notes["kubectl.kubernetes.io/default-container"]
        (chosen,) = (c for c in workload.containers if c["name"] == name)
        assert chosen["args"] == [workload.role]
        named[workload.role] = [c["name"] for c in workload.containers].index(name)
    assert named == {"gateway": 0, "router": 0, "prefill": 0, "decode": 1, "picker": 0}
