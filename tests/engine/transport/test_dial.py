"""`auto` uses the best working transport; a transport requested by name is never replaced."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from systems.eventually import wait_until
from systems.link_ends import HELLO, INCARNATION, SLOT_BYTES, Ends, Recorder, frame_job

from pdserve.engine.handoff.connection import DataLink, Dialer
from pdserve.engine.transport import Target, TransportOptions, TransportRefused, make_transports
from pdserve.engine.transport.base import transports
from pdserve.engine.transport.unix_socket import dial_unix


def options(folder: Path | str) -> TransportOptions:
    return TransportOptions(shm_dir=str(folder), slot_bytes=SLOT_BYTES)


def test_the_registry_finds_every_transport_file() -> None:
    assert list(transports()) == ["cuda_ipc", "shm", "tcp"], "must be in order of preference"
    there = "known transports: auto, cuda_ipc, shm, tcp"
    with pytest.raises(ValueError, match=f"unknown transport 'nixl'; {there}"):
        make_transports("nixl", TransportOptions())


def test_auto_takes_shm_on_one_host(tmp_path: Path) -> None:
    shm, tcp = Ends("shm", tmp_path), Ends("tcp", tmp_path)
    dialer = Dialer(make_transports("auto", options(tmp_path)), Recorder())
    link = dialer.dial(Target(tcp.listener.address, INCARNATION), HELLO)
    assert link.transport == "shm"
    assert not dialer.refusals
    link.close()
    shm.close()
    tcp.close()


def test_auto_falls_back_and_counts_the_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tcp = Ends("tcp", tmp_path)
    dialer = Dialer(make_transports("auto", options(tmp_path / "other")), Recorder())
    with caplog.at_level("INFO"):
        link = dialer.dial(Target(tcp.listener.address, INCARNATION), HELLO)
    assert link.transport == "tcp"
    assert dialer.refusals == {"shm": 1}
    assert "transport shm cannot connect to decode 44444444" in caplog.text
    link.close()
    tcp.close()


def test_a_transport_requested_by_name_is_never_replaced(tmp_path: Path) -> None:
    tcp = Ends("tcp", tmp_path)
    dialer = Dialer(make_transports("shm", options(tmp_path)), Recorder())
    with pytest.raises(TransportRefused, match=r"^shm: .*\.sock: No such file"):
        dialer.dial(Target(tcp.listener.address, INCARNATION), HELLO)
    assert tcp.decode.links == []
    tcp.close()


def test_a_peer_that_does_not_read_loses_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.engine.handoff.connection.link.MAX_POSTED", 64)
    tcp, recorder = Ends("tcp", tmp_path), Recorder()
    link = tcp.dial(recorder)
    tcp.decode.hold()
    link.push(frame_job(b"taken, and not given back", 1))
    wait_until(lambda: bool(tcp.decode.payloads))  # from now on the reading thread waits
    for _ in range(10_000):  # more than both sockets buffer
        link.post(bytes(4096))
        if not link.open:
            break
    assert recorder.reasons == ["the peer does not read its messages"]
    tcp.decode.go_on()
    tcp.close()


def test_dialling_does_not_wait_for_a_listener_that_accepts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "full.sock"
    dialed: list[socket.socket] = []

    def fill() -> None:
        while len(dialed) < 100:
            dialed.append(dial_unix(path, 0.2))

    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with ThreadPoolExecutor() as pool:
            filling = pool.submit(fill)
            try:
                with pytest.raises(TransportRefused, match=str(path)):
                    filling.result(5.0)
            finally:
                listener.close()  # ends a waiting connect
    assert dialed
    for sock in dialed:
        sock.close()


def test_every_reason_has_a_name(tmp_path: Path) -> None:
    dialer = Dialer(make_transports("auto", options("")), Recorder())
    with pytest.raises(TransportRefused, match=r"shm: no directory .* tcp: decode has no tcp"):
        dialer.dial(Target("", INCARNATION), replace(HELLO))


def test_a_link_without_threads_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tcp, recorder = Ends("tcp", tmp_path), Recorder()
    wire = tcp.transport.dial(tcp.target, 1.0)
    link = DataLink(wire, "tcp", recorder)

    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            link.accept()
    link.close()
    assert link.ended
    assert recorder.reasons == ["can't start new thread"]
    tcp.close()
