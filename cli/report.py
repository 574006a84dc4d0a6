"""`pdserve report` writes a file, the bundle, that helps to diagnose a system that does not work.

The parts of the report are collected in parallel, each on its own thread, and each is a set of
files. A part that fails or is late does not prevent the others; the bundle says which part is
missing and why. Invariant: the bundle has no value of a secret option and no password of a URL
(class Secrets), and no prompt, since no part reads one.
"""

import io
import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pdserve.cli.commands import COMMANDS, known_names
from pdserve.cli.http_client import ApiClient, ApiError
from pdserve.cli.options import (
    ENV_PREFIX,
    MASK,
    OptionError,
    ReportSettings,
    Settings,
    render,
    resolve,
)
from pdserve.cli.up.child import LOG_SUFFIX
from pdserve.cli.up.folders import CONFIG_FILE, run_dirs
from pdserve.engine.handoff.recorder import SUFFIX as RING
from pdserve.services.common.options import ServerSettings

if TYPE_CHECKING:
    from pdserve.services.common.auth.access import Access

FOLDER = "pdserve-report"
SUMMARY = "summary.txt"
STDOUT = "-"
MAX_FILE_BYTES = 4 << 20  # the end of a longer file is kept
MAX_BYTES = 64 << 20  # of all files, before compression
MIN_SECRET_CHARS = 4  # shorter values occur by chance
MIN_GUESSED_CHARS = 12  # for variables that only look like secrets
_NAMES = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|HEADERS", re.IGNORECASE)
_USER = re.compile(rb"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@")
_QUERY = re.compile(rb"(\b[a-z][a-z0-9+.-]*://[^\s?'\"]+\?)[^\s'\"]+")
_KEYS = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.S)
Part = Callable[[], dict[str, bytes]]
PartResult = dict[str, bytes] | str  # files by name, or the reason for having none
RESPONSE_TIMEOUT_S = 5.0
MAX_PARALLEL_CALLS = 16  # routers called at a time
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


class Secrets:
    """The secret values that a report must not contain: those of this command's options, of the
    environment and of the YAML file of options."""

    def __init__(self, environ: Mapping[str, str], settings: Settings) -> None:
        values = {*_of_variables(environ), *_of_settings(settings)}
        for command in COMMANDS.values():
            groups = {section.cls: section.options for section in command.sections()}
            with suppress(OptionError):  # the report names the error; variables are still known
                values |= {*_of_settings(resolve(groups, known_names(), {}, environ, None))}
        values |= {password for value in values if (password := _password_of(value))}
        longest_first = sorted(values, key=len, reverse=True)
        self._values = [value.encode() for value in longest_first if len(value) >= MIN_SECRET_CHARS]

    def hide(self, data: bytes) -> bytes:
        """Return the data with all known secrets, private keys, and users and queries in URLs
        replaced by a mask."""
        mask = MASK.encode()
        for value in self._values:
            data = data.replace(value, mask)
        data = _KEYS.sub(mask, data)
        data = _USER.sub(rb"\1" + mask + b"@", data)
        return _QUERY.sub(rb"\1" + mask, data)


def _of_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the secret values in environment variables: those of secret options, and those of other
    programs' variables whose names suggest a secret."""
    sections = (section for command in COMMANDS.values() for section in command.sections())
    secret = {option.env for section in sections for option in section.options if option.secret}
    for name, value in environ.items():
        if name in secret:
            yield from (value, *(part.strip() for part in value.split(",")))
        elif _NAMES.search(name) and not name.startswith(ENV_PREFIX):
            candidates = (value, *re.split("[,=]", value))  # for headers: name=value,name=value
            yield from (
                candidate for candidate in candidates if len(candidate) >= MIN_GUESSED_CHARS
            )


def _password_of(value: str) -> str:
    """Return the password in a URL, or "" if it has none. A log may contain the password without
    the URL."""
    try:
        return urlsplit(value).password or ""
    except ValueError:  # not a URL
        return ""


def _of_settings(settings: Settings) -> Iterator[str]:
    for option in settings.options():
        setting = settings.values[option.name]
        if option.secret and setting.given:
            yield from setting.value if isinstance(setting.value, tuple) else (str(setting.value),)


class NoData(Exception):
    """Raised if a part of the report has no data; the message says what is missing and where it was
    searched."""


def parts(options: ReportSettings) -> dict[str, Part]:
    """Return the functions that collect the parts of the report, by the name of the part."""
    part_by_name: dict[str, Part] = {"versions": versions, "system": system, "gpus": gpus}
    for name in SERVICES:
        part_by_name[f"local options of {name}"] = partial(local_options, name)
    part_by_name["options of `up`"] = options_of_up
    for path in ("/health", "/ready", "/version", "/fleet/state", "/metrics?fleet=true"):
        part_by_name[f"gateway {path}"] = partial(ask_gateway, options, path)
    for address in options.scrape:
        part_by_name[f"metrics of {address}"] = partial(scrape, address)
    if options.routers:
        for target in options.routers:
            part_by_name[f"fleet of {target}"] = partial(fleet, options, target)
    else:
        part_by_name["fleet of routers"] = partial(missing, "--routers is not set")
    part_by_name["rings"] = partial(rings, options.trace_dir)
    for log in options.logs:
        part_by_name[f"log {log}"] = partial(
            _contents, {f"logs/{_file_name(log)}": Path(log)}, "the file does not exist"
        )
    if not options.logs:
        part_by_name["logs"] = logs
    return part_by_name


