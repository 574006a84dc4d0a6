"""`pdserve report`: what the file contains, and what it never contains."""

import json
import os
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
import yaml
from fakes.endpoints import FakeEndpoints
from fakes.kubernetes import FakeKubernetes
from systems.cluster_secret import SECRET

from pdserve.cli import report as module
from pdserve.cli.commands import COMMANDS
from pdserve.cli.main import main
from pdserve.cli.options import Settings
from pdserve.cli.options.options import Option
from pdserve.cli.report import Bundle, Secrets, collect_parts
from pdserve.cli.up.folders import CONFIG_FILE, run_dir
from pdserve.protos import router_pb2
from pdserve.protos.router_pb2_grpc import RouterServicer, add_RouterServicer_to_server
from pdserve.services.common import kubernetes_api
from pdserve.services.common.auth.certificates import make_authority

NOBODY = "http://127.0.0.1:1"
VALUES = {  # of options that are validated when they are read
    "database_url": "postgresql://me:hunter2hunter2@db/x",
    "rate_storage": "redis://:swordfish99@cache:6379",
}


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a private temporary folder, so that other systems of this machine are not found."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def files_of(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {}
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.removeprefix("pdserve-report/")] = file.read()
    return found


def report(*words: str) -> dict[str, bytes]:
    """Return the files of a report from a run that must succeed."""
    assert main(["report", "--out", "report.tar.gz", *words]) == 0
    assert os.stat("report.tar.gz").st_mode & 0o777 == 0o600
    return files_of(Path("report.tar.gz"))


def secret_options() -> dict[str, Option]:
    options = (o for c in COMMANDS.values() for s in c.sections() for o in s.options)
    return {option.name: option for option in options if option.secret}


def test_a_report_of_a_stopped_system_lists_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = report("--url", NOBODY, "--scrape", "127.0.0.1:1", "--routers", "127.0.0.1:1")
    summary = files["summary.txt"].decode()
    assert capsys.readouterr().out == summary + "report written to report.tar.gz\n"
    missing = {line.partition(": MISSING: ")[0] for line in summary.splitlines()}
    for name in ("gateway /health", "metrics of 127.0.0.1:1", "fleet of 127.0.0.1:1", "logs"):
        assert name in missing
    assert "Connection refused" in summary
    assert b'"pdserve"' in files["versions.json"]
    assert b"MemTotal" in files["system/proc_meminfo.txt"]
    assert yaml.safe_load(files["options/decode.yaml"])["drain_s"] == 30.0


class TwoRouters(RouterServicer):
    """Routers on the same port of two addresses; a third address has none."""

    HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")

    def __init__(self) -> None:
        self.port = 0
        with ExitStack() as stack:
            for host in self.HOSTS[:2]:
                threads = stack.enter_context(ThreadPoolExecutor(2))
                server = grpc.server(threads)
                add_RouterServicer_to_server(self, server)
                self.port = server.add_insecure_port(f"{host}:{self.port}")
                server.start()
                stack.callback(lambda server=server: server.stop(None).wait())
            self.stop = stack.pop_all().close

    def GetFleet(self, request: Any, context: grpc.ServicerContext) -> router_pb2.FleetView:
        assert ("authorization", f"Bearer {SECRET}") in context.invocation_metadata()
        return router_pb2.FleetView(retries=7)

    def asked_by(self, target: str) -> None:
        """Check that a report has the answers of both, and why the third gave none."""
        files = report("--url", NOBODY, "--routers", target, "--cluster-secret", SECRET)
        found = {name: data for name, data in files.items() if name.startswith("fleet/")}
        *there, gone = (f"fleet/{host}_{self.port}" for host in self.HOSTS)
        assert found.keys() == {*(f"{name}.json" for name in there), f"{gone}.txt"}
        assert [json.loads(found[f"{name}.json"]) for name in there] == 2 * [{"retries": "7"}]
        assert found[f"{gone}.txt"].startswith(b"UNAVAILABLE: ")


