"""The router's methods beside sessions: Generate, views, blobs, and access to them."""

import asyncio
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from systems.cluster_secret import BEARER, SECRET, open_channel
from systems.eventually import LIMIT_S, eventually

from pdserve.engine.kv import KvSpec, LayerGroup, encode_spec
from pdserve.protos import common_pb2 as pb
from pdserve.protos import router_pb2 as rpc
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.common_pb2_grpc import BlobsStub
from pdserve.protos.fleet_pb2 import Heartbeat, Load, WorkerHello, WorkerReport
from pdserve.protos.fleet_pb2_grpc import FleetStub
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import PROTOCOL_VERSION, IdsCollector
from pdserve.services.router import servicer
from pdserve.services.router.fleet import Worker

pytestmark = pytest.mark.anyio
PROMPT = list(range(20))
ECHO_S = 0.5
FULL = LayerGroup((0,), "full", 0, 1, 1, "float32", 0, 1)


def generate(model: str = "", max_tokens: int = 6) -> rpc.GenerateRequest:
    params = pb.SamplingParams(max_tokens=max_tokens)
    return rpc.GenerateRequest(model=model, prompt_ids=PROMPT, params=params, seed=5)


async def failure_of(call: Any) -> ServiceError:
    try:
        replies = [reply async for reply in call] if hasattr(call, "__aiter__") else [await call]
    except grpc.aio.AioRpcError as error:
        return ServiceError.from_rpc(error)
    raise AssertionError(f"answered {replies}")


async def test_generate(make_cluster: Any, expected: Any) -> None:
    cluster = await make_cluster(api_keys=("a key",))
    await cluster.decode()
    for key in ("a key", SECRET):
        async with open_channel(cluster.router.address, key) as channel:
            replies = [r async for r in RouterStub(channel).Generate(generate())]
        assert replies[-1].WhichOneof("event") == "finished"
        assert [i for r in replies for i in r.tokens.ids] == expected(PROMPT, 6)


async def test_generate_names_the_model_when_there_are_two(make_cluster: Any) -> None:
    cluster = await make_cluster()
    async with open_channel(cluster.router.address) as channel:
        stub = RouterStub(channel)
        assert (await failure_of(stub.Generate(generate()))).code == pb.UNAVAILABLE
        await cluster.decode("one")
        await cluster.decode("two")
        error = await failure_of(stub.Generate(generate()))
        assert (error.code, error.param) == (pb.INVALID_ARGUMENT, "model")
        assert (await failure_of(stub.Generate(generate("x")))).code == pb.MODEL_NOT_FOUND
        assert [r async for r in stub.Generate(generate("two"))]
        models = await stub.ListModels(rpc.ListModelsRequest())
        assert [m.name for m in models.models] == ["one", "two"]