def missing(reason: str) -> dict[str, bytes]:
    raise NoData(reason)


def versions() -> dict[str, bytes]:
    """Collect the versions of pdserve, of Python and of all installed packages."""
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    facts = {
        "pdserve": metadata.version("pdserve"),
        "python": platform.python_version(),
        "installed": dict(sorted(installed.items(), key=lambda pair: str(pair[0]).lower())),
    }
    return {"versions.json": _json(facts)}


def system() -> dict[str, bytes]:
    """Collect the CPU, memory and disk resources that this process may use."""
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
    """Collect the output of `nvidia-smi -q`. Raises NoData if nvidia-smi is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NoData("nvidia-smi is not installed")
    done = subprocess.run([program, "-q"], capture_output=True, timeout=RESPONSE_TIMEOUT_S)
    return {"system/nvidia-smi.txt": done.stdout + done.stderr}


def local_options(name: str) -> dict[str, bytes]:
    """Collect the options that the named service would have if it were started here without
    flags."""
    command = COMMANDS[name]
    groups = {section.cls: section.options for section in command.sections()}
    settings = resolve(groups, known_names(), {}, os.environ, None)
    return {f"options/{name}.yaml": render(settings).encode()}


def options_of_up() -> dict[str, bytes]:
    """Collect the options of this user's running `pdserve up` processes, which these have written
    to files. Raises NoData if none is running."""
    files = {f"options/up-{f.name}.yaml": f / CONFIG_FILE for f in run_dirs()}
    return _contents(files, "no `pdserve up` of this user is running on this machine")


def ask_gateway(options: ReportSettings, path: str) -> dict[str, bytes]:
    """Collect the gateway's response to a GET request. An error response 5xx is included, since it
    describes the gateway's state. Raises NoData if the gateway refuses the request, ApiError if it
    does not respond."""
    key = options.api_key[0] if options.api_key else ""
    name = "gateway/" + path.strip("/").partition("?")[0].replace("/", "_")
    try:
        response = ApiClient(options.url, key, RESPONSE_TIMEOUT_S).get(path)
    except ApiError as error:
        if not error.status:
            raise
        if error.status < 500:
            reason = " ".join(f"{error.status}: {error}{error.advice}".split())
            raise NoData(reason) from None
        response = f"{error.status}: {error}".encode()
    return {f"{name}.txt" if path.startswith("/metrics") else f"{name}.json": response}


def scrape(address: str) -> dict[str, bytes]:
    """Collect the metrics of another process, at host:port."""
    page = ApiClient(f"http://{address}", timeout_s=RESPONSE_TIMEOUT_S).get("/metrics")
    return {f"metrics/{_file_name(address)}.txt": page}


def fleet(options: ReportSettings, target: str) -> dict[str, bytes]:
    """Collect each router's view of its workers (GetFleet), for all routers behind the target. The
    file of a router that does not respond says why. Raises NoData if no router responds."""
    from pdserve.services.common.auth.access import make_access
    from pdserve.services.common.discovery import Discovery

    access = make_access(
        ServerSettings(
            cluster_ca=options.cluster_ca,
            cluster_cert=options.cluster_cert,
            cluster_key=options.cluster_key,
            cluster_secret=options.cluster_secret,
            trust_network=options.trust_network,
        )
    )
    discovery = Discovery("--routers", [target], lambda: None, ready_only=False)
    try:
        addresses = discovery.look()[target]
    finally:
        discovery.close()
    if not addresses:
        raise NoData("the name does not resolve to any router")
    with ThreadPoolExecutor(MAX_PARALLEL_CALLS) as threads:
        results = list(threads.map(partial(_fleet_of, access), addresses))
    replies = list(zip(addresses, results, strict=True))
    if all(kind == "txt" for _, (kind, _) in replies):
        raise NoData("; ".join(f"{address}: {text.decode()}" for address, (_, text) in replies))
    return {f"fleet/{_file_name(address)}.{kind}": data for address, (kind, data) in replies}


def _fleet_of(access: "Access", address: str) -> tuple[str, bytes]:
    """Ask one router for its view of its workers. Returns ("json", the view), or ("txt", why there
    is none)."""
    import grpc
    from google.protobuf.json_format import MessageToJson

    from pdserve.protos.router_pb2 import GetFleetRequest
    from pdserve.protos.router_pb2_grpc import RouterStub
    from pdserve.services.common.auth.certificates import Role

    with access.open_blocking_channel(address, Role.ROUTER) as channel:
        try:
            view = RouterStub(channel).GetFleet(
                GetFleetRequest(), metadata=access.metadata, timeout=RESPONSE_TIMEOUT_S
            )
        except grpc.RpcError as error:
            return "txt", f"{error.code().name}: {error.details()}".encode()
    return "json", MessageToJson(view).encode()


def rings(trace_dir: str) -> dict[str, bytes]:
    """Collect the newest ring files, which record KV hand-offs; `pdserve replay` reads them. Raises
    NoData if there are none."""
    folders = [Path(trace_dir)] if trace_dir else run_dirs()
    paths = [path for folder in folders for path in folder.glob(f"*{RING}")]
    newest = sorted(paths, key=lambda path: path.stat().st_mtime)[-MAX_RINGS:]
    searched = trace_dir or "the folder of a running `pdserve up`; set --trace-dir"
    return _contents({f"rings/{path.name}": path for path in newest}, f"no rings in {searched}")


def logs() -> dict[str, bytes]:
    """Collect the last log lines of the processes of this user's running `pdserve up`. Raises
    NoData if none is running."""
    paths = [path for f in run_dirs() for path in f.glob(f"*{LOG_SUFFIX}*")]
    reason = (
        "no `pdserve up` of this user is running on this machine; for other processes, name their "
        "log files with --logs"
    )
    return _contents({f"logs/{p.parent.name}/{p.name}": p for p in paths}, reason)


def _contents(files: dict[str, Path], reason: str) -> dict[str, bytes]:
    """Read the files that exist; return their contents by name. Raises NoData(reason) if no file
    exists."""
    contents = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
    if not contents:
        raise NoData(reason)
    return contents


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _file_name(address: str) -> str:
    return address.replace(":", "_").replace("/", "_")


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run `pdserve report`. Returns 0 if the bundle is written, even with missing parts; otherwise
    1."""
    options = settings.build(ReportSettings)
    out = options.out or time.strftime("pdserve-report-%Y%m%d-%H%M%S.tar.gz")
    secrets = Secrets(os.environ, settings)
    bundle = Bundle(secrets)
    for name, part in collect_parts(parts(options), options.within_s).items():
        bundle.add(name, part)
    if out == STDOUT:
        sys.stdout.buffer.write(bundle.packed())
        sys.stdout.flush()
        print(bundle.summary(), end="", file=sys.stderr)
        return 0
    try:
        with os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(bundle.packed())
    except OSError as error:
        print(f"pdserve report: cannot write {out}: {error.strerror}", file=sys.stderr)
        return 1
    print(bundle.summary(), end="")
    print(f"report written to {out}")
    return 0


