"""Overlays are consistent with the program: commands, ports, addresses, certificates, network
policies.

Rules for every object under k8s/ are in support/oracles/manifest_rules (test_policy.py).
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.manifests import Manifest, Workload, of_kind, rendered, selects, workloads
from oracles.manifest_rules.labels import WORKERS

from pdserve.cli.commands import COMMANDS, known_names
from pdserve.cli.options import ENV_PREFIX
from pdserve.cli.options.options import Option
from pdserve.engine.handoff.recorder.ring import MAX_DEAD_RINGS
from pdserve.services.common.auth.certificates import Role

ROOT = Path(__file__).parents[2]
ROLES = ("gateway", "router", "prefill", "decode")


@pytest.fixture(scope="module", params=["cpu", "gpu", "racks", "release"])
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(f"overlays/{request.param}")


@pytest.fixture
def servers(manifests: list[Manifest]) -> dict[str, Workload]:
    """Return the workloads that serve, by role."""
    found = [w for w in workloads(manifests) if not w.ends]
    assert sorted(w.role for w in found) == sorted(ROLES)
    return {w.role: w for w in found}


def container(workload: Workload) -> Manifest:
    (only,) = workload.containers
    found: Manifest = only
    return found


def ports(workload: Workload) -> dict[str, int]:
    return {p["name"]: p["containerPort"] for p in container(workload)["ports"]}


def options(role: str) -> dict[str, Option]:
    return {o.env: o for s in COMMANDS[role].sections() for o in s.options}


def test_roles_run_their_commands(servers: dict[str, Workload]) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text() + "\n"
    for role, server in servers.items():
        assert container(server)["args"] == [role]
        name = container(server)["image"].partition("@")[0].rpartition("/")[2]
        assert name == ("pdserve-worker" if role in WORKERS else "pdserve-control")
        assert f"FROM runtime AS {name.removeprefix('pdserve-')}\n" in dockerfile


def test_service_selectors_match_exactly_one_workload(
    manifests: list[Manifest], servers: dict[str, Workload]
) -> None:
    for service in of_kind(manifests, "Service").values():
        wanted = {"matchLabels": service["spec"]["selector"]}
        (target,) = [s for s in servers.values() if selects(wanted, s.labels)]
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= ports(target).keys()


WORKER = {
    "grpc": "PDSERVE_BIND",
    "metrics": "PDSERVE_METRICS_PORT",
    "probe": "PDSERVE_PROBE_PORT",
}


def test_container_ports_are_those_that_the_program_binds(servers: dict[str, Workload]) -> None:
    binds = {
        "gateway": {"http": "PDSERVE_PORT", "grpc": "PDSERVE_GRPC_PORT"},
        "router": WORKER,
        "prefill": WORKER,
        "decode": WORKER | {"kv": "PDSERVE_DATA_BIND"},
    }
    for role, server in servers.items():
        env = server.environment()
        bound = {n: int(env[v]["value"].rpartition(":")[2]) for n, v in binds[role].items()}
        assert ports(server) == bound


def test_addresses_lead_to_services(
    manifests: list[Manifest], servers: dict[str, Workload]
) -> None:
    services = of_kind(manifests, "Service")
    for role, server in servers.items():
        if role == "router":
            continue
        name, _, port = server.environment()["PDSERVE_ROUTERS"]["value"].partition(":")
        assert int(port) in [p["port"] for p in services[name]["spec"]["ports"]]
        assert (name == "pdserve-router-join") == (role in WORKERS)
    join = services["pdserve-router-join"]["spec"]
    assert join["clusterIP"] == "None"
    assert join["publishNotReadyAddresses"] is True


def test_endpoints_notice_a_gateway_shutdown_before_it_refuses_requests(
    servers: dict[str, Workload],
) -> None:
    gateway = servers["gateway"]
    lame_duck_s, drain_s = gateway.number("PDSERVE_LAME_DUCK_S"), gateway.number("PDSERVE_DRAIN_S")
    probe = container(gateway)["readinessProbe"]
    assert lame_duck_s is not None
    assert drain_s is not None
    assert 2 * probe["periodSeconds"] < lame_duck_s < drain_s / 2


def test_pods_of_a_role_end_one_at_a_time(
    manifests: list[Manifest], servers: dict[str, Workload]
) -> None:
    """Applies to rolling updates; the rule `budgets` covers node drains."""
    least = {
        scaler["spec"]["scaleTargetRef"]["name"]: scaler["spec"]["minReplicas"]
        for scaler in of_kind(manifests, "HorizontalPodAutoscaler").values()
    }
    for role, server in servers.items():
        if server.kind == "LeaderWorkerSet":
            update = server.manifest["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
        else:
            update = server.manifest["spec"].get("strategy", {}).get("rollingUpdate", {})
        if "nvidia.com/gpu" in container(server)["resources"]["limits"]:
            assert (update["maxUnavailable"], update["maxSurge"]) == (1, 0)
        elif role not in WORKERS:
            assert update["maxUnavailable"] == 0
            assert least[server.name] >= 2


def test_startup_probes_allow_time_to_load_a_model(servers: dict[str, Workload]) -> None:
    for role in WORKERS:
        probe = container(servers[role])["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 600


def test_pods_run_as_the_user_of_the_image(servers: dict[str, Workload]) -> None:
    for server in servers.values():
        user = server.pod["securityContext"]
        line = f"USER {user['runAsUser']}:{user['runAsGroup']}"
        assert line in (ROOT / "Dockerfile").read_text()


def test_secrets_are_not_environment_variables(servers: dict[str, Workload]) -> None:
    for role, server in servers.items():
        secret = {o.env for o in options(role).values() if o.secret}
        given = {n: e for n, e in server.environment().items() if n in secret}
        assert not given, "a variable cannot be replaced while its process runs"
        assert ("PDSERVE_API_KEY_FILE" in server.environment()) == (role == "gateway")


def test_only_gateways_receive_the_database_url() -> None:
    """The database has a single password at a time, so gateways are restarted in turn to change
    it."""
    for workload in workloads(rendered("components/database")):
        given = workload.environment().get("PDSERVE_DATABASE_URL")
        assert (given is not None) == (workload.role == "gateway")
        if given is not None:
            assert given["valueFrom"]["secretKeyRef"]["name"] == "pdserve-database"


def test_api_keys_are_in_a_file_that_is_reloaded(servers: dict[str, Workload]) -> None:
    gateway = servers["gateway"]
    path = gateway.environment()["PDSERVE_API_KEY_FILE"]["value"]
    (mount,) = [m for m in container(gateway)["volumeMounts"] if path.startswith(m["mountPath"])]
    assert "subPath" not in mount, "a subPath mount would never be refreshed"
    (volume,) = [v for v in gateway.pod["volumes"] if v["name"] == mount["name"]]
    assert not volume["secret"].get("optional"), "without the file, requests would need no key"


def test_trace_folders_have_room_for_the_rings_of_dead_processes(
    servers: dict[str, Workload],
) -> None:
    """The volume holds as many rings as are kept in a folder, so that a report of the pod includes
    them."""
    for role in ("router", *WORKERS):
        folder = servers[role].environment()["PDSERVE_TRACE_DIR"]["value"]
        (mount,) = [m for m in container(servers[role])["volumeMounts"] if m["mountPath"] == folder]
        (volume,) = [v for v in servers[role].pod["volumes"] if v["name"] == mount["name"]]
        room = float(volume["emptyDir"]["sizeLimit"].removesuffix("Mi"))
        assert room > (MAX_DEAD_RINGS + 1) * options(role)["PDSERVE_TRACE_MB"].default


def test_each_role_has_its_own_certificate(
    manifests: list[Manifest], servers: dict[str, Workload]
) -> None:
    certificates = of_kind(manifests, "Certificate")
    for role, server in servers.items():
        (secret,) = [v["secret"]["secretName"] for v in server.pod["volumes"] if v["name"] == "tls"]
        (certificate,) = [c for c in certificates.values() if c["spec"]["secretName"] == secret]
        assert certificate["spec"]["dnsNames"] == [Role(role).dns_name]
        assert {"server auth", "client auth"} <= set(certificate["spec"]["usages"])
        env, mounts = server.environment(), container(server)["volumeMounts"]
        (folder,) = [mount["mountPath"] for mount in mounts if mount["name"] == "tls"]
        files = {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}
        for name, file in files.items():
            assert env[f"PDSERVE_CLUSTER_{name}"]["value"] == f"{folder}/{file}"


STRANGER = {"app.kubernetes.io/name": "gateway"}  # belongs to another application in this namespace


def policies(manifests: list[Manifest], labels: dict[str, str], way: str) -> Iterator[Manifest]:
    """Yield the rules of a pod's policies in one direction."""
    for policy in of_kind(manifests, "NetworkPolicy").values():
        if selects(policy["spec"]["podSelector"], labels):
            yield from policy["spec"].get(way) or []


