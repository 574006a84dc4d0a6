"""The HTTP port keeps accepting connections after failures and reserves room per address."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway import listener as listener_module
from pdserve.gateway.listener import ConnectionCounts, HttpListener, max_connections

GREETING = b"hello"


async def greet(connection: socket.socket) -> None:
    """Send a greeting and hold the connection until the client disconnects."""
    loop = asyncio.get_running_loop()
    with connection:
        await loop.sock_sendall(connection, GREETING)
        await loop.sock_recv(connection, 1)


@pytest.fixture
def port() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


async def said(client: socket.socket) -> bytes:
    """The data that the server sends; empty if it has closed the connection."""
    async with asyncio.timeout(LIMIT_S):
        try:
            return await asyncio.get_running_loop().sock_recv(client, len(GREETING))
        except ConnectionError:
            return b""


def test_accepting_resumes_when_a_descriptor_is_free(
    port: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener_module, "PAUSE_S", 0.05)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def run() -> None:
        taking = HttpListener(port, greet, 100)
        client = socket.socket()
        free = os.dup(client.fileno())
        os.close(free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            client.connect(port.getsockname())
            await eventually(
                lambda: "cannot accept HTTP connections, retrying: [Errno 24]" in caplog.text
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.setblocking(False)
        assert await said(client) == GREETING
        client.close()
        taking.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


class Clients:
    """Connections to a listener that accepts at most eight."""

    def __init__(self, port: socket.socket) -> None:
        self._port = port
        self._taking = HttpListener(port, greet, 8)
        self._open: list[socket.socket] = []

    async def connect(self, address: str = "127.0.0.1") -> socket.socket:
        client = socket.socket()
        self._open.append(client)
        client.bind((address, 0))
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, self._port.getsockname())
        return client

    def close(self) -> None:
        self._taking.close()
        for client in self._open:
            client.close()


@pytest.fixture
async def clients(port: socket.socket, anyio_backend: str) -> AsyncIterator[Clients]:
    clients = Clients(port)
    yield clients
    clients.close()


@pytest.mark.anyio
async def test_one_address_may_use_half_of_the_room(clients: Clients) -> None:
    first = [await clients.connect() for _ in range(5)]
    assert [await said(client) for client in first] == [GREETING] * 4 + [b""]
    other = [await clients.connect("127.0.0.2") for _ in range(3)]
    assert [await said(client) for client in other] == [GREETING] * 2 + [b""]
    assert await said(await clients.connect("127.0.0.3")) == GREETING


@pytest.mark.anyio
async def test_a_closed_connection_makes_room(clients: Clients) -> None:
    first = [await clients.connect() for _ in range(4)]
    assert [await said(client) for client in first] == [GREETING] * 4
    assert await said(await clients.connect()) == b""
    first[0].close()

    async def is_taken() -> bool:
        return await said(await clients.connect()) == GREETING

    await eventually(is_taken)


def test_file_descriptors_are_left_for_other_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {}
    for files in (64, 1024, 1 << 20, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        most[files] = max_connections()
    assert list(most.values()) == [32, 512, 4096, 4096]


def test_refused_connections_are_logged_occasionally(
    port: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Log the number of closed connections, not a line for each."""

    async def run() -> None:
        taking = HttpListener(port, greet, 2)
        clients = [socket.socket() for _ in range(12)]
        for client in clients:
            client.connect(port.getsockname())
            client.setblocking(False)
        refused = [client for client in clients if not await said(client)]
        assert len(refused) >= 10
        assert len(caplog.records) == 1
        monkeypatch.setattr(listener_module, "FULL_LOG_S", 0.0)
        with socket.socket() as another:
            another.connect(port.getsockname())
            await eventually(lambda: len(caplog.records) == 2)
        assert f"rejected {len(refused)} new HTTP connections" in caplog.text
        taking.close()
        for client in clients:
            client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


