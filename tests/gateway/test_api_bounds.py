"""REST and gRPC accept sampling values at the bounds and refuse values just outside."""

from itertools import product
from typing import Any

import grpc
import pytest
from builders.sampling_edges import inside, outside
from fakes.router import FakeRouter, saying, served

from pdserve.engine.api import BOUNDS, MAX_BAD_WORD_CHARS, MAX_ENTRIES, MAX_STOP_CHARS
from pdserve.protos import common_pb2 as pb
from pdserve.protos.text_pb2 import CompleteRequest, TextOptions
from pdserve.protos.text_pb2_grpc import TextStub

pytestmark = pytest.mark.anyio
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
PLAIN = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
ON_REST = BOUNDS.keys()
IN_TEXT = BOUNDS.keys() - {"logprobs", "prompt_logprobs"}
AT = [(name, value) for name in sorted(ON_REST) for value in inside(name, BOUNDS[name].api)]
BEYOND = [(name, value) for name in sorted(ON_REST) for value in outside(name, BOUNDS[name].api)]


def router() -> FakeRouter:
    card, blobs = served(context_len=1 << 20)
    return FakeRouter(saying("hello"), [card], blobs)


def bodies(name: str, value: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """(path, field name, body) of each API that has the parameter."""
    if name == "penalty_window":  # there -1 means all; the engine uses 0 for that
        name, value = "repeat_last_n", min(value, 2 * value)
    given = {"1": value} if name == "logit_bias" else value
    plain = ("/v1/completions", name, {**PLAIN, name: given})
    if name == "logprobs":
        chat = {**CHAT, "logprobs": True, "top_logprobs": value}
        return [plain, ("/v1/chat/completions", "top_logprobs", chat)]
    return [plain, ("/v1/chat/completions", name, {**CHAT, name: given})]


async def test_rest_accepts_values_at_the_bounds(make_http, subtests):
    client = make_http(router())
    for name, value in AT:
        with subtests.test(name=name, value=value):
            for path, _, body in bodies(name, value):
                reply = await client.post(path, json=body)
                assert reply.status_code == 200, reply.text


async def test_rest_refuses_values_just_outside(make_http, subtests):
    request = router()
    client = make_http(request)
    for name, value in BEYOND:
        with subtests.test(name=name, value=value):
            request.starts.clear()
            for path, field, body in bodies(name, value):
                reply = await client.post(path, json=body)
                assert reply.status_code == 400, reply.text
                assert reply.json()["error"]["param"] == field
            assert request.starts == []


async def test_list_lengths_are_bounded(make_http, subtests):
    card, blobs = served()
    card.vocab_size = 2000
    client = make_http(FakeRouter(saying("hello"), [card], blobs))
    for name, extra in product(MAX_ENTRIES, (0, 1)):
        with subtests.test(name=name, extra=extra):
            count = MAX_ENTRIES[name] + extra
            value = {
                "stop": ["x" * MAX_STOP_CHARS] * count,
                "stop_token_ids": [0] * count,
                "logit_bias": {str(token): 0 for token in range(count)},
                "allowed_token_ids": [0] * count,
                "bad_words": ["hello" * (MAX_BAD_WORD_CHARS // 5)] * count,
                "logprob_token_ids": [0] * count,
            }[name]
            reply = await client.post("/v1/completions", json={**PLAIN, "logprobs": 0, name: value})
            assert reply.status_code == (400 if extra else 200)
            if extra:
                assert reply.json()["error"]["param"] == name


def on_the_wire(name: str, value: Any) -> TextOptions | None:
    """The options with this value, or None if the field type cannot hold it."""
    try:
        if name == "seed":
            return TextOptions(seed=value)
        given = {1: value} if name == "logit_bias" else value
        return TextOptions(params=pb.SamplingParams(**{name: given}))
    except ValueError:
        return None


async def test_grpc_accepts_values_at_the_bounds(make_channel):
    fake = router()
    text = TextStub(await make_channel(fake))
    taken = 0
    for name, value in AT:
        options = on_the_wire(name, value) if name in IN_TEXT else None
        if options is not None:
            options.params.max_tokens = options.params.max_tokens or 1
            request = CompleteRequest(model="tiny", prompt="hi", options=options)
            assert [chunk async for chunk in text.Complete(request)], (name, value)
            taken += 1
    assert len(fake.starts) == taken >= 2 * len(IN_TEXT) - 5


async def test_grpc_refuses_values_just_outside(make_channel):
    request = router()
    text = TextStub(await make_channel(request))
    refused = set()
    for name, value in BEYOND:
        options = on_the_wire(name, value) if name in IN_TEXT else None
        # On the wire, 0 means that `n` or `max_tokens` is absent.
        if options is None or (name in ("n", "max_tokens") and value == 0):
            continue
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await text.Complete(CompleteRequest(prompt="hi", options=options)).read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert name in (caught.value.details() or "") or name == "logit_bias"
        refused.add(name)
    assert len(refused) >= len(IN_TEXT) - 3
    assert request.starts == []