@pytest.fixture
def two_routers() -> Iterator[TwoRouters]:
    made = TwoRouters()
    yield made
    made.stop()


def test_every_address_of_a_name_is_queried(
    two_routers: TwoRouters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a headless Service resolves to several addresses."""
    look_up = socket.getaddrinfo

    def headless(host: str, *rest: Any, **words: Any) -> Any:
        hosts = two_routers.HOSTS if host == "router-headless" else (host,)
        return [found for each in hosts for found in look_up(each, *rest, **words)]

    monkeypatch.setattr(socket, "getaddrinfo", headless)
    two_routers.asked_by(f"router-headless:{two_routers.port}")


def test_every_pod_of_a_service_is_queried(
    two_routers: TwoRouters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods that are not ready are queried too."""
    api = FakeKubernetes(tmp_path)
    api.start()
    for name, value in api.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kubernetes_api, "SERVICE_ACCOUNT", str(tmp_path))
    pods = FakeEndpoints(api, Random(1), port=two_routers.port)
    for host in two_routers.HOSTS:
        pods.add(host, ready=host == "127.0.0.1")
    try:
        two_routers.asked_by("kubernetes:///router:grpc")
    finally:
        api.stop()


def test_a_name_without_a_router_is_reported() -> None:
    words = ("--routers", "router.invalid:50050", "--routers", "kubernetes:///router:grpc")
    summary = report("--url", NOBODY, "--cluster-secret", SECRET, *words)["summary.txt"].decode()
    assert (
        "fleet of router.invalid:50050: MISSING: the name does not resolve to any router" in summary
    )
    assert "fleet of kubernetes:///router:grpc: MISSING: ValueError: --routers kube" in summary


def test_files_of_logs_are_added_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "pods.log").write_text("one line\nkey sk-in-the-log\n")
    words = ("--url", NOBODY, "--api-key", "sk-in-the-log")
    files = report(*words, "--logs", "pods.log", "--logs", "none.log")
    assert files["logs/pods.log"] == b"one line\nkey ********\n"
    assert "log none.log: MISSING: the file does not exist\n" in files["summary.txt"].decode()


