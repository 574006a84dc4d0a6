"""A peer without the secret reaches no handler; health, reflection, the bound address."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from systems.cluster_secret import ACCESS, SECRET, open_channel
from systems.eventually import LIMIT_S, eventually

from pdserve.protos import common_pb2 as pb
from pdserve.protos.common_pb2_grpc import BlobsServicer, BlobsStub, add_BlobsServicer_to_server
from pdserve.protos.fleet_pb2_grpc import FleetServicer, FleetStub, add_FleetServicer_to_server
from pdserve.protos.text_pb2_grpc import TextServicer, add_TextServicer_to_server
from pdserve.services.common.errors import ServiceError, abort
from pdserve.services.common.server import GrpcServer

pytestmark = pytest.mark.anyio


class Blobs(BlobsServicer):
    calls = 0

    async def GetBlob(self, request: Any, context: Any) -> AsyncIterator[pb.BlobChunk]:
        self.calls += 1
        if request.digest == "bad":
            await abort(context, ServiceError(pb.CONTEXT_LENGTH_EXCEEDED, "too long", "prompt", 3))
        yield pb.BlobChunk(data=b"data")


class Fleet(FleetServicer):
    calls = 0

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.calls += 1
        async for _ in request_iterator:
            pass
        return
        yield


class Text(TextServicer):
    """A service that writes its answer instead of yielding it."""

    calls = 0

    async def Chat(self, request: Any, context: Any) -> None:
        self.calls += 1


@pytest.fixture
async def running() -> AsyncIterator[tuple[GrpcServer, str, Blobs, Fleet]]:
    services = ["pdserve.v1.Blobs"]
    host = GrpcServer(ACCESS, ["/pdserve.v1.Blobs/GetBlob"], services)
    blobs, fleet = Blobs(), Fleet()
    add_BlobsServicer_to_server(blobs, host.server)
    add_FleetServicer_to_server(fleet, host.server)
    port = host.listen("127.0.0.1:0")
    await host.start()
    yield host, f"127.0.0.1:{port}", blobs, fleet
    await host.stop(0)


async def status_of(call: Any) -> grpc.StatusCode:
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_secret(running: Any) -> None:
    _, address, blobs, fleet = running
    for secret, status in ((SECRET, "OK"), ("wrong", "UNAUTHENTICATED"), ("", "UNAUTHENTICATED")):
        async with open_channel(address, secret) as channel:
            # Without a message: grpc.aio's client sometimes reports INTERNAL for a call that is
            # refused while it writes one.
            call = FleetStub(channel).Join(iter(()))
            assert (await status_of(call)).name == status
            open_call = BlobsStub(channel).GetBlob(pb.BlobRequest())
            assert await status_of(open_call) is grpc.StatusCode.OK
    assert (fleet.calls, blobs.calls) == (1, 3)


async def test_denied_before_the_peer_has_sent_anything(running: Any) -> None:
    _, address, _, fleet = running
    async with grpc.aio.insecure_channel(address) as channel:
        call = FleetStub(channel).Join()
        async with asyncio.timeout(LIMIT_S):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert fleet.calls == 0


async def test_connections_beyond_the_limit_are_closed() -> None:
    host = GrpcServer(ACCESS, max_connections=2)
    port = host.listen("127.0.0.1:0")
    await host.start()
    held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def settings() -> bytes:
        """Return what a peer gets that claims to speak HTTP/2."""
        held.append(await asyncio.open_connection("127.0.0.1", port))
        reader, writer = held[-1]
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        try:
            return await asyncio.wait_for(reader.read(9), LIMIT_S)
        except ConnectionError:
            return b""

    assert all([await settings() for _ in range(2)])
    assert not await settings()
    held[0][1].close()
    await eventually(settings, "a place that has become free")
    for _, writer in held:
        writer.close()
    await host.stop(0)


async def test_errors_travel_whole(running: Any) -> None:
    _, address, _, _ = running
    async with open_channel(address) as channel:
        call = BlobsStub(channel).GetBlob(pb.BlobRequest(digest="bad"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
    error = ServiceError.from_rpc(caught.value)
    assert (error.code, error.param, error.retry_after_s) == (
        pb.CONTEXT_LENGTH_EXCEEDED,
        "prompt",
        3,
    )
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_health_needs_no_secret_and_follows_the_service(running: Any) -> None:
    host, address, _, _ = running
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check() -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest())).status

        assert await check() == health_pb2.HealthCheckResponse.NOT_SERVING
        host.set_serving(True)
        assert await check() == health_pb2.HealthCheckResponse.SERVING
        host.set_serving(False)
        assert await check() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await status_of(stub.Watch(health_pb2.HealthCheckRequest()))).name == (
            "UNAUTHENTICATED"
        )


async def test_reflection_lists_the_services(running: Any) -> None:
    _, address, _, _ = running
    async with open_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        reply = await anext(aiter(stub.ServerReflectionInfo(iter([ask]))))
    names = {service.name for service in reply.list_services_response.service}
    assert {"pdserve.v1.Blobs", "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_named(running: Any) -> None:
    _, address, _, _ = running
    second = GrpcServer(ACCESS)
    with pytest.raises(OSError, match=f"cannot listen on {address}: the port is in use"):
        second.listen(address)


async def test_the_server_binds_to_the_given_address_only() -> None:
    host = GrpcServer(ACCESS)
    port = host.listen("127.0.0.2:0")
    await host.start()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)
    socket.create_connection(("127.0.0.2", port), timeout=2).close()
    await host.stop(0)


async def test_a_stop_of_grpc_that_hangs_is_given_up(
    running: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a hang was seen on a loaded machine after a client had disconnected."""
    host = running[0]

    async def hang(grace_s: float) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr("pdserve.services.common.server.STOP_S", 0.1)
        patch.setattr(host.server, "stop", hang)
        await host.stop(0)
    assert "gRPC has not stopped" in caplog.text


@pytest.mark.parametrize("method", ["Fleet/Join", "Blobs/GetBlob", "Text/Chat"])
async def test_bytes_that_are_not_a_message_are_refused(
    method: str, caplog: pytest.LogCaptureFixture, anyio_backend: str
) -> None:
    """They are refused whatever the kinds of request and answer, without a traceback."""
    host = GrpcServer(ACCESS, [f"/pdserve.v1.{method}"])
    text = Text()
    add_BlobsServicer_to_server(Blobs(), host.server)
    add_FleetServicer_to_server(Fleet(), host.server)
    add_TextServicer_to_server(text, host.server)
    port = host.listen("127.0.0.1:0")
    await host.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    name = f"/pdserve.v1.{method}"
    garbage = b"\xff" * 50

    async def stream() -> AsyncIterator[bytes]:
        yield garbage

    call: Any
    if method == "Fleet/Join":
        call = channel.stream_stream(name)(stream())
    else:
        call = channel.unary_stream(name)(garbage)
    with pytest.raises(grpc.aio.AioRpcError, match="the request cannot be parsed") as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not text.calls
    await channel.close()
    await host.stop(0)
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