def meets(peers: list[Manifest] | None, labels: dict[str, str]) -> bool:
    """Return whether a rule's peers include pods of this namespace with these labels. None: all
    peers."""
    if peers is None:
        return True
    own = [p["podSelector"] for p in peers if "podSelector" in p and "namespaceSelector" not in p]
    return any(selects(selector, labels) for selector in own)


def allowed(manifests: list[Manifest], source: dict[str, str], target: dict[str, str]) -> set[str]:
    """Return the names of the target's ports that both pods' policies let the source reach. A pod
    that no policy selects (a stranger) may send anywhere."""
    into = {
        p["port"]
        for r in policies(manifests, target, "ingress")
        if meets(r.get("from"), source)
        for p in r["ports"]
    }
    if source == STRANGER:
        return into
    out = {
        p["port"]
        for r in policies(manifests, source, "egress")
        if meets(r.get("to"), target)
        for p in r["ports"]
    }
    return into & out


def test_which_roles_may_connect_to_which_ports(
    manifests: list[Manifest], servers: dict[str, Workload]
) -> None:
    labels = {role: server.labels for role, server in servers.items()} | {"stranger": STRANGER}
    reach = {
        (source, target): allowed(manifests, labels[source], labels[target])
        for source in labels
        for target in ROLES
    }
    expected = {
        ("stranger", "gateway"): {"http", "grpc"},
        ("gateway", "router"): {"grpc"},
        ("prefill", "router"): {"grpc"},
        ("decode", "router"): {"grpc"},
        ("router", "prefill"): {"grpc"},
        ("router", "decode"): {"grpc"},
        ("prefill", "decode"): {"kv"},
        ("decode", "decode"): {"kv"},  # a migration
    }
    assert {pair: found for pair, found in reach.items() if found} == expected


