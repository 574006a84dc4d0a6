"""HTTP over TLS reloads its certificate when the file changes and the key matches."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.http.serving import server
from pdserve.gateway.listener import listen
from pdserve.services.common.auth.certificates import Identity, Role, issue, make_authority

pytestmark = pytest.mark.anyio


async def shown(port: int) -> bytes:
    """The certificate that a client sees, as DER; empty if the handshake fails."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except (ssl.SSLError, ConnectionError):
        return b""
    found: Any = writer.get_extra_info("ssl_object")
    writer.close()
    return bytes(found.getpeercert(binary_form=True))


def der(identity: Identity) -> bytes:
    return ssl.PEM_cert_to_DER_cert(identity.certificate.decode())


async def say_ok(scope: Any, receive: Any, send: Any) -> None:
    """Answer `ok` to every request."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


def test_a_peer_without_handshake_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Drop a peer that never starts its handshake, without delaying others."""
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.2)
    identity = issue(make_authority(), Role.GATEWAY)
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.write_bytes(identity.certificate)
    key.write_bytes(identity.key)

    async def run() -> None:
        http = server.HttpServer(say_ok, None, 30.0, str(certificate), str(key))  # type: ignore[arg-type]
        listener = listen("127.0.0.1", 0)
        serving = asyncio.create_task(http.serve([listener]))
        await eventually(lambda: http.started)
        host, port = listener.getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        async with httpx.AsyncClient(verify=False) as client:
            assert (await client.get(f"https://{host}:{port}/")).text == "ok"
        assert await asyncio.wait_for(reader.read(), LIMIT_S / 3) == b""
        writer.close()
        http.should_exit = True
        await serving

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_new_certificate_is_loaded_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    anyio_backend: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(server, "LOOK_AGAIN_S", 0.01)
    authority = make_authority()
    old, new = (issue(authority, Role.GATEWAY) for _ in range(2))
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.write_bytes(old.certificate)
    key.write_bytes(old.key)
    http = server.HttpServer(say_ok, None, 30.0, str(certificate), str(key))  # type: ignore[arg-type]
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(http.serve([listener]))
    watching = asyncio.create_task(http.watch_certificate())
    port = listener.getsockname()[1]
    await eventually(lambda: http.started)
    assert await shown(port) == der(old)
    certificate.write_bytes(new.certificate)
    await eventually(lambda: "keeping the old one" in caplog.text)
    assert await shown(port) == der(old), "the old certificate must stay until the new key is there"
    key.write_bytes(new.key)

    async def is_new() -> bool:
        return await shown(port) == der(new)

    await eventually(is_new)
    watching.cancel()
    http.should_exit = True
    await serving