def test_a_report_to_standard_output(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    """For a read-only root file system, or where a file could not be copied out."""
    assert main(["report", "--url", NOBODY, "--out", "-"]) == 0
    shown = capsysbinary.readouterr()
    (tmp_path / "got.tar.gz").write_bytes(shown.out)
    assert files_of(tmp_path / "got.tar.gz")["summary.txt"] == shown.err


def test_an_invalid_variable_costs_only_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_KV_TRANSPORT", "pigeon")
    files = report("--url", NOBODY)
    summary = files["summary.txt"].decode()
    assert "local options of decode: MISSING: OptionError: --kv-transport" in summary
    assert "options/router.yaml" in files


@pytest.fixture
def repeating() -> Iterator[str]:
    """Return the URL of a server that echoes the request, and so any secret in it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = f"{self.path} {self.headers}".encode()
            if self.path == "/ready":
                data = b"\n".join(value.encode() for value in repeated)
            if self.path == "/health":
                over.wait()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    over = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    over.set()
    server.shutdown()
    thread.join()
    server.server_close()


repeated: list[str] = []


@pytest.fixture
def refusing() -> Iterator[str]:
    """Return the URL of a gateway that requires a key for some routes and is not ready."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503 if self.path == "/ready" else 401, "so it is")

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_data_that_a_gateway_refuses_is_reported_missing(refusing: str) -> None:
    """The report says what to do; an error that the server itself raises is its answer."""
    files = report("--url", refusing)
    summary = files["summary.txt"].decode()
    for path in ("/metrics?fleet=true", "/fleet/state", "/health"):
        (line,) = [text for text in summary.splitlines() if text.startswith(f"gateway {path}: ")]
        assert line.startswith(f"gateway {path}: MISSING: 401: ")
        assert "--api-key" in line
    assert [name for name in files if name.startswith("gateway/")] == ["gateway/ready.json"]
    assert files["gateway/ready.json"].startswith(b"503: ")


def test_no_secret_of_any_source_is_in_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repeating: str
) -> None:
    """Secrets in variables, flags, the options file, URLs and keys, and those that a server or a
    log repeats.
    """
    secrets = {n: VALUES.get(n, f"{n}-hush-{'x' * 32}") for n in secret_options()}
    in_file = ("database_url", "rate_storage")
    for name in secrets.keys() - {*in_file}:
        monkeypatch.setenv(f"PDSERVE_{name.upper()}", secrets[name])
    config = tmp_path / "options.yaml"
    config.write_text(yaml.safe_dump({name: secrets[name] for name in in_file}))
    monkeypatch.setenv("PDSERVE_CONFIG", str(config))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer-collector")
    monkeypatch.setenv("HF_TOKEN", "hf_aaaaaaaaaaaaaaaa")
    key = make_authority().key.decode()
    known = [*secrets.values(), "flag-hush", "hunter2hunter2", "swordfish99", "Bearer-collector"]
    known += ["hf_aaaaaaaaaaaaaaaa"]
    of_others = ("http://user-and-password@x/y", "http://x/y?token=in-the-query", key)
    never = [*known, "user-and-password", "in-the-query", key.splitlines()[1]]
    repeated[:] = [*known, *of_others]
    with run_dir() as folder:
        (folder / "gateway.log").write_text("\n".join(repeated))
        (folder / CONFIG_FILE).write_text("port: 8000\n")
        (folder / "router-0123.ring").write_bytes(bytes(range(256)))
        words = ("--url", repeating, "--api-key", "flag-hush", "--within-s", "2")
        files = report(*words)
    summary = files["summary.txt"].decode()
    assert "gateway /health: MISSING: not finished within 2 s" in summary
    assert files["options/up-" + folder.name + ".yaml"] == b"port: 8000\n"
    assert files["rings/router-0123.ring"] == bytes(range(256))
    assert b"********" in files[f"logs/{folder.name}/gateway.log"]
    assert b"********" in files["gateway/ready.json"]
    assert b"# database_url: ********" in files["options/gateway.yaml"]
    assert {(n, word) for n in files for word in never if word.encode() in files[n]} == set()
    assert {n for n in files if b"hush" in files[n]} == set(), "a part remains"


def test_the_report_ends_in_time_and_is_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def fails() -> dict[str, bytes]:
        raise RuntimeError("broken")

    def hangs() -> dict[str, bytes]:
        over.wait()
        return {}

    began = time.monotonic()
    made = collect_parts({"fails": fails, "hangs": hangs, "works": lambda: {"a": b"x"}}, 0.2)
    over.set()
    assert time.monotonic() - began < 30
    assert made == {
        "fails": "RuntimeError: broken",
        "hangs": "not finished within 0.2 s",
        "works": {"a": b"x"},
    }
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10)
    monkeypatch.setattr(module, "MAX_BYTES", 25)
    bundle = Bundle(Secrets({}, Settings({}, {})))
    bundle.add("logs", {"a.log": b"0123456789abcdef", "b.log": b"short"})
    bundle.add("rings", {"c.ring": b"x" * 11, "d.ring": b"more"})
    Path("out").write_bytes(bundle.packed())
    files = files_of(Path("out"))
    assert files["a.log"] == b"6789abcdef"
    assert files["b.log"] == b"short"
    assert set(files) == {"summary.txt", "a.log", "b.log", "d.ring"}
    assert "c.ring is omitted" in bundle.summary()


def test_a_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--url", NOBODY, "--out", "none/report.tar.gz"]) == 1
    assert "cannot write none/report.tar.gz: No such file" in capsys.readouterr().err
