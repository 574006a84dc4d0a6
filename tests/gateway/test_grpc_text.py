"""The gRPC Text service over a socket, with a scripted router behind it."""

import asyncio

import grpc
import pytest
from fakes.memory_tracer import CLIENT, MemoryTracer, own_id, parent_of, trace_of
from fakes.router import FakeRouter, finished, placed, saying, tokens
from grpc_health.v1 import health_pb2, health_pb2_grpc
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.grpc_api import TEXT_METHODS
from pdserve.protos import common_pb2 as pb
from pdserve.protos.text_pb2 import ChatMessage, ChatRequest, CompleteRequest, TextOptions
from pdserve.protos.text_pb2_grpc import TextStub
from pdserve.services.common.rate_limits import RateLimits, RateSettings
from pdserve.services.common.rpc import Backpressure

pytestmark = pytest.mark.anyio
HI = [ChatMessage(role="user", content="hi")]


async def test_chat(make_channel, caplog):
    caplog.set_level("INFO")
    router = FakeRouter(saying("hello world", cached=2))
    text = TextStub(await make_channel(router))
    chunks = [chunk async for chunk in text.Chat(ChatRequest(messages=HI))]
    assert "".join(chunk.text for chunk in chunks) == "hello world"
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert chunks[-1].usage.prompt_tokens == len(router.starts[0].prompt_ids)
    assert chunks[-1].usage.completion_tokens == len(router.encode("hello world")) + 1
    assert chunks[-1].usage.cached_tokens == 2
    assert [chunk async for chunk in text.Complete(CompleteRequest(prompt="x"))]
    lines = [r.getMessage() for r in caplog.records if r.name == "pdserve.gateway.request"]
    routes = [line.partition(" 200 model=tiny ")[0] for line in lines]
    assert routes == ["gRPC Text/Chat", "gRPC Text/Complete"]


async def test_complete_with_options(make_channel):
    router = FakeRouter(saying("hello world"))
    text = TextStub(await make_channel(router))
    options = TextOptions(
        params=pb.SamplingParams(
            temperature=0, max_tokens=9, top_k=3, presence_penalty=1, penalty_window=5
        ),
        stop=["o w"],
        seed=4,
    )
    request = CompleteRequest(model="tiny", prompt="x", options=options)
    chunks = [chunk async for chunk in text.Complete(request)]
    assert "".join(chunk.text for chunk in chunks) == "hell"
    start = router.starts[0]
    assert (start.params.temperature, start.params.top_k, start.params.max_tokens) == (0, 3, 9)
    assert (start.params.presence_penalty, start.params.penalty_window) == (1, 5)
    assert start.seed == 4
    assert router.cancels


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (ChatRequest(model="other", messages=HI), grpc.StatusCode.NOT_FOUND),
        (ChatRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (
            ChatRequest(messages=[ChatMessage(role="wizard", content="x")]),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            ChatRequest(messages=HI, options=TextOptions(params=pb.SamplingParams(top_p=7))),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            ChatRequest(
                messages=HI, options=TextOptions(params=pb.SamplingParams(min_p=float("nan")))
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            ChatRequest(messages=[ChatMessage(role="user", content="a b " * 400)]),
            grpc.StatusCode.OUT_OF_RANGE,
        ),
        (
            ChatRequest(messages=HI, options=TextOptions(params=pb.SamplingParams(logprobs=1))),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_invalid_requests_are_refused(make_channel, request_, status):
    router = FakeRouter(saying("x"))
    text = TextStub(await make_channel(router))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await text.Chat(request_).read()
    assert caught.value.code() == status
    assert caught.value.details()
    assert router.starts == []


async def test_a_long_model_name_is_cut(make_channel):
    """Cut the name so that the error fits into the trailers of a call."""
    text = TextStub(await make_channel(FakeRouter(saying("hello"))))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await text.Chat(ChatRequest(model="m" * 100_000, messages=HI)).read()
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert 100 < len(caught.value.details()) < 1000


async def test_api_keys(make_channel):
    channel = await make_channel(FakeRouter(saying("hello")), ("secret",))
    text = TextStub(channel)
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await text.Chat(ChatRequest(messages=HI), metadata=metadata).read()
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    good = (("authorization", "Bearer secret"),)
    assert [c async for c in text.Chat(ChatRequest(messages=HI), metadata=good)]
    health = health_pb2_grpc.HealthStub(channel)
    assert await health.Check(health_pb2.HealthCheckRequest())


async def test_each_key_has_a_separate_prefix_cache(make_channel):
    """A salt of the client divides the cache further."""
    router = FakeRouter(saying("hello"))
    text = TextStub(await make_channel(router, ("one", "two")))
    for key in ("one", "two"):
        metadata = (("authorization", f"Bearer {key}"),)
        for salt in (b"", b"mine"):
            options = TextOptions(cache_salt=salt)
            for request in (
                text.Chat(ChatRequest(messages=HI, options=options), metadata=metadata),
                text.Complete(CompleteRequest(prompt="x", options=options), metadata=metadata),
            ):
                assert [chunk async for chunk in request]
    salts = [start.cache_salt for start in router.starts]
    assert len(salts) == 8
    assert len(set(salts)) == 4
    assert not {b"", b"mine"} & set(salts)
    assert salts[0::2] == salts[1::2], "both methods must use the same salts"


async def test_a_salt_is_bounded(make_channel):
    router = FakeRouter(saying("hello"))
    text = TextStub(await make_channel(router))
    options = TextOptions(cache_salt=b"x" * 257)
    with pytest.raises(grpc.aio.AioRpcError, match="at most 256 bytes"):
        await text.Chat(ChatRequest(messages=HI, options=options)).read()
    assert router.starts == []


async def test_a_disconnect_cancels(make_channel):
    async def play(router, start):
        yield placed(start)
        await asyncio.Event().wait()

    router = FakeRouter(play)
    call = TextStub(await make_channel(router)).Chat(ChatRequest(messages=HI))
    reading = asyncio.ensure_future(call.read())
    await eventually(lambda: router.starts)
    call.cancel()
    await asyncio.wait_for(router.closed.wait(), LIMIT_S)
    assert router.left == [router.starts[0].request]
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_an_inexact_answer_is_marked(make_channel):
    async def play(router, start):
        yield placed(start)
        yield tokens(start, router.encode("hello"), 0, finish=pb.STOP)
        yield finished(start, inexact=True)

    text = TextStub(await make_channel(FakeRouter(play)))
    chunks = [chunk async for chunk in text.Chat(ChatRequest(messages=HI))]
    assert chunks[-1].usage.inexact


async def chatty(router, start):
    """Yield tokens until the consumer stops."""
    yield placed(start)
    ids = router.encode("hello world ") * 40
    for position in range(0, 10**9, len(ids)):
        yield tokens(start, ids, position)
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "backpressure", [Backpressure(1 << 16, 60.0), Backpressure(1 << 30, 0.5)], ids=["bytes", "time"]
)
async def test_a_client_that_does_not_read_is_cancelled(make_channel, backpressure):
    router = FakeRouter(chatty if backpressure.stall_s > 1 else some)
    call = TextStub(await make_channel(router, backpressure=backpressure)).Chat(
        ChatRequest(messages=HI)
    )
    chunks = aiter(call)
    await anext(chunks)
    await asyncio.wait_for(router.closed.wait(), LIMIT_S)
    assert router.left == [router.starts[0].request]
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # when it reads again
        [chunk async for chunk in chunks]
    assert caught.value.code() == grpc.StatusCode.CANCELLED


async def some(router, start):
    """Fill a connection that is not read, then yield nothing more."""
    async for event in chatty(router, start):
        yield event
        if event.tokens.position > 200_000:
            break
    await asyncio.Event().wait()


async def test_a_call_without_a_key_is_refused_before_its_message_is_read(make_channel):
    """Refuse the call without waiting for a message."""
    channel = await make_channel(FakeRouter(saying("hello")), ("secret",))
    for method in TEXT_METHODS:
        call = channel.stream_stream(method)()  # its message never arrives
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), LIMIT_S)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_constraints_of_a_text_request(make_channel):
    router = FakeRouter(some)
    text = TextStub(await make_channel(router))
    options = TextOptions(params=pb.SamplingParams(allowed_token_ids=[5, 6]))
    assert await text.Complete(CompleteRequest(prompt="x", options=options)).read()
    assert list(router.starts[0].params.allowed_token_ids) == [5, 6]
    for name, value in (
        ("bad_words", [pb.TokenSequence(ids=[1])]), ("grammar", pb.Grammar(source="x")),
        ("thinking", pb.ThinkingBudget(end_ids=[1])), ("logprob_token_ids", [1]), ("logprobs", 1),
    ):  # fmt: skip
        options = TextOptions(params=pb.SamplingParams(**{name: value}))
        with pytest.raises(grpc.aio.AioRpcError, match=name) as caught:
            await text.Complete(CompleteRequest(prompt="x", options=options)).read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(router.starts) == 1


