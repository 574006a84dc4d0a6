"""Static checks of the compose files: known setting names, start order, drain time."""

import re
import runpy
import subprocess
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cli.commands import COMMANDS, known_names
from pdserve.cli.options import ENV_PREFIX
from pdserve.services.common.options import GRACE_S, STOP_S
from pdserve.services.worker.settings import DEREGISTER_S, ENGINE_CLOSE_S

ROOT = Path(__file__).parents[2]
OBSERVABILITY = ROOT / "k8s/observability"
WORKERS = ("prefill", "decode")
FILES = [
    "compose.ha.yml",
    "compose.pools.yml",
    "docker-compose.gpu.yml",
    "docker-compose.hub.yml",
    "docker-compose.observability.yml",
    "docker-compose.yml",
]
IMAGE = r"[\w./-]+:v?\d+(\.\d+)+[\w-]*(@sha256:[0-9a-f]{64})?"  # `make pin` adds the digest
STOPPED_S = GRACE_S + STOP_S + DEREGISTER_S + ENGINE_CLOSE_S  # time to stop after a drain
# Variables that only the compose files use: model paths, GPU, stop grace period, memory limits.
COMPOSE_ONLY = {"PDSERVE_MODELS", "PDSERVE_GPU", "PDSERVE_MODEL_B", "PDSERVE_STOP_GRACE"} | {
    f"PDSERVE_{name}_MEMORY" for name in ("GATEWAY", "ROUTER", "WORKER")
}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return found


class Overlay(yaml.SafeLoader):
    """YAML loader that accepts compose's `!reset` tag, which removes a value in an overlay."""


Overlay.add_constructor("!reset", lambda loader, node: loader.construct_sequence(node))


@pytest.fixture(scope="module")
def twice() -> dict[str, Any]:
    found: dict[str, Any] = Overlay((ROOT / "compose.ha.yml").read_text()).get_single_data()
    return found


def default(value: object) -> str:
    """Return what `${NAME:-default}` expands to when NAME is unset."""
    return re.sub(r"\$\{\w+(?::?-([^}]*)|:\?[^}]*)\}", lambda m: m.group(1) or "", str(value))


def test_variables_are_known_options_with_valid_values(services: dict[str, Any]) -> None:
    assert set(services) == {"gateway", "router", "prefill", "decode"}
    checked = 0
    for role, service in services.items():
        assert service["command"] == [role]
        known = {o.env: o for s in COMMANDS[role].sections() for o in s.options}
        for name, value in service["environment"].items():
            assert name in known, f"{role} does not know {name}"
            if text := default(value):
                known[name].parse(text, name)
                checked += 1
    assert checked > 20


def test_every_variable_name_in_use_belongs_to_a_command() -> None:
    known = {ENV_PREFIX + name.upper() for name in known_names()} | COMPOSE_ONLY
    files = [path.name for path in ROOT.glob("*compose*.y*ml")]
    assert sorted(files) == FILES
    for name in (*files, "Dockerfile"):
        found = set(re.findall(r"PDSERVE_[A-Z_]+[A-Z]", (ROOT / name).read_text()))
        assert found <= known, name


@pytest.fixture(scope="module")
def watched() -> dict[str, Any]:
    """Services of the observability overlay."""
    text = (ROOT / "docker-compose.observability.yml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def test_traces_reach_the_collector_of_the_overlay(
    services: dict[str, Any], watched: dict[str, Any]
) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for role in services:
        assert default(watched[role]["build"]["args"]["CONTROL_EXTRAS"]) in extras
        known = {o.env: o for s in COMMANDS[role].sections() for o in s.options}
        defaults = {n: default(value) for n, value in watched[role]["environment"].items()}
        parsed = {name: known[name].parse(value, name) for name, value in defaults.items()}
        assert parsed["PDSERVE_OTLP_TRACES_ENDPOINT"] == "http://collector:4318"
        assert parsed["PDSERVE_OTLP_TRACES_SAMPLE"] == 1.0
    (config,) = watched["collector"]["volumes"]
    collector = yaml.safe_load((ROOT / config.partition(":")[0]).read_text())
    assert collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"].endswith(":4318")
    (pipeline,) = collector["service"]["pipelines"].values()
    (exporter,) = pipeline["exporters"]
    assert collector["exporters"][exporter]["endpoint"] == "jaeger:4317"


