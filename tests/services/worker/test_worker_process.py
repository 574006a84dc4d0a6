"""The shell of a worker process: loading, failures, signals, addresses."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from systems.cluster_secret import BEARER, SECRET
from systems.eventually import wait_until
from systems.worker_kit import CARD, build_with, engine_maker

from pdserve.cli.roles import guarded
from pdserve.engine.api import EngineConfig
from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.transport import TransportRefused
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.worker_pb2_grpc import DecodeStub, PrefillStub
from pdserve.services.common.rpc import PROTOCOL_VERSION, advertised
from pdserve.services.decode.servicer import run as run_decode
from pdserve.services.prefill.servicer import run as run_prefill
from pdserve.services.worker.membership import Membership
from pdserve.services.worker.runtime import shm_folder
from pdserve.services.worker.settings import DecodeSettings, PrefillSettings

Events = list[tuple[str, dict[str, Any]]]
STUBS: dict[Any, Any] = {
    DecodeSettings: (DecodeStub, wire.DecodeCommand),
    PrefillSettings: (PrefillStub, wire.PrefillCommand),
}


def settings(cls: Any, folder: Path, **change: Any) -> Any:
    fields = {"cluster_secret": (SECRET,), "shm_dir": str(folder), "log_level": "warning"}
    return cls(**(fields | change))


@pytest.mark.parametrize(
    ("run", "cls"), [(run_decode, DecodeSettings), (run_prefill, PrefillSettings)]
)
def test_a_process_reports_and_ends_in_order(
    run: Any, cls: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build_with(monkeypatch, engine_maker())
    events: Events = []

    def session(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            made, command = STUBS[cls]
            hello = wire.SessionHello(router_incarnation=b"r" * 16, protocol=PROTOCOL_VERSION)
            call = made(channel).Session(iter([command(hello=hello)]), metadata=BEARER)
            list(call)

    def report(event: str, figures: dict[str, Any]) -> None:
        events.append((event, figures))
        if figures.get("fraction") == 1.0:
            router.append(threading.Thread(target=session, args=(events[0][1]["address"],)))
            router[0].start()
        if event == "ready":
            os.kill(os.getpid(), signal.SIGTERM)

    router: list[threading.Thread] = []
    assert run(settings(cls, tmp_path), EngineConfig(), report) == 0
    router[0].join()
    assert [event for event, _ in events] == ["listening", "loading", "loading", "ready"]
    assert events[0][1]["address"].startswith("127.0.0.1:")
    assert events[1][1]["fraction"] == 0.5
    assert events[3][1]["model"] == "tiny"
    assert events[3][1]["kv_tokens"] == 1024
    assert not list(tmp_path.iterdir())
    assert not [t for t in threading.enumerate() if t.name.startswith(("kv-", "engine"))]


def test_errors_of_loading_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> Any:
        raise CheckpointError("no such model")

    build_with(monkeypatch, fail)
    with pytest.raises(CheckpointError, match="no such model"):
        run_decode(settings(DecodeSettings, tmp_path), EngineConfig())


def test_a_panic_while_loading_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class PanicException(BaseException):
        """A class named as pyo3 raises it."""

    def fail() -> Any:
        raise PanicException("index out of bounds")

    build_with(monkeypatch, fail)
    assert guarded(lambda: run_decode(settings(DecodeSettings, tmp_path), EngineConfig())) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == ["pdserve: loading failed with PanicException: index out of bounds"]


def test_loading_is_reported_in_whole_percents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(config: EngineConfig, progress: Callable[[str, float], None]) -> Any:
        for done in range(1000):
            progress("weights", done / 999)
        progress("warming up", 0.0)
        raise OSError("enough")

    monkeypatch.setattr("pdserve.services.worker.process.build_engine", build)
    reported: list[tuple[str, int]] = []

    def report(event: str, figures: dict[str, Any]) -> None:
        if event == "loading":
            reported.append((figures["what"], int(100 * figures["fraction"])))

    with pytest.raises(OSError, match="enough"):
        run_decode(settings(DecodeSettings, tmp_path), EngineConfig(), report)
    assert reported == [*(("weights", percent) for percent in range(101)), ("warming up", 0)]


@pytest.mark.parametrize("goes_on", [False, True], ids=["at its next progress", "to its end"])
def test_a_signal_while_loading_ends_the_process(
    goes_on: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: list[str] = []

    def build(config: EngineConfig, progress: Callable[[str, float], None]) -> Any:
        wait_until(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        if not goes_on:
            wait_until(lambda: progress("loading", 0.1), "that it raises")
        ended.append("whole")
        return engine_maker()(), CARD

    monkeypatch.setattr("pdserve.services.worker.process.build_engine", build)
    assert run_decode(settings(DecodeSettings, tmp_path), EngineConfig()) == 0
    assert bool(ended) == goes_on
    assert not [t for t in threading.enumerate() if t.name.startswith(("kv-", "engine", "load"))]


def test_taken_addresses_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build_with(monkeypatch, engine_maker())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=address):
            run_decode(settings(DecodeSettings, tmp_path, bind=address), EngineConfig())
        with pytest.raises(OSError, match=address):
            run_decode(settings(DecodeSettings, tmp_path, data_bind=address), EngineConfig())


def test_an_explicitly_chosen_transport_must_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build_with(monkeypatch, engine_maker())
    folder = tmp_path / "file"
    folder.write_text("no folder can be made here")
    with pytest.raises(Exception, match="File exists"):
        run_decode(settings(DecodeSettings, folder, kv_transport="shm"), EngineConfig())


@pytest.mark.parametrize(
    ("run", "cls"), [(run_decode, DecodeSettings), (run_prefill, PrefillSettings)]
)
def test_an_explicitly_chosen_cuda_ipc_is_not_replaced(
    run: Any, cls: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build_with(monkeypatch, engine_maker())
    with pytest.raises(TransportRefused, match="no_device: the KV pool is not on a CUDA device"):
        run(settings(cls, tmp_path, kv_transport="cuda_ipc"), EngineConfig())


def test_advertised_addresses() -> None:
    assert advertised("127.0.0.1:50") == "127.0.0.1:50"
    assert advertised("[::1]:50") == "[::1]:50"
    assert advertised("0.0.0.0:50", "decode-1") == "decode-1:50"
    assert advertised("0.0.0.0:50", "decode-1:0") == "decode-1:50"
    assert advertised("0.0.0.0:50", "decode-1:7") == "decode-1:7"
    assert advertised("0.0.0.0:50", "[fe80::1]") == "[fe80::1]:50"
    own = advertised("0.0.0.0:50")
    assert own.endswith(":50")
    assert not own.startswith("0.0.0.0")


def test_the_folder_of_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shm_folder("/given") == "/given"
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    own = shm_folder("")
    assert Path(own).stat().st_mode & 0o777 == 0o700
    Path(own).chmod(0o777)
    assert shm_folder("") == "", "other users have access"


def test_a_worker_without_a_router_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker ends in order, whether or not it ever reached a router."""
    build_with(monkeypatch, engine_maker())
    events: list[str] = []

    def report(event: str, figures: dict[str, Any]) -> None:
        events.append(event)
        if figures.get("fraction") == 1.0:
            asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("pdserve.services.worker.process.ALONE_S", 0.1)
    made = settings(DecodeSettings, tmp_path, routers=("127.0.0.1:9",))
    assert run_decode(made, EngineConfig(), report) == 0
    assert "no router (127.0.0.1:9) has connected" in capsys.readouterr().err
    assert events == ["listening", "loading", "loading"]


def test_a_task_that_dies_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Membership, load: Any) -> None:
        raise KeyError("no such load")

    build_with(monkeypatch, engine_maker())
    monkeypatch.setattr(Membership, "report", fail)
    assert run_decode(settings(DecodeSettings, tmp_path), EngineConfig()) == 1
    assert "no such load" in capsys.readouterr().err