async def test_unanswered_messages_are_bounded(make_channel):
    router = FakeRouter(some)
    text = TextStub(await make_channel(router, max_bytes=1000))
    first = text.Complete(CompleteRequest(prompt="x" * 400))
    await anext(aiter(first))
    with pytest.raises(grpc.aio.AioRpcError, match="too many requests at once") as caught:
        await text.Complete(CompleteRequest(prompt="x" * 800)).read()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()


async def test_remaining_rates_are_in_the_trailers(make_channel):
    rates = RateLimits(RateSettings(requests=1, tokens=1000))
    text = TextStub(await make_channel(FakeRouter(saying("hello")), rates=rates))
    call = text.Chat(ChatRequest(messages=HI))
    assert [chunk async for chunk in call]
    trailers = dict(await call.trailing_metadata())
    assert trailers["x-ratelimit-remaining-requests"] == "0"
    assert 0 < int(trailers["x-ratelimit-remaining-tokens"]) < 1000
    refused = text.Chat(ChatRequest(messages=HI))
    with pytest.raises(grpc.aio.AioRpcError, match="requests per minute"):
        await refused.read()
    assert dict(await refused.trailing_metadata())["x-ratelimit-limit-requests"] == "1"


async def test_a_trace_context_is_continued_through_metadata(make_channel):
    tracer, router = MemoryTracer(), FakeRouter(saying("hello"))
    text = TextStub(await make_channel(router, tracer=tracer))
    call = text.Chat(ChatRequest(messages=HI), metadata=(("traceparent", CLIENT),))
    assert [chunk async for chunk in call]
    trailers = dict(await call.trailing_metadata())
    span = tracer.spans()["request"]
    assert (trace_of(span), parent_of(span)) == (CLIENT[3:35], CLIENT[36:52])
    assert trailers["traceparent"] == router.starts[0].trace_parent
    assert trailers["traceparent"] == f"00-{CLIENT[3:35]}-{own_id(span)}-01"
