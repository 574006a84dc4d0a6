"""The picker's process over real gRPC, with a proxy, a router and probes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.proxy_stream import CHAT, MODELS, body, head, set_headers
from fakes.router import FakeRouter, saying, served
from fakes.router_process import RouterServicer, serve_router
from grpc_health.v1 import health_pb2, health_pb2_grpc
from systems.cluster_secret import SECRET
from systems.eventually import eventually

from pdserve.protos import ext_proc_pb2 as pb
from pdserve.protos.ext_proc_pb2_grpc import ExternalProcessorStub
from pdserve.services.common.auth.certificates import Role, issue, make_authority
from pdserve.services.picker import servicer
from pdserve.services.picker.main import LIVE, NAMES, PickerProcess
from pdserve.services.picker.settings import PickerSettings

pytestmark = pytest.mark.anyio
PODS = tuple(f"127.0.0.{number}:8000" for number in (1, 2, 3))
REQUEST = {"model": "tiny", "messages": [{"role": "user", "content": "hello world"}]}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def running(
    routers: str, *, known: bool = True, **settings: Any
) -> AsyncIterator[PickerProcess]:
    """Run the picker; `known`: continue once it knows its endpoints."""
    fields = {"bind": "127.0.0.1:0", "endpoints": PODS, "decide_timeout_s": 20.0} | settings
    process = PickerProcess(PickerSettings(cluster_secret=(SECRET,), routers=(routers,), **fields))
    await process.start()
    if known:
        await process.endpoints.ready_known.wait()
    try:
        yield process
    finally:
        await process.stop(0)


@asynccontextmanager
async def router() -> AsyncIterator[tuple[RouterServicer, str]]:
    card, blobs = served()
    servicer, host, address = await serve_router(FakeRouter(saying("hello"), [card], blobs))
    yield servicer, address
    await host.stop(0)


async def endpoint_of(channel: grpc.aio.Channel, request: dict[str, Any] = REQUEST) -> str:
    """Return the endpoint of a chat."""
    call = ExternalProcessorStub(channel).Process()
    for message in (head(CHAT), body(json.dumps(request).encode())):
        await call.write(message)
    answer = await call.read()
    passed = await call.read()
    assert json.loads(passed.request_body.response.body_mutation.streamed_response.body) == request
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return set_headers(answer)[servicer.DESTINATION]


async def test_a_chat_goes_where_the_router_decides() -> None:
    async with (
        router() as (servicer, address),
        running(address) as picker,
        grpc.aio.insecure_channel(picker.address) as channel,
    ):
        await eventually(lambda: picker.client.num_connected)
        for host in ("127.0.0.3", "127.0.0.2"):
            servicer.hosts = [host]
            assert await endpoint_of(channel) == f"{host}:8000"
        words = servicer.router.words
        request = words.decode(list(servicer.picks[0].prompt_ids), skip_special_tokens=False)
        assert request == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"


async def test_without_a_router_any_endpoint_is_named_at_once() -> None:
    async with (
        running("127.0.0.1:9") as picker,
        grpc.aio.insecure_channel(picker.address) as channel,
    ):
        assert await endpoint_of(channel) in PODS
        assert not picker.client.num_connected


async def health_of(channel: grpc.aio.Channel, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    return int(answer.status)


async def test_health_has_the_names_of_the_protocol() -> None:
    """The picker is live at once, and serves once it knows endpoints, even without a router."""
    async with (
        running("127.0.0.1:9", known=False, endpoints=("nowhere.invalid:80",)) as picker,
        grpc.aio.insecure_channel(picker.address) as channel,
    ):
        assert await health_of(channel, LIVE) == SERVING
        for name in ("", *NAMES):
            assert await health_of(channel, name) == NOT_SERVING
        picker.endpoints.set_resolved(PODS)

        async def all_serve() -> bool:
            return {await health_of(channel, name) for name in ("", *NAMES)} == {SERVING}

        await eventually(all_serve)


async def test_a_drain_lets_streams_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.services.picker.main.LAME_DUCK_S", 0.0)
    async with (
        running("127.0.0.1:9") as picker,
        grpc.aio.insecure_channel(picker.address) as channel,
    ):
        call = ExternalProcessorStub(channel).Process()
        await call.write(head(MODELS, end_of_stream=True))
        assert set_headers(await call.read())
        draining = asyncio.create_task(picker.drain())
        await asyncio.sleep(0.1)  # the server stops meanwhile
        await call.write(pb.ProcessingRequest(response_headers=pb.HttpHeaders()))
        assert (await call.read()).WhichOneof("response") == "response_headers"
        assert not draining.done()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await draining


async def test_tls(tmp_path: Path) -> None:
    authority = make_authority()
    certificate, key = issue(authority, Role.GATEWAY, 1)
    (tmp_path / "tls.crt").write_bytes(certificate)
    (tmp_path / "tls.key").write_bytes(key)
    files = {"tls_cert": str(tmp_path / "tls.crt"), "tls_key": str(tmp_path / "tls.key")}
    async with running("127.0.0.1:9", **files) as picker:
        trust = grpc.ssl_channel_credentials(authority.certificate)
        named = (("grpc.ssl_target_name_override", Role.GATEWAY.dns_name),)
        async with grpc.aio.secure_channel(picker.address, trust, named) as channel:
            assert await endpoint_of(channel) in PODS


async def test_an_internal_error_ends_a_stream_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running("127.0.0.1:9") as picker:
        monkeypatch.setattr(picker.endpoints, "candidates", lambda hint: 1 / 0)
        async with grpc.aio.insecure_channel(picker.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await endpoint_of(channel)
    (failures,) = [
        sample.value
        for metric in picker.metrics.collect()
        for sample in metric.samples
        if sample.name == "pdserve_picker_failures_total"
    ]
    assert failures == 1