def test_overlays_choose_the_device(servers: dict[str, Workload]) -> None:
    for role in WORKERS:
        device = servers[role].environment()["PDSERVE_DEVICE"]["value"]
        gpus = container(servers[role])["resources"]["limits"].get("nvidia.com/gpu", "0")
        assert (device, gpus) in (("cpu", "0"), ("cuda", "1"))


def test_workers_share_host_namespaces_only_on_gpus(servers: dict[str, Workload]) -> None:
    """cuda_ipc needs them. With hostIPC, /dev/shm is the node's, and the workers' sockets are
    there."""
    shared = 0
    for role, server in servers.items():
        spec, env = server.pod, server.environment()
        on_gpu = "nvidia.com/gpu" in container(server)["resources"]["limits"]
        assert (spec.get("hostIPC", False), spec.get("hostPID", False)) == (on_gpu, on_gpu), role
        if on_gpu:
            assert env["PDSERVE_SHM_DIR"]["value"].startswith("/dev/shm/")
            assert env["PDSERVE_KV_TRANSPORT"]["value"] == "auto"
            shared += 1
    assert shared in (0, 2)


def test_worker_groups_have_the_same_pods_as_the_deployments_they_replace() -> None:
    of_gpu = {w.role: w for w in workloads(rendered("overlays/gpu"))}
    grouped = [w for w in workloads(rendered("overlays/racks")) if w.kind == "LeaderWorkerSet"]
    assert [w.role for w in grouped] == ["decode", "prefill"]
    for workload in grouped:
        assert workload.template == of_gpu[workload.role].template


def test_every_variable_name_in_use_belongs_to_a_command() -> None:
    """Includes comments, and files that no overlay uses."""
    known = {ENV_PREFIX + name.upper() for name in known_names()}
    for path in (ROOT / "k8s").rglob("*.yaml"):
        found = set(re.findall(r"PDSERVE_[A-Z_]+[A-Z]", path.read_text()))
        assert found <= known, path
