"""The TCP proxy of the chaos runs: each fault has its documented effect, and is counted."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from systems.eventually import LIMIT_S, wait_until
from systems.fault_proxy import FaultProxy, Way

FACE = b"\x10\x20\x30"


@pytest.fixture
def echo() -> Iterator[str]:
    """Run a server that echoes its input, and ends when its client ends."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                try:
                    while data := sock.recv(1 << 16):
                        sock.sendall(data)
                except OSError:
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture
def proxy(echo: str) -> Iterator[FaultProxy]:
    with FaultProxy(echo) as proxy:
        yield proxy


@pytest.fixture
def sock(proxy: FaultProxy) -> Iterator[socket.socket]:
    host, _, port = proxy.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        assert exchange(sock, b"first") == b"first"
        yield sock


def exchange(sock: socket.socket, data: bytes) -> bytes:
    sock.sendall(data)
    got = b""
    while len(got) < len(data) and (part := sock.recv(1 << 16)):
        got += part
    return got


def test_bytes_pass_both_ways_unchanged(proxy: FaultProxy, sock: socket.socket) -> None:
    data = bytes(range(256)) * 4000
    sender = threading.Thread(target=sock.sendall, args=(data,))
    sender.start()
    got = b""
    while len(got) < len(data):
        got += sock.recv(1 << 16)
    sender.join()
    assert got == data
    assert not proxy.hits
    assert proxy.num_connections == 1


def test_delay(proxy: FaultProxy, sock: socket.socket) -> None:
    proxy.delay(0.1)
    began = time.monotonic()
    assert exchange(sock, FACE) == FACE
    assert time.monotonic() - began >= 0.2, "once each way"
    assert proxy.hits == {"delayed": 2}


@pytest.mark.parametrize("way", [Way.THERE, Way.BACK])
def test_a_partition_holds_bytes_until_it_is_over(
    proxy: FaultProxy, sock: socket.socket, way: Way
) -> None:
    proxy.hold(way)
    sock.sendall(FACE)
    sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        sock.recv(10)
    wait_until(lambda: proxy.hits == {f"held {way.value}": 1}, proxy.hits)
    proxy.heal()
    sock.settimeout(LIMIT_S)
    assert sock.recv(10) == FACE


def test_new_connections_seem_to_open_in_a_partition(
    proxy: FaultProxy, sock: socket.socket
) -> None:
    sock.close()
    proxy.hold()
    host, _, port = proxy.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as other:
        other.sendall(FACE)
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.recv(10)
        proxy.heal()
        other.settimeout(10)
        assert other.recv(10) == FACE


def test_corrupt_flips_bits_of_this_many_chunks(proxy: FaultProxy, sock: socket.socket) -> None:
    proxy.corrupt(Way.THERE, count=2, least_bytes=3)
    assert exchange(sock, b"ab") == b"ab", "too short"
    assert exchange(sock, FACE) == b"\x10\xa0\x30"
    proxy.corrupt(Way.BACK, head=True)
    assert exchange(sock, FACE) == b"\x90\xa0\x30", "the second there, and the first back"
    assert exchange(sock, FACE) == FACE
    assert proxy.hits == {"corrupted": 3}


def test_half_close(proxy: FaultProxy, sock: socket.socket) -> None:
    proxy.half_close(Way.BACK)
    assert sock.recv(10) == b""
    sock.sendall(FACE)  # that way is still open
    proxy.half_close(Way.THERE)
    assert proxy.hits["half-closed"] == 2


def test_reset(proxy: FaultProxy, sock: socket.socket) -> None:
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        sock.recv(10)
    assert proxy.hits == {"reset": 1}


def test_no_listener_behind_the_proxy(proxy: FaultProxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        proxy.target = f"127.0.0.1:{free.getsockname()[1]}"
    host, _, port = proxy.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        assert sock.recv(10) == b""
