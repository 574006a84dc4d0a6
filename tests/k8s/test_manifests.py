"""Both overlays: rendered by kubectl, valid against the strict schemas, and true to the program."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pdserve.services.cli.commands import COMMANDS, known_names
from pdserve.services.host.auth.roles import Role
from pdserve.services.options.options import ENV_PREFIX, Option

ROOT = Path(__file__).parents[2]
OVERLAYS = ("cpu", "gpu")
ROLES = ("gateway", "router", "prefill", "decode")
Manifest = dict[str, Any]


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    if not (kubectl := shutil.which("kubectl")):
        pytest.skip("NO KUBECTL: the manifests were not rendered and nothing about them is known")
    folder = ROOT / "k8s/overlays" / request.param
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [m for m in yaml.safe_load_all(done.stdout) if m]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


def pod(deployment: Manifest) -> Manifest:
    spec: Manifest = deployment["spec"]["template"]["spec"]
    return spec


def container(deployment: Manifest) -> Manifest:
    (only,) = pod(deployment)["containers"]
    found: Manifest = only
    return found


def environment(deployment: Manifest) -> dict[str, Manifest]:
    entries = container(deployment)["env"]
    assert len({e["name"] for e in entries}) == len(entries)
    return {e["name"]: e for e in entries}


def options(role: str) -> dict[str, Option]:
    return {o.env: o for s in COMMANDS[role].sections() for o in s.options}


def test_schemas(manifests: list[Manifest]) -> None:
    assert len(manifests) >= 11
    for manifest in manifests:
        if not manifest["apiVersion"].startswith("cert-manager.io/"):  # its schemas are elsewhere
            kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_the_validation_would_find_a_mistake(manifests: list[Manifest]) -> None:
    deployment = of_kind(manifests, "Deployment")["gateway"]
    deployment["spec"]["replicaz"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.37", strict=True)
    del deployment["spec"]["replicaz"]


def test_roles_run_their_commands(manifests: list[Manifest]) -> None:
    deployments = of_kind(manifests, "Deployment")
    assert set(deployments) == set(ROLES)
    for role, deployment in deployments.items():
        assert container(deployment)["args"] == [role]
        image = container(deployment)["image"]
        assert image == ("pdserve-worker" if role in ("prefill", "decode") else "pdserve-control")
        assert (
            f"FROM runtime AS {image.removeprefix('pdserve-')}\n"
            in (ROOT / "Dockerfile").read_text() + "\n"
        )


def test_variables_are_options_with_good_values(manifests: list[Manifest]) -> None:
    checked = 0
    for role, deployment in of_kind(manifests, "Deployment").items():
        known = options(role)
        for name, entry in environment(deployment).items():
            if not name.startswith(ENV_PREFIX):
                assert name == "POD_IP"
                continue
            assert name in known, f"{role} does not know {name}"
            if value := entry.get("value"):
                known[name].parse(value, name)
                checked += 1
    assert checked > 20


def test_variables_are_defined_before_they_are_used(manifests: list[Manifest]) -> None:
    """Kubernetes expands $(NAME) only if NAME comes earlier in the list."""
    used = 0
    for deployment in of_kind(manifests, "Deployment").values():
        seen: set[str] = set()
        for name, entry in environment(deployment).items():
            for other in re.findall(r"\$\((\w+)\)", entry.get("value") or ""):
                assert other in seen
                used += 1
            seen.add(name)
    assert used >= 3


def test_no_service_can_inject_a_variable(manifests: list[Manifest]) -> None:
    """A service link named PDSERVE_... would be refused as an unknown option."""
    for deployment in of_kind(manifests, "Deployment").values():
        assert pod(deployment)["enableServiceLinks"] is False


def test_selectors_meet_their_pods(manifests: list[Manifest]) -> None:
    deployments = of_kind(manifests, "Deployment")
    labels = {name: d["spec"]["template"]["metadata"]["labels"] for name, d in deployments.items()}
    for name, deployment in deployments.items():
        wanted = deployment["spec"]["selector"]["matchLabels"].items()
        assert [n for n, found in labels.items() if wanted <= found.items()] == [name]
    for service in of_kind(manifests, "Service").values():
        wanted = service["spec"]["selector"].items()
        (target,) = [n for n, found in labels.items() if wanted <= found.items()]
        ports = {p["name"] for p in container(deployments[target])["ports"]}
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= ports


WORKER = {
    "grpc": "PDSERVE_BIND",
    "metrics": "PDSERVE_METRICS_PORT",
    "probe": "PDSERVE_PROBE_PORT",
}


def test_ports_are_those_that_the_program_binds(manifests: list[Manifest]) -> None:
    binds = {
        "gateway": {"http": "PDSERVE_PORT", "grpc": "PDSERVE_GRPC_PORT"},
        "router": WORKER,
        "prefill": WORKER,
        "decode": WORKER | {"kv": "PDSERVE_DATA_BIND"},
    }
    for role, deployment in of_kind(manifests, "Deployment").items():
        ports = {p["name"]: p["containerPort"] for p in container(deployment)["ports"]}
        env = environment(deployment)
        bound = {n: int(env[v]["value"].rpartition(":")[2]) for n, v in binds[role].items()}
        assert ports == bound
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            check = container(deployment)[probe]
            port = check["grpc"]["port"] if "grpc" in check else ports[check["httpGet"]["port"]]
            assert port in ports.values()


def test_addresses_lead_to_services(manifests: list[Manifest]) -> None:
    services = of_kind(manifests, "Service")
    for role, deployment in of_kind(manifests, "Deployment").items():
        if role == "router":
            continue
        name, _, port = environment(deployment)["PDSERVE_ROUTERS"]["value"].partition(":")
        assert int(port) in [p["port"] for p in services[name]["spec"]["ports"]]
        assert (name == "router-join") == (role in ("prefill", "decode"))
    join = services["router-join"]["spec"]
    assert join["clusterIP"] == "None"
    assert join["publishNotReadyAddresses"] is True


def test_pods_have_time_to_drain(manifests: list[Manifest]) -> None:
    for deployment in of_kind(manifests, "Deployment").values():
        drain_s = float(environment(deployment)["PDSERVE_DRAIN_S"]["value"])
        assert pod(deployment)["terminationGracePeriodSeconds"] > drain_s + 10
        assert "lifecycle" not in container(deployment), "a preStop would take its share of it"


def test_endpoints_learn_of_a_gateway_s_end_before_it_refuses(manifests: list[Manifest]) -> None:
    gateway = of_kind(manifests, "Deployment")["gateway"]
    env = environment(gateway)
    probe = container(gateway)["readinessProbe"]
    lame_duck_s = float(env["PDSERVE_LAME_DUCK_S"]["value"])
    assert 2 * probe["periodSeconds"] < lame_duck_s < float(env["PDSERVE_DRAIN_S"]["value"]) / 2


def test_one_pod_of_a_role_ends_at_a_time(manifests: list[Manifest]) -> None:
    """By a rolling update or by the drain of a node; the others take what it ran."""
    deployments = of_kind(manifests, "Deployment")
    budgets = of_kind(manifests, "PodDisruptionBudget")
    assert set(budgets) == set(ROLES)
    for role, deployment in deployments.items():
        budget = budgets[role]["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]
        on_gpu = "nvidia.com/gpu" in container(deployment)["resources"]["limits"]
        update = deployment["spec"].get("strategy", {}).get("rollingUpdate", {})
        if on_gpu:
            assert (update["maxUnavailable"], update["maxSurge"]) == (1, 0)
        elif role in ("gateway", "router"):
            assert update["maxUnavailable"] == 0
            assert deployment["spec"]["replicas"] >= 2


def test_loading_is_not_mistaken_for_death(manifests: list[Manifest]) -> None:
    for role in ("prefill", "decode"):
        probe = container(of_kind(manifests, "Deployment")[role])["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 600


def test_pods_have_no_rights(manifests: list[Manifest]) -> None:
    for deployment in of_kind(manifests, "Deployment").values():
        spec, only = pod(deployment), container(deployment)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert only["securityContext"]["allowPrivilegeEscalation"] is False
        assert only["securityContext"]["readOnlyRootFilesystem"] is True
        assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert only["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in only["resources"]["limits"]
        uid = spec["securityContext"]["runAsUser"]
        assert (
            f"USER {uid}:{spec['securityContext']['runAsGroup']}"
            in (ROOT / "Dockerfile").read_text()
        )


def test_the_secret_is_never_written_down(manifests: list[Manifest]) -> None:
    assert not of_kind(manifests, "Secret")
    for role, deployment in of_kind(manifests, "Deployment").items():
        secret = {o.env for o in options(role).values() if o.secret}
        given = {n: e for n, e in environment(deployment).items() if n in secret}
        database = given.pop("PDSERVE_DATABASE_URL", None)
        assert not given, "a variable cannot be replaced while its process runs"
        assert (database is not None) == (role == "gateway")
        if database:  # which has no second password meanwhile: gateways are restarted in turn
            assert database["valueFrom"]["secretKeyRef"]["optional"] is True
        assert ("PDSERVE_API_KEY_FILE" in environment(deployment)) == (role == "gateway")


def test_the_keys_of_clients_are_a_file_that_is_read_again(manifests: list[Manifest]) -> None:
    gateway = of_kind(manifests, "Deployment")["gateway"]
    path = environment(gateway)["PDSERVE_API_KEY_FILE"]["value"]
    (mount,) = [m for m in container(gateway)["volumeMounts"] if path.startswith(m["mountPath"])]
    assert "subPath" not in mount, "it would stay as it was"
    (volume,) = [v for v in pod(gateway)["volumes"] if v["name"] == mount["name"]]
    assert not volume["secret"].get("optional"), "without it everybody could ask"


def test_each_role_has_its_own_certificate(manifests: list[Manifest]) -> None:
    certificates = of_kind(manifests, "Certificate")
    for role, deployment in of_kind(manifests, "Deployment").items():
        (secret,) = [
            v["secret"]["secretName"] for v in pod(deployment)["volumes"] if v["name"] == "tls"
        ]
        (certificate,) = [c for c in certificates.values() if c["spec"]["secretName"] == secret]
        assert certificate["spec"]["dnsNames"] == [Role(role).dns_name]
        assert {"server auth", "client auth"} <= set(certificate["spec"]["usages"])
        env, mounts = environment(deployment), container(deployment)["volumeMounts"]
        (folder,) = [mount["mountPath"] for mount in mounts if mount["name"] == "tls"]
        files = {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}
        for name, file in files.items():
            assert env[f"PDSERVE_CLUSTER_{name}"]["value"] == f"{folder}/{file}"


def allowed(manifests: list[Manifest], source: str, target: str) -> Iterator[str]:
    """Names of the target's ports that the policies let the source reach."""
    for policy in of_kind(manifests, "NetworkPolicy").values():
        if target not in selected(policy["spec"]["podSelector"]):
            continue
        for rule in policy["spec"]["ingress"]:
            froms = rule.get("from")
            if froms is None or any(source in selected(f.get("podSelector")) for f in froms):
                yield from (port["port"] for port in rule["ports"])


