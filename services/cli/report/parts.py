"""The parts of a report: each returns files by name, or raises the error that it meets."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.engine.handoff.recorder.ring import SUFFIX
from pdserve.services.cli.commands import COMMANDS, known_names
from pdserve.services.cli.http_client import ApiClient, ApiError, advice
from pdserve.services.host.options import HostSettings
from pdserve.services.local.child import LOG_SUFFIX
from pdserve.services.local.run_folder import CONFIG_FILE, run_dirs
from pdserve.services.options.settings import ReportSettings
from pdserve.services.options.show import render
from pdserve.services.options.sources import resolve

if TYPE_CHECKING:
    from pdserve.services.host.auth.access import Access

Part = Callable[[], dict[str, bytes]]
ASK_S = 5.0  # timeout of one response
MAX_ASKED = 16  # routers called at a time
MAX_RINGS = 32  # the newest rings
SERVICES = ("up", "gateway", "router", "prefill", "decode")
SYSTEM_FILES = (
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/pressure/cpu",
    "/proc/pressure/memory",
    "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory.current",
    "/sys/fs/cgroup/memory.events",
)


class NothingThere(Exception):
    """A part has no data; the message says what is missing and where it was looked for."""


def parts(chosen: ReportSettings) -> dict[str, Part]:
    """The parts of a report, by name."""
    found: dict[str, Part] = {"versions": versions, "system": system, "gpus": gpus}
    for name in SERVICES:
        found[f"options of {name} here"] = partial(options_here, name)
    found["options of `up`"] = options_of_up
    for path in ("/health", "/ready", "/version", "/fleet/state", "/metrics?fleet=true"):
        found[f"gateway {path}"] = partial(ask_gateway, chosen, path)
    for address in chosen.scrape:
        found[f"metrics of {address}"] = partial(scrape, address)
    if chosen.routers:
        for target in chosen.routers:
            found[f"fleet of {target}"] = partial(fleet, chosen, target)
    else:
        found["fleet of routers"] = partial(missing, "no --routers are named")
    found["rings"] = partial(rings, chosen.trace_dir)
    for log in chosen.logs:
        found[f"log {log}"] = partial(_contents, {f"logs/{_file_name(log)}": Path(log)}, "no file")
    if not chosen.logs:
        found["logs"] = logs
    return found


def missing(why: str) -> dict[str, bytes]:
    raise NothingThere(why)


def versions() -> dict[str, bytes]:
    """Versions of pdserve, Python and all installed packages."""
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    facts = {
        "pdserve": metadata.version("pdserve"),
        "python": platform.python_version(),
        "installed": dict(sorted(installed.items(), key=lambda pair: str(pair[0]).lower())),
    }
    return {"versions.json": _json(facts)}


def system() -> dict[str, bytes]:
    """The machine's resources available to this process."""
    disk = shutil.disk_usage("/tmp")
    facts = {
        "uname": list(os.uname())[::2],  # without the host's name and the build's time
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": sorted(os.sched_getaffinity(0)),
        "tmp_free_bytes": disk.free,
    }
    files = {"system/facts.json": _json(facts)}
    for name in SYSTEM_FILES:
        path = Path(name)
        if path.exists():
            files["system/" + name.strip("/").replace("/", "_") + ".txt"] = path.read_bytes()
    return files