def test_everything_is_scraped_once(services: dict[str, Any], watched: dict[str, Any]) -> None:
    """Prometheus scrapes each process for its own metrics; no gateway exports the fleet's."""
    assert watched["gateway"]["environment"]["PDSERVE_FLEET_METRICS"] == "false"
    assert watched["gateway"]["environment"]["PDSERVE_OPEN_METRICS"] == "true", (
        "the scraper has no API key"
    )
    ports = {"gateway": services["gateway"]["environment"]["PDSERVE_PORT"]}
    for role in ("router", "prefill", "decode"):
        ports[role] = watched[role]["environment"]["PDSERVE_METRICS_PORT"]
    body = {}
    for job in yaml.safe_load((OBSERVABILITY / "compose/prometheus.yml").read_text())[
        "scrape_configs"
    ]:
        (found,) = job["dns_sd_configs"]
        (role,) = found["names"]
        assert job["job_name"] == f"pdserve-{role}"
        body[role] = found["port"]
        assert bool(job.get("metric_relabel_configs")) == (role in WORKERS)
    assert body == ports


def test_files_that_the_overlay_mounts_exist(watched: dict[str, Any]) -> None:
    tools = {name for name, service in watched.items() if "image" in service}
    assert tools == {"prometheus", "grafana", "collector", "jaeger"}
    for name in tools:
        service = watched[name]
        published = ["clients"] if "ports" in service else []
        assert service["networks"] == ["pdserve", *published]
        files = [v.split(":") for v in service.get("volumes", ()) if v.startswith(".")]
        assert all(mode == "ro" for _, _, mode in files)
        mounted = {source.removeprefix("./"): path for source, path, _ in files}
        if name == "grafana":
            (provider,) = yaml.safe_load((OBSERVABILITY / "compose/boards.yml").read_text())[
                "providers"
            ]
            assert provider["options"]["path"] == mounted["k8s/observability/boards"]
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ()))
    sources = yaml.safe_load((OBSERVABILITY / "compose/datasources.yml").read_text())
    for source in sources["datasources"]:
        host = source["url"].removeprefix("http://").partition(":")[0]
        assert host in tools
        assert source["uid"] == source["type"] == host