class Accepting:
    """One of two processes that accept from a socket; counts its connections."""

    def __init__(self, port: socket.socket, folder: Path, index: int) -> None:
        self.counts = ConnectionCounts(folder / "connections", index, 2)
        self._sock = port.dup()
        self._taking = HttpListener(self._sock, self.greet, 100, self.counts)
        self.num = 0

    async def greet(self, connection: socket.socket) -> None:
        self.num += 1
        await greet(connection)

    def hang(self) -> None:
        self._taking.close()
        self.counts.set_ready()  # as it was before

    def stop(self) -> None:
        self._taking.close()
        self._sock.close()


@pytest.mark.anyio
async def test_a_connection_waits_while_the_process_with_fewer_is_alive(
    port: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    pauses: list[Callable[[], None]] = []  # the test ends them
    pause_for = HttpListener._pause_for

    def pause(taking: HttpListener, seconds: float, callback: Callable[[], None]) -> None:
        pause_for(taking, 3600.0, callback)
        pauses.append(callback)

    monkeypatch.setattr(HttpListener, "_pause_for", pause)
    alive = ConnectionCounts(tmp_path / "connections", 0, 2)
    fuller = Accepting(port, tmp_path, 1)
    for counts in (alive, fuller.counts):
        counts.set_ready()
    fuller.counts.add(5)
    with socket.socket() as client:
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, port.getsockname())
        await eventually(lambda: pauses)
        alive.add(1)
        pauses.pop()()
        assert fuller.num == 0
        await eventually(lambda: pauses)
        pauses.pop()()  # the other process has accepted nothing since
        assert await said(client) == GREETING
    assert fuller.num == 1
    fuller.stop()


@pytest.mark.anyio
async def test_the_process_with_fewer_connections_accepts_the_next(
    port: socket.socket, tmp_path: Path, anyio_backend: str
) -> None:
    """A process that is not ready accepts only what the other leaves."""
    one, other = (Accepting(port, tmp_path, index) for index in range(2))
    open_: list[socket.socket] = []

    async def connect(num: int) -> list[int]:
        for _ in range(num):
            open_.append(client := socket.socket())
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, port.getsockname())
            assert await said(client) == GREETING
        return [one.num, other.num]

    assert await connect(4) == [2, 2]  # neither is ready
    other.counts.set_ready()
    assert await connect(4) == [2, 6]
    one.counts.set_ready()
    assert await connect(6) == [7, 7]
    for client in open_:
        client.close()
    await eventually(lambda: not one.counts.fewer() and not other.counts.fewer())
    one.num = other.num = 0
    open_.clear()
    one.hang()
    assert await connect(4) == [0, 4]
    one.stop()
    again = Accepting(port, tmp_path, 0)  # as after a crash
    again.counts.set_ready()
    one = again
    assert await connect(4) == [4, 4]
    for accepting in (one, other):
        accepting.stop()
    for client in open_:
        client.close()


@pytest.mark.anyio
async def test_connections_left_by_a_hung_process_are_accepted_together(
    port: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    """A closed process has no turn."""
    monkeypatch.setattr(listener_module, "YIELD_S", 0.2)
    hung, other = (Accepting(port, tmp_path, index) for index in range(2))
    for accepting in (hung, other):
        accepting.counts.set_ready()
    hung.hang()
    clients: list[socket.socket] = []

    async def connect(num: int) -> None:
        new = [socket.create_connection(port.getsockname()) for _ in range(num)]
        clients.extend(new)
        for client in new:
            client.setblocking(False)
            assert await said(client) == GREETING

    other.counts.add(1)  # now it is the turn of the hung process
    began = asyncio.get_running_loop().time()
    await connect(20)
    assert asyncio.get_running_loop().time() - began < 10 * 0.2
    hung.stop()
    monkeypatch.setattr(listener_module, "YIELD_S", 2 * LIMIT_S)
    await connect(2)
    other.stop()
    for client in clients:
        client.close()