def collect_parts(makers: Mapping[str, Part], timeout_s: float) -> dict[str, PartResult]:
    """Run the functions that collect the parts, in parallel, for at most `timeout_s`. Returns for
    each part its files by name, or the text that says why it has none."""
    done: queue.SimpleQueue[tuple[str, PartResult]] = queue.SimpleQueue()

    def make(name: str, part: Part) -> None:
        try:
            done.put((name, part()))
        except Exception as error:  # any failure: the report must still be written
            prefix = "" if isinstance(error, NoData) else f"{type(error).__name__}: "
            done.put((name, f"{prefix}{error}"))

    for name, part in makers.items():
        threading.Thread(target=make, args=(name, part), name=name, daemon=True).start()
    results: dict[str, PartResult] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(makers):
        try:
            name, result = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        results[name] = result
    return {name: results.get(name, f"not finished within {timeout_s:g} s") for name in makers}


class Bundle:
    """The files of a report, without secrets and limited in size."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._files: dict[str, bytes] = {}
        self._summary_lines: list[str] = []
        self._free_bytes = MAX_BYTES

    def add(self, name: str, part: PartResult) -> None:
        """Add a part of the report: its files, or the text that says why it has none."""
        if isinstance(part, str):
            self._summary_lines.append(
                f"{name}: MISSING: {self._secrets.hide(part.encode()).decode()}"
            )
            return
        for path, data in part.items():
            size_note = "" if len(data) <= MAX_FILE_BYTES else f", truncated from {len(data)}"
            if path.endswith(RING):  # only numbers and ids; a truncated ring is unreadable
                content, size_note = data, ""
            else:
                content = self._secrets.hide(data)[-MAX_FILE_BYTES:]  # a cut may split a secret
            if len(content) > self._free_bytes:
                self._summary_lines.append(
                    f"{name}: {path} is omitted: the report has reached its size limit"
                )
                continue
            self._free_bytes -= len(content)
            self._files[path] = content
            self._summary_lines.append(f"{name}: {path}, {len(content)} bytes{size_note}")

    def summary(self) -> str:
        """Return the report's summary: a line for each file and for each missing part."""
        return "\n".join(self._summary_lines) + "\n"

    def packed(self) -> bytes:
        """Return the report as the bytes of a tar.gz archive."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path, data in {SUMMARY: self.summary().encode(), **self._files}.items():
                entry = tarfile.TarInfo(f"{FOLDER}/{path}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))
        return buffer.getvalue()