def in_force(file: str, base: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the services of a file merged with their docker-compose.yml definitions."""
    found = {}
    for name, service in Overlay((ROOT / file).read_text()).get_single_data()["services"].items():
        under = base.get(service.get("extends", {}).get("service", name), {})
        found[name] = {**under, **service}
    return found


def test_containers_have_no_privileges_and_have_limits(
    subtests: pytest.Subtests, services: dict[str, Any]
) -> None:
    """Applies to the project's images and to third-party images."""
    for file in FILES:
        with subtests.test(file):
            for name, service in in_force(file, services).items():
                assert service["read_only"] is True, name
                assert service["cap_drop"] == ["ALL"], name
                assert service["security_opt"] == ["no-new-privileges:true"], name
                assert "privileged" not in service, name
                assert service["pids_limit"] > 0, name
                assert re.fullmatch(r"\d+[mg]", default(service["mem_limit"])), name
                is_own = service["image"].startswith("pdserve-")
                if is_own:
                    assert service["tmpfs"] == ["/tmp"], name
                else:
                    assert re.fullmatch(IMAGE, service["image"]), "a version"


def test_every_volume_is_declared_or_is_a_file_of_the_repository(
    subtests: pytest.Subtests, services: dict[str, Any]
) -> None:
    for file in FILES:
        with subtests.test(file):
            made = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["volumes"]
            made |= Overlay((ROOT / file).read_text()).get_single_data().get("volumes", {})
            for name, service in in_force(file, services).items():
                for volume in service.get("volumes", ()):
                    source = default(volume).partition(":")[0]
                    assert source in made or (
                        source.startswith("./") and (ROOT / source).exists()
                    ), name


def test_nothing_reaches_the_internet_without_the_hub_overlay(services: dict[str, Any]) -> None:
    networks = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["networks"]
    assert networks["pdserve"] == {"internal": True}
    masquerade = {"com.docker.network.bridge.enable_ip_masquerade": "false"}
    assert networks["clients"] == {"driver_opts": masquerade}
    assert set(networks) == {"pdserve", "clients"}
    for role, service in services.items():
        assert service["networks"] == (["pdserve"] + ["clients"] * (role == "gateway"))
    hub = yaml.safe_load((ROOT / "docker-compose.hub.yml").read_text())
    assert hub["networks"] == {"hub": {}}
    assert {role: s["networks"] for role, s in hub["services"].items()} == {
        role: ["pdserve", "hub"] for role in WORKERS
    }


def grace_s(service: dict[str, Any]) -> float:
    return float(default(service["stop_grace_period"]).removesuffix("s"))


def test_the_stop_grace_period_covers_the_drain(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["init"] is True
        drain_s = float(default(service["environment"]["PDSERVE_DRAIN_S"]))
        assert grace_s(service) > drain_s + STOPPED_S


def test_services_start_after_their_dependencies_are_healthy(services: dict[str, Any]) -> None:
    assert "depends_on" not in services["router"]
    for role in ("prefill", "decode", "gateway"):
        assert services[role]["depends_on"]["router"] == {"condition": "service_healthy"}
    assert set(services["gateway"]["depends_on"]) == {"router", "prefill", "decode"}
    for service in services.values():
        test = service["healthcheck"]["test"]
        assert test[:3] == ["CMD", "pdserve", "health"]
        port = int(re.search(r":(\d+)", test[3].removeprefix("http:")).group(1))  # type: ignore[union-attr]
        binds = [str(v) for n, v in service["environment"].items() if n.endswith(("BIND", "PORT"))]
        assert any(default(b).rpartition(":")[2] == str(port) for b in binds)


def test_only_the_gateway_is_published_and_only_on_loopback(services: dict[str, Any]) -> None:
    for role, service in services.items():
        ports = service.get("ports", [])
        assert bool(ports) == (role == "gateway")
        assert all(default(port).startswith("127.0.0.1:") for port in ports)


def test_the_cluster_secret_is_required_and_the_network_is_trusted(
    services: dict[str, Any],
) -> None:
    for service in services.values():
        assert service["environment"]["PDSERVE_CLUSTER_SECRET"].startswith(
            "${PDSERVE_CLUSTER_SECRET:?"
        )
        assert service["environment"]["PDSERVE_TRUST_NETWORK"] == "true"


def test_workers_share_the_folder_of_shared_memory_sockets(services: dict[str, Any]) -> None:
    volumes = []
    for role in ("prefill", "decode"):
        folder = services[role]["environment"]["PDSERVE_SHM_DIR"]
        volumes += [v for v in services[role]["volumes"] if v.endswith(f":{folder}")]
    assert len(volumes) == 2
    assert len(set(volumes)) == 1


def test_the_database_is_in_a_volume_that_the_gateway_user_owns(services: dict[str, Any]) -> None:
    url = default(services["gateway"]["environment"]["PDSERVE_DATABASE_URL"])
    folder = url.removeprefix("sqlite:///").rpartition("/")[0]
    assert services["gateway"]["volumes"][0] == f"data:{folder}"
    assert re.search(rf"install -d -o pdserve .*{folder} ", (ROOT / "Dockerfile").read_text())


def test_trace_rings_outlive_their_processes_and_reports_can_read_them(
    services: dict[str, Any],
) -> None:
    """All rings are in one volume, which the gateway's container mounts read-only."""
    (folder,) = {services[r]["environment"]["PDSERVE_TRACE_DIR"] for r in ("router", *WORKERS)}
    for role, service in services.items():
        mode = ":ro" if role == "gateway" else ""
        assert f"rings:{folder}{mode}" in service["volumes"]
    assert re.search(rf"install -d -o pdserve .*{folder} ", (ROOT / "Dockerfile").read_text())
    assert f"--trace-dir {folder} " in (ROOT / "docs/terminal.md").read_text()


def test_the_gpu_overlay_only_changes_workers() -> None:
    overlay = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
    assert set(overlay) == {"prefill", "decode"}
    for service in overlay.values():
        environment = dict(service["environment"])
        gpu = environment.pop("NVIDIA_VISIBLE_DEVICES")
        assert environment.pop("NVIDIA_DRIVER_CAPABILITIES") == "compute,utility"
        assert environment == {"PDSERVE_DEVICE": "cuda"}
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert device["device_ids"] == [gpu], "the reserved and the visible GPU differ"


def test_the_gpu_overlay_meets_the_requirements_of_cuda_ipc() -> None:
    """CUDA IPC needs one GPU (test above), shared PID and IPC namespaces, CuPy and the socket
    folder."""
    overlay = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for service in overlay.values():
        assert (service["ipc"], service["pid"]) == ("host", "host")
        chosen = service["build"]["args"]["WORKER_EXTRAS"].split()
        assert chosen == ["torch", "cuda"]
        assert any(name.startswith("cupy") for extra in chosen for name in extras[extra])
        assert any(name.startswith("triton") for extra in chosen for name in extras[extra])
        assert "gcc" in service["build"]["args"]["WORKER_PACKAGES"].split(), (
            "Triton needs a C compiler"
        )
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "ARG WORKER_EXTRAS=\n" in dockerfile
    assert "ARG WORKER_PACKAGES=\n" in dockerfile
    assert "TRITON_CACHE_DIR=/tmp/" in dockerfile, "the root file system is read-only in k8s"
    assert not {"torch", "triton"} & (locked("control") | locked("worker")).keys(), (
        "CPU images must not contain torch"
    )


def test_the_second_pool_differs_from_the_first_only_in_its_model(services: dict[str, Any]) -> None:
    overlay = yaml.safe_load((ROOT / "compose.pools.yml").read_text())["services"]
    assert set(overlay) == {*WORKERS, *(f"{role}-b" for role in WORKERS)}
    engines = int(services["decode"]["environment"]["PDSERVE_HOST_ENGINES"])
    for role in WORKERS:
        service = overlay[f"{role}-b"]
        assert service["extends"] == {"file": "docker-compose.yml", "service": role}
        known = {o.env: o for s in COMMANDS[role].sections() for o in s.options}
        assert set(service["environment"]) <= known.keys()
        assert service["environment"]["PDSERVE_HOST_ENGINES"] == 2 * engines


def test_each_pool_has_time_for_its_longest_stream(subtests: pytest.Subtests) -> None:
    """A stream cannot move to the other pool, which has different weights."""
    services = yaml.safe_load((ROOT / "compose.pools.yml").read_text())["services"]
    gateway = {o.name: o for s in COMMANDS["gateway"].sections() for o in s.options}
    for pool, role in product(("", "-b"), WORKERS):
        with subtests.test(role + pool):
            service = services[role + pool]
            drain_s = float(default(service["environment"]["PDSERVE_DRAIN_S"]))
            assert drain_s >= gateway["request_timeout_s"].default
            assert grace_s(service) > drain_s + STOPPED_S


def test_the_ha_overlay_runs_two_replicas_of_every_process(
    services: dict[str, Any], twice: dict[str, Any]
) -> None:
    assert set(twice["services"]) == {*services, "proxy"}
    for role in services:
        overlay = twice["services"][role]
        assert overlay["deploy"]["replicas"] == 2
        known = {o.env: o for s in COMMANDS[role].sections() for o in s.options}
        for name, value in overlay.get("environment", {}).items():
            known[name].parse(str(value), name)
    engines = {twice["services"][r]["environment"]["PDSERVE_HOST_ENGINES"] for r in WORKERS}
    assert engines == {2 * len(WORKERS)}


def test_the_proxy_configuration_is_mounted(twice: dict[str, Any]) -> None:
    """Compose cannot copy a configuration into a container whose root file system is read-only."""
    proxy = twice["services"]["proxy"]
    (mounted,) = proxy["volumes"]
    source, target, mode = mounted.split(":")
    assert (ROOT / source).samefile(ROOT / "docker/haproxy.cfg")
    assert (target, mode) == (proxy["command"][-1], "ro")


def test_no_compose_file_uses_configs_or_secrets(subtests: pytest.Subtests) -> None:
    """Compose cannot write them to a read-only root file system and fails only at container
    start."""
    for name in FILES:
        with subtests.test(name):
            found = Overlay((ROOT / name).read_text()).get_single_data()
            assert "configs" not in found
            assert "secrets" not in found


def test_the_ha_overlay_publishes_only_the_proxy(
    services: dict[str, Any], twice: dict[str, Any]
) -> None:
    assert twice["services"]["gateway"]["ports"] == []
    proxy = twice["services"]["proxy"]
    assert proxy["ports"] == services["gateway"]["ports"]
    config = (ROOT / "docker/haproxy.cfg").read_text()
    ports = [port.rpartition(":")[2] for port in proxy["ports"]]
    assert re.findall(r"bind :(\d+)", config) == ports
    assert sorted(set(re.findall(r"server.* gateway:(\d+)", config))) == sorted(ports)


def test_the_proxy_notices_a_shutdown_before_the_gateway_refuses_requests(
    services: dict[str, Any], twice: dict[str, Any]
) -> None:
    config = (ROOT / "docker/haproxy.cfg").read_text()
    assert "uri /ready" in config
    found = re.search(r"check inter (\d+)ms fall (\d+)", config)
    assert found
    noticed_s = int(found[1]) / 1000 * (int(found[2]) + 1)
    lame_duck_s = twice["services"]["gateway"]["environment"]["PDSERVE_LAME_DUCK_S"]
    drain_s = float(default(services["gateway"]["environment"]["PDSERVE_DRAIN_S"]))
    assert 3 * noticed_s < lame_duck_s < drain_s / 2
    options = {o.name: o for s in COMMANDS["gateway"].sections() for o in s.options}
    for side in ("client", "server"):
        waits = re.search(rf"timeout {side} (\d+)s", config)
        assert waits
        assert int(waits[1]) > options["request_timeout_s"].default


def revision(folder: Path, commit: str = "") -> str:
    words = ["sh", ROOT / "docker/revision.sh", commit]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_what_images_copy_is_not_ignored() -> None:
    sources = re.findall(r"^COPY (?!--)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    copied = {source.split("/")[0] for line in sources for source in line.split()}
    kept = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert copied == {*kept}


def test_images_of_different_sources_have_different_revisions(tmp_path: Path) -> None:
    """The revision is the commit passed to the build, or else a digest of the sources."""
    for name in ("a", "b", "c"):
        (tmp_path / name / "a folder").mkdir(parents=True)
        (tmp_path / name / "a folder/one.py").write_text("1")
        (tmp_path / name / "two.py").write_text("2" if name != "c" else "3")
    first, same, other = (revision(tmp_path / name) for name in ("a", "b", "c"))
    assert re.fullmatch("sources-[0-9a-f]{16}", first)
    assert first == same != other
    assert revision(tmp_path / "a", "0123abc") == "0123abc"


def test_builds_receive_the_commit(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["build"]["args"]["COMMIT"] == "${COMMIT:-}"
    assert "$(git rev-parse HEAD)" in (ROOT / "docs/kubernetes.md").read_text()


def locked(name: str) -> dict[str, str]:
    """Return the entries of a lock file by package name."""
    text = (ROOT / f"docker/{name}.txt").read_text()
    return {entry.partition("==")[0]: entry for entry in re.split(r"\n(?=[a-z])", text)[1:]}


def test_lock_files_match_the_constraints_and_have_hashes(subtests: pytest.Subtests) -> None:
    constraints = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    pins = dict(line.split("==") for line in constraints.splitlines() if "==" in line)
    for name in ("control", "worker", "redis", "postgres", "trace", "tools", "model", "build"):
        with subtests.test(name):
            found = locked(name)
            assert found
            for package, entry in found.items():
                assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), package
                version = re.split(r"[ ;\\]", entry.partition("==")[2])[0].strip()
                if (name, package) != ("build", "protobuf"):  # pinned by the older grpcio-tools
                    assert version == pins.get(package, version), f"{package}: run make lock"


def test_lock_files_contain_the_dependencies_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[>=<;]", text)[0].strip() for text in requirements}

    control, extras = locked("control"), project["optional-dependencies"]
    lock = runpy.run_path(str(ROOT / "docker/lock.py"))
    dependencies = names(project["dependencies"])
    workers, terminal = set(lock["WORKERS_ONLY"]), set(lock["TERMINAL_ONLY"])
    assert workers | terminal <= dependencies
    assert dependencies & set(control) == dependencies - workers - terminal, "run make lock"
    assert dependencies & set(locked("worker")) == workers, "run make lock"
    for extra in lock["EXTRAS"]:
        assert names(extras[extra]) <= set(control) | set(locked(extra)), f"{extra}: run make lock"
    system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    builds = {name.split("==")[0] for name in system["requires"]}
    assert names(list(builds)) <= set(locked("build")), "make lock"


def test_pip_requires_hashes_for_locked_packages() -> None:
    """Exceptions: extras a user adds to the lock files, and the project's wheel, which downloads
    nothing."""
    text = (ROOT / "Dockerfile").read_text() + (ROOT / "docker/finish.sh").read_text()
    commands = re.split(r"\n|&&|;|\|\|", text.replace("\\\n", " "))
    calls = [c for c in commands if re.search(r"/bin/pip .*(install|wheel)", c)]
    assert len(calls) == 7
    wheel, extras, own = [c for c in calls if "--require-hashes" not in c]
    assert "--no-deps --no-build-isolation" in wheel
    assert "-c constraints.txt" in extras
    assert "$names" in extras
    assert "--no-deps /wheels/*.whl" in own


def test_the_list_of_debian_packages() -> None:
    """The list has the format that scanners read and omits removed packages."""
    path = str(ROOT / "docker/debian_packages.py")
    debian = runpy.run_path(path)["debian"]
    text = "libc6:amd64\t2.36-9+deb12u1\tamd64\tglibc\tinstalled\n"
    text += "gone\t1\tall\tgone\tconfig-files\n"
    (part,) = debian(text, "debian-12")
    purl = "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12"
    assert (part["name"], part["version"], part["purl"]) == ("libc6", "2.36-9+deb12u1", purl)
    assert part["properties"] == [{"name": "source", "value": "glibc"}]


def test_images_are_based_on_a_digest() -> None:
    (start,) = re.findall(r"^ARG PYTHON_IMAGE=(.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", start)