async def test_a_client_that_leaves_cancels_at_once(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 2
    async with open_channel(cluster.router.address) as channel:
        call = RouterStub(channel).Generate(generate())
        await anext(aiter(call))
        call.cancel()
        await decode.until(lambda: bool(decode.cancelled))
    assert cluster.router.core.dispatcher.num_running == 0


@pytest.mark.parametrize(
    ("max_buffer_bytes", "stall_s"), [(1 << 14, 60.0), (1 << 30, 0.5)], ids=["bytes", "time"]
)
async def test_a_client_that_does_not_read_is_cancelled(
    make_cluster: Any, max_buffer_bytes: int, stall_s: float
) -> None:
    cluster = await make_cluster(max_buffer_bytes=max_buffer_bytes, stall_timeout_s=stall_s)
    decode = await cluster.decode()
    decode.hold_at = 1
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    async with grpc.aio.insecure_channel(cluster.router.address, options=narrow) as channel:
        request = generate(max_tokens=10_000)
        call = RouterStub(channel).Generate(request, metadata=BEARER)
        await anext(aiter(call))
        attempt = decode.of("admit")[0].attempt
        for at in range(1, 10_000, 100):  # with scores, so that few messages fill a connection
            tokens = pb.Tokens(request="r", attempt=attempt, position=at, ids=range(100))
            tokens.logprobs.extend(
                [pb.TokenLogprob(top_ids=range(20), top_logprobs=[0.5] * 20)] * 100
            )
            decode.put(wire.DecodeEvent(tokens=tokens))
            await asyncio.sleep(0)
        await decode.until(lambda: bool(decode.cancelled))
        assert cluster.router.core.dispatcher.num_running == 0
        error = await failure_of(call)
        assert error.code == pb.CANCELLED
        assert "read" in error.message
    assert not decode.cancelled[1:], "once"


async def test_invalid_requests_are_refused_by_field(make_cluster: Any) -> None:
    cluster = await make_cluster()
    await cluster.decode()
    gateway = await cluster.gateway()
    await gateway.start("empty", [])
    await gateway.start("many", PROMPT, n=1_000_000)
    await gateway.start("x" * 300, PROMPT)
    await gateway.start("uneven", PROMPT, n=2, choices=[pb.ChoiceState()])
    for request, param in (
        ("empty", "prompt_ids"),
        ("many", "n"),
        ("x" * 300, "request"),
        ("uneven", "choices"),
    ):
        failed = await gateway.end(request)
        assert (failed.failure.code, failed.failure.param) == (pb.INVALID_ARGUMENT, param)


async def test_peers_without_the_secret_are_refused(make_cluster: Any) -> None:
    cluster = await make_cluster(api_keys=("a key",))
    await cluster.decode()
    for key in ("wrong", "a key"):
        async with open_channel(cluster.router.address, key) as channel:
            router, fleet = RouterStub(channel), FleetStub(channel)
            calls = [
                router.Session(),  # a write that races with the refusal has its own status
                router.GetFleet(rpc.GetFleetRequest()),
                fleet.Join(),
                BlobsStub(channel).GetBlob(pb.BlobRequest(digest="0")),
            ]
            if key == "wrong":
                calls += [router.Generate(generate()), router.ListModels(rpc.ListModelsRequest())]
            for call in calls:
                assert (await failure_of(call)).code == pb.UNAUTHENTICATED
    assert len(cluster.router.core.fleet.workers) == 1


async def test_the_option_limits_the_blocks_known_of_workers(make_cluster: Any) -> None:
    cluster = await make_cluster(prefix_index_hashes=10)
    prefixes = cluster.router.core.fleet.prefixes
    for _ in range(2):
        worker = await cluster.decode()
        worker.membership.prefixes([bytes(15) + bytes([i]) for i in range(8)], [])
        await worker.until(lambda: len(prefixes) == 8)
    worker.membership.prefixes([bytes(15) + bytes([i]) for i in range(8, 16)], [])
    await eventually(lambda: prefixes.sampled_share == 0.5)
    await eventually(lambda: len(prefixes) == 8)
    assert max(prefixes.num_cached([bytes(15) + bytes([i]) for i in range(16)]).values()) == 15


async def test_a_worker_resends_its_cache_when_a_message_was_lost(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await make_cluster()
    core = cluster.router.core
    take, lost = core.report, list[WorkerReport]()

    def lose_one(worker: Worker, report: WorkerReport, lease: int) -> bool:
        if report.prefixes.added and not report.prefixes.reset and not lost:
            lost.append(report)
            return True
        return take(worker, report, lease)

    monkeypatch.setattr(core, "report", lose_one)
    worker = await cluster.decode()
    said = [os.urandom(16) for _ in range(8)]
    worker.membership.prefixes(said[:4], [])
    await eventually(lambda: len(lost) == 1)
    worker.membership.prefixes(said[4:], [])
    await eventually(lambda: core.fleet.prefixes.num_cached(said) == {worker.incarnation: 8})
    assert core.fleet.prefixes.num_gaps == 1
    assert "prefix cache events are missing" in caplog.text
    assert [w.incarnation for w in core.fleet.workers.values()] == [worker.incarnation], (
        "it was not given up"
    )


async def test_the_newest_stream_of_a_worker_counts(make_cluster: Any) -> None:
    """Two addresses may belong to one router: then a worker joins it twice, and stays."""
    core = (await make_cluster()).router.core
    card = pb.ModelCard(name="m", kv_spec=encode_spec(KvSpec(16, (FULL,))))
    hello = WorkerHello(role=2, incarnation=b"b" * 16, address="127.0.0.1:1", card=card)
    first = core.join(hello).lease
    worker = core.join(hello)
    assert core.report(worker, WorkerReport(load=Load(running=2)), worker.lease)
    assert core.report(worker, WorkerReport(load=Load(running=1)), first)
    assert worker.load.running == 2
    core.left(worker, worker.lease)
    assert not core.report(worker, WorkerReport(load=Load(running=1)), first), "it joins again"


async def test_join_refuses_an_invalid_hello(make_cluster: Any) -> None:
    cluster = await make_cluster()
    async with open_channel(cluster.router.address) as channel:
        for hello in (
            WorkerHello(),
            WorkerHello(role=2, incarnation=b"short", address="a:1"),
            WorkerHello(role=2, incarnation=b"b" * 16, address="nowhere"),
            WorkerHello(role=2, incarnation=b"b" * 16, address="a:1", card=pb.ModelCard(name="m")),
            WorkerHello(
                role=2,
                incarnation=b"b" * 16,
                address="a:1",
                card=pb.ModelCard(name="m", kv_spec=encode_spec(KvSpec(16, ())) + b"?"),
            ),
        ):
            hello.protocol = PROTOCOL_VERSION
            call = FleetStub(channel).Join(iter([WorkerReport(hello=hello)]))
            assert (await failure_of(call)).code == pb.INVALID_ARGUMENT
    assert not cluster.router.core.fleet.workers


async def test_calls_that_do_not_begin_with_hello_are_refused(make_cluster: Any) -> None:
    cluster = await make_cluster()
    async with open_channel(cluster.router.address) as channel:
        for call, message in (
            (FleetStub(channel).Join, WorkerReport(heartbeat=Heartbeat(step=1))),
            (RouterStub(channel).Session, rpc.GatewayMessage(start=pb.Start(request="r"))),
        ):
            error = await failure_of(call(iter([message])))
            assert (error.code, error.param) == (pb.INVALID_ARGUMENT, "hello")


@pytest.mark.parametrize("within", ["heartbeat", "load"])
async def test_some_heartbeats_are_echoed(
    within: str, make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats come in separate reports or with loads."""
    monkeypatch.setattr(servicer, "HEARTBEAT_ECHO_S", ECHO_S)
    cluster = await make_cluster()
    fleet = cluster.router.core.fleet
    count = 16

    async def reports(address: str) -> AsyncIterator[WorkerReport]:
        card = pb.ModelCard(name="m", kv_spec=encode_spec(KvSpec(16, (FULL,))))
        hello = WorkerHello(role=2, incarnation=b"b" * 16, address=address, card=card)
        hello.protocol = PROTOCOL_VERSION
        yield WorkerReport(hello=hello)
        for step in range(count):
            beat = Heartbeat(step=step, busy=True)
            if within == "load":
                yield WorkerReport(load=Load(running=step), load_beat=beat)
            else:
                yield WorkerReport(heartbeat=beat)
            await asyncio.sleep(ECHO_S / 5)
        await eventually(lambda: fleet.workers[b"b" * 16].engine.counter == count - 1)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with open_channel(cluster.router.address) as channel:
            call = FleetStub(channel).Join(reports(address))
            replies = [reply.WhichOneof("reply") async for reply in call]
    assert replies[0] == "welcome"
    assert 2 <= replies.count("echo") <= count // 3


async def test_blobs_are_proxied_verified_and_cached(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    digest = decode.card.tokenizer_digest
    async with open_channel(cluster.router.address) as channel:
        stub = BlobsStub(channel)

        async def read(name: str) -> bytes:
            return b"".join([c.data async for c in stub.GetBlob(pb.BlobRequest(digest=name))])

        first, second = await asyncio.gather(read(digest), read(digest))
        assert first == second
        assert hashlib.sha256(first).hexdigest() == digest
        await decode.kill()
        assert await read(digest) == first
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read("0" * 64)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_blob_with_another_digest_is_not_passed_on(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    wrong = "1" * 64
    cluster.router.core.fleet.get(decode.incarnation).hello.card.template_digest = wrong
    async with open_channel(cluster.router.address) as channel:
        call = BlobsStub(channel).GetBlob(pb.BlobRequest(digest=wrong))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_fleet_view(make_cluster: Any) -> None:
    began = time.monotonic()
    cluster = await make_cluster()
    decode = await cluster.decode()
    prefill = await cluster.prefill()
    async with open_channel(cluster.router.address) as channel:
        view = await RouterStub(channel).GetFleet(rpc.GetFleetRequest())
    assert {w.hello.incarnation for w in view.workers} == {decode.incarnation, prefill.incarnation}
    assert {w.state for w in view.workers} == {"live"}
    silent_s = [w.silent_s for w in view.workers]
    assert 0 <= min(silent_s) <= max(silent_s) <= time.monotonic() - began


async def test_a_drained_router_sends_gateways_away_and_ends_its_own_calls(
    make_cluster: Any, expected: Any
) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 3
    gateway = await cluster.gateway()
    await gateway.start("moves", PROMPT)
    await gateway.until(lambda: len(gateway.ids("moves")) == 3)
    async with open_channel(cluster.router.address) as channel:
        stub = RouterStub(channel)
        stays = stub.Generate(generate())
        replies = [await anext(aiter(stays))]
        draining = asyncio.create_task(cluster.router.drain())
        await asyncio.wait_for(gateway.reader, LIMIT_S)
        assert not gateway.of("moves", "failed")
        again = await cluster.gateway(incarnation=gateway.incarnation)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await again.reader
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        failure = await failure_of(stub.Generate(generate()))
        assert failure.code == pb.UNAVAILABLE
        assert failure.retry_after_s > 0
        assert not draining.done()
        decode.released.set()
        replies += [reply async for reply in stays]
    assert [i for r in replies for i in r.tokens.ids] == expected(PROMPT, 6)
    await asyncio.wait_for(draining, LIMIT_S)
    assert not decode.of("cancel"), "a request that moved continues where it runs"


async def test_a_drained_router_begins_no_request_that_its_gateway_took_along(
    make_cluster: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("pdserve.services.router.request.machine.ORPHAN_S", 1.0)
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.busy = 2  # it is retried after 0.1 s
    gateway = await cluster.gateway()
    await gateway.start("waits", PROMPT)
    await eventually(lambda: decode.of("admit"))
    await asyncio.wait_for(cluster.router.drain(), LIMIT_S)
    await asyncio.wait_for(gateway.reader, LIMIT_S)
    dispatcher = cluster.router.core.dispatcher
    await eventually(lambda: dispatcher.num_queued == 1)
    num_asked = len(decode.of("admit"))
    await eventually(lambda: not dispatcher.num_running)
    assert len(decode.of("admit")) == num_asked


def test_starts_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import pdserve.services.router.main; "
        "bad = [m for m in sys.modules if m.startswith(('fastapi', 'numpy'))]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_a_prompt_beyond_the_limits_is_refused_whole(
    make_cluster: Any, monkeypatch: Any
) -> None:
    from pdserve.services.router import servicer

    monkeypatch.setattr(servicer, "IdsCollector", lambda: IdsCollector(max_ids=50_000))
    cluster = await make_cluster()
    decode = await cluster.decode()
    gateway = await cluster.gateway()
    await gateway.start("long", list(range(100_000)))
    await gateway.start("short", PROMPT)
    assert (await gateway.end("long")).failure.code == pb.OVERLOADED
    assert isinstance(await gateway.end("short"), pb.Finished)
    assert [a.start.request for a in decode.of("admit")] == ["short"]


async def test_a_session_with_an_unreadable_message_releases_everything(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 1
    said = rpc.GatewayHello(incarnation=b"g" * 16, protocol=PROTOCOL_VERSION)
    hello = rpc.GatewayMessage(hello=said)
    params = pb.SamplingParams(max_tokens=8)
    start = pb.Start(request="r", model="tiny", prompt_ids=PROMPT, seed=5, params=params)
    admitted = asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        yield hello.SerializeToString()
        yield rpc.GatewayMessage(start=start).SerializeToString()
        await admitted.wait()
        yield b"\xff" * 50

    dispatcher = cluster.router.core.dispatcher
    async with open_channel(cluster.router.address) as channel:
        call = channel.stream_stream("/pdserve.v1.Router/Session")(messages())
        await eventually(lambda: dispatcher.num_attended == 1)
        admitted.set()
        assert (await failure_of(call)).code == pb.INVALID_ARGUMENT
        await eventually(lambda: not dispatcher.num_attended)


async def test_a_prompt_beyond_the_context_is_refused(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    cluster.router.core.fleet.get(decode.incarnation).hello.card.context_len = len(PROMPT) - 1
    async with open_channel(cluster.router.address) as channel:
        for name in ("", "tiny"):
            error = await failure_of(RouterStub(channel).Generate(generate(name)))
            assert (error.code, error.param) == (pb.CONTEXT_LENGTH_EXCEEDED, "prompt_ids")
    assert not decode.of("admit")


async def test_open_prompts_are_bounded_and_each_key_has_a_share(make_cluster: Any) -> None:
    cluster = await make_cluster(max_generate_bytes=2000, api_keys=("one", "two"))
    decode = await cluster.decode()
    decode.hold_at = 1
    async with open_channel(cluster.router.address, "one") as channel:
        stub = RouterStub(channel)
        first = stub.Generate(generate())
        await anext(aiter(first))
        second = stub.Generate(generate())
        await anext(aiter(second))
        error = await failure_of(stub.Generate(generate()))
        assert error.code == pb.OVERLOADED
        assert error.retry_after_s
        async with open_channel(cluster.router.address, "two") as other:
            assert await anext(aiter(RouterStub(other).Generate(generate())))
        first.cancel()
        decode.released.set()
        assert [reply async for reply in second]
        assert [reply async for reply in stub.Generate(generate())], "there is room again"


async def test_generate_is_limited_by_key(make_cluster: Any) -> None:
    cluster = await make_cluster(
        api_keys=("one", "two"), requests_per_minute=2, tokens_per_minute=1000
    )
    await cluster.decode()
    async with open_channel(cluster.router.address, "one") as channel:
        stub = RouterStub(channel)
        first = stub.Generate(generate(max_tokens=6))
        assert [reply async for reply in first]
        trailers = dict(await first.trailing_metadata())
        assert trailers["x-ratelimit-remaining-requests"] == "1"
        assert trailers["x-ratelimit-remaining-tokens"] == str(1000 - len(PROMPT))
        second = stub.Generate(generate())
        assert [reply async for reply in second]
        trailers = dict(await second.trailing_metadata())
        assert trailers["x-ratelimit-remaining-tokens"] == str(1000 - 2 * len(PROMPT) - 6)
        third = stub.Generate(generate())
        assert (await failure_of(third)).code == pb.OVERLOADED
        assert dict(await third.trailing_metadata())["x-ratelimit-remaining-requests"] == "0"
    async with open_channel(cluster.router.address, "two") as channel:
        assert [reply async for reply in RouterStub(channel).Generate(generate())]
