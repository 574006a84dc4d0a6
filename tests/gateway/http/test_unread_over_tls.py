"""Over TLS, a client that reads nothing loses its connection, and a slow client keeps it."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.http.serving import HttpServer
from pdserve.gateway.main import listen
from pdserve.services.common.auth.certificates import Role, issue, make_authority

pytestmark = pytest.mark.anyio
SMALL = 1 << 14  # socket buffer size
STALL_S = 1.0
NUM_BYTES = 400_000  # what the TLS layer accepts without a pause
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def say_much(scope: object, receive: object, send: object) -> None:
    head = {"status": 200, "headers": [(b"content-length", str(NUM_BYTES).encode())]}
    await send({"type": "http.response.start", **head})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": bytes(NUM_BYTES)})  # type: ignore[operator]


@pytest.fixture
async def connection(
    tmp_path: Path,
) -> AsyncIterator[tuple[HttpServer, asyncio.StreamReader, asyncio.StreamWriter]]:
    identity = issue(make_authority(), Role.GATEWAY)
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.write_bytes(identity.certificate)
    key.write_bytes(identity.key)
    server = HttpServer(say_much, None, STALL_S, str(certificate), str(key))  # type: ignore[arg-type]
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    task = asyncio.create_task(server.serve([listener]))
    await eventually(lambda: server.started)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(
        sock=client, ssl=trusting, server_hostname="x", limit=1 << 12
    )
    yield server, reader, writer
    writer.transport.abort()
    server.should_exit = True
    await asyncio.wait_for(task, LIMIT_S)


async def read_all(reader: asyncio.StreamReader, pause_s: float) -> int:
    """The number of bytes received."""
    taken = 0
    with suppress(ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
        while piece := await reader.read(1 << 13):
            taken += len(piece)
            if taken >= NUM_BYTES:
                break
            await asyncio.sleep(pause_s)
    return taken


async def test_a_client_that_reads_nothing_loses_its_connection(connection):
    server, reader, writer = connection
    writer.write(ASK)
    await reader.readuntil(b"\r\n\r\n")
    await eventually(lambda: not server.server_state.connections)
    async with asyncio.timeout(LIMIT_S):
        assert await read_all(reader, 0) < NUM_BYTES


async def test_a_byte_of_the_next_request_does_not_keep_the_connection(connection):
    server, reader, writer = connection
    writer.write(ASK)
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"G")
    await eventually(lambda: not server.server_state.connections)


async def test_a_client_that_reads_slowly_receives_everything(connection):
    _, reader, writer = connection
    writer.write(ASK)
    await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(LIMIT_S):
        assert await read_all(reader, 0.06) >= NUM_BYTES