def selected(selector: Manifest | None) -> list[str]:
    if not selector:
        return []
    key = "app.kubernetes.io/name"
    names = [selector["matchLabels"][key]] if "matchLabels" in selector else []
    for expression in selector.get("matchExpressions", ()):
        assert (expression["key"], expression["operator"]) == (key, "In")
        names += expression["values"]
    return names


def test_who_may_talk_to_whom(manifests: list[Manifest]) -> None:
    reach = {
        (source, target): set(allowed(manifests, source, target))
        for source in (*ROLES, "stranger")
        for target in ROLES
    }
    everyone = {(s, "gateway"): {"http", "grpc"} for s in (*ROLES, "stranger")}
    expected = everyone | {
        ("gateway", "router"): {"grpc"},
        ("prefill", "router"): {"grpc"},
        ("decode", "router"): {"grpc"},
        ("router", "prefill"): {"grpc"},
        ("router", "decode"): {"grpc"},
        ("prefill", "decode"): {"kv"},
        ("decode", "decode"): {"kv"},  # a migration
    }
    assert {pair: ports for pair, ports in reach.items() if ports} == expected


def test_the_overlays_choose_the_device(manifests: list[Manifest]) -> None:
    for role in ("prefill", "decode"):
        deployment = of_kind(manifests, "Deployment")[role]
        device = environment(deployment)["PDSERVE_DEVICE"]["value"]
        gpus = container(deployment)["resources"]["limits"].get("nvidia.com/gpu", "0")
        assert (device, gpus) in (("cpu", "0"), ("cuda", "1"))


def test_workers_share_namespaces_on_gpus_only(manifests: list[Manifest]) -> None:
    """For cuda_ipc; with hostIPC /dev/shm is the node's, and their sockets meet there."""
    shared = 0
    for role, deployment in of_kind(manifests, "Deployment").items():
        spec, env = pod(deployment), environment(deployment)
        on_gpu = "nvidia.com/gpu" in container(deployment)["resources"]["limits"]
        assert (spec.get("hostIPC", False), spec.get("hostPID", False)) == (on_gpu, on_gpu), role
        if on_gpu:
            assert env["PDSERVE_SHM_DIR"]["value"].startswith("/dev/shm/")
            assert env["PDSERVE_KV_TRANSPORT"]["value"] == "auto"
            shared += 1
    assert shared in (0, 2)


def test_every_name_is_known_to_some_command() -> None:
    """Also in comments and in files that no overlay uses."""
    known = {ENV_PREFIX + name.upper() for name in known_names()}
    for path in (ROOT / "k8s").rglob("*.yaml"):
        found = set(re.findall(r"PDSERVE_[A-Z_]+[A-Z]", path.read_text()))
        assert found <= known, path