def gpus() -> dict[str, bytes]:
    """The output of nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NothingThere("there is no nvidia-smi")
    done = subprocess.run([program, "-q"], capture_output=True, timeout=ASK_S)
    return {"system/nvidia-smi.txt": done.stdout + done.stderr}


def options_here(name: str) -> dict[str, bytes]:
    """The options of a service started here without flags."""
    command = COMMANDS[name]
    groups = {section.cls: section.options for section in command.sections()}
    settings = resolve(groups, known_names(), {}, os.environ, None)
    return {f"options/{name}.yaml": render(settings).encode()}


def options_of_up() -> dict[str, bytes]:
    """The options that running `pdserve up` processes have written."""
    found = {f"options/up-{f.name}.yaml": f / CONFIG_FILE for f in run_dirs()}
    return _contents(found, "no `pdserve up` of this user runs here")


def ask_gateway(chosen: ReportSettings, path: str) -> dict[str, bytes]:
    """The gateway's response. A server error is included, since it describes the state; a refusal
    is not. Raises NothingThere if the gateway refuses, ApiError if it does not respond."""
    key = chosen.api_key[0] if chosen.api_key else ""
    name = "gateway/" + path.strip("/").partition("?")[0].replace("/", "_")
    try:
        answer = ApiClient(chosen.url, key, ASK_S).get(path)
    except ApiError as error:
        if not error.status:
            raise
        if error.status < 500:
            told = " ".join(f"{error.status}: {error}{advice(error)}".split())
            raise NothingThere(told) from None
        answer = f"{error.status}: {error}".encode()
    return {f"{name}.txt" if path.startswith("/metrics") else f"{name}.json": answer}


def scrape(address: str) -> dict[str, bytes]:
    """The metrics of another process."""
    page = ApiClient(f"http://{address}", timeout_s=ASK_S).get("/metrics")
    return {f"metrics/{_file_name(address)}.txt": page}


def fleet(chosen: ReportSettings, target: str) -> dict[str, bytes]:
    """Each router's view of its workers, by GetFleet, for all routers behind the target; or why it
    does not respond."""
    from pdserve.services.host.auth.access import make_access
    from pdserve.services.host.discovery.discovery import Discovery

    access = make_access(
        HostSettings(
            cluster_ca=chosen.cluster_ca,
            cluster_cert=chosen.cluster_cert,
            cluster_key=chosen.cluster_key,
            cluster_secret=chosen.cluster_secret,
            trust_network=chosen.trust_network,
        )
    )
    discovery = Discovery("--routers", [target], lambda: None, ready_only=False)
    try:
        addresses = discovery.look()[target]
    finally:
        discovery.close()
    if not addresses:
        raise NothingThere("no router was found by this name")
    with ThreadPoolExecutor(MAX_ASKED) as threads:
        answers = list(threads.map(partial(_fleet_of, access), addresses))
    said = list(zip(addresses, answers, strict=True))
    if all(kind == "txt" for _, (kind, _) in said):
        raise NothingThere("; ".join(f"{address}: {why.decode()}" for address, (_, why) in said))
    return {f"fleet/{_file_name(address)}.{kind}": data for address, (kind, data) in said}


def _fleet_of(access: "Access", address: str) -> tuple[str, bytes]:
    """The router's view as json, or why it does not respond, as txt."""
    import grpc
    from google.protobuf.json_format import MessageToJson

    from pdserve.protos.router_pb2 import GetFleetRequest
    from pdserve.protos.router_pb2_grpc import RouterStub
    from pdserve.services.host.auth.roles import Role

    with access.open_blocking_channel(address, Role.ROUTER) as channel:
        try:
            view = RouterStub(channel).GetFleet(
                GetFleetRequest(), metadata=access.metadata, timeout=ASK_S
            )
        except grpc.RpcError as error:
            return "txt", f"{error.code().name}: {error.details()}".encode()
    return "json", MessageToJson(view).encode()


def rings(trace_dir: str) -> dict[str, bytes]:
    """The rings of hand-off records; read them with `pdserve replay`."""
    folders = [Path(trace_dir)] if trace_dir else run_dirs()
    paths = [path for folder in folders for path in folder.glob(f"*{SUFFIX}")]
    newest = sorted(paths, key=lambda path: path.stat().st_mtime)[-MAX_RINGS:]
    where = trace_dir or "the folder of a running `pdserve up`; name one by --trace-dir"
    return _contents({f"rings/{path.name}": path for path in newest}, f"no rings in {where}")


def logs() -> dict[str, bytes]:
    """The last log lines of the processes of a running `pdserve up`."""
    paths = [path for f in run_dirs() for path in f.glob(f"*{LOG_SUFFIX}*")]
    why = (
        "no `pdserve up` of this user runs here; logs of other processes are where they write "
        "them: name files of these by --logs"
    )
    return _contents({f"logs/{p.parent.name}/{p.name}": p for p in paths}, why)


def _contents(files: dict[str, Path], otherwise: str) -> dict[str, bytes]:
    """The contents of the existing files. Raises NothingThere(otherwise) if there is none."""
    found = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
    if not found:
        raise NothingThere(otherwise)
    return found


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _file_name(address: str) -> str:
    return address.replace(":", "_").replace("/", "_")
