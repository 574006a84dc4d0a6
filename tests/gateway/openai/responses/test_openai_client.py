"""The official openai client against /v1/responses, over a socket.

Over 400 lines: one client and one scripted model, which all tests share.
"""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
import pytest
from fakes.router import FakeRouter, failed, placed, saying, tokens
from fakes.scripted_parts import CACHED, CALLS, MemoryStore, ScriptedParts, deltas
from systems.eventually import eventually

from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError
from pdserve.text import TextPart

pytestmark = pytest.mark.anyio
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": True,
}


@pytest.fixture
def connect(connect_to) -> Callable[..., Any]:
    def make(play: Any, key: str = "none", **options: Any) -> Any:
        client_of = partial(openai.AsyncOpenAI, api_key=key, max_retries=0)
        return connect_to(lambda url: client_of(base_url=f"{url}/v1"), play, **options)

    return make


async def test_a_text_answer(connect):
    router = FakeRouter(saying("hello world", cached=2))
    client = await connect(router)
    answer = await client.responses.create(
        model="tiny", input="hi", instructions="be short", metadata={"a": "b"}, temperature=0.9
    )
    assert answer.output_text == "hello world"
    assert (answer.status, answer.model, answer.object) == ("completed", "tiny", "response")
    assert (answer.instructions, answer.metadata) == ("be short", {"a": "b"})
    assert (answer.temperature, answer.top_p) == (0.9, 1.0)
    assert answer.error is None
    assert answer.incomplete_details is None
    usage = answer.usage
    assert usage.input_tokens == len(router.starts[0].prompt_ids)
    assert usage.input_tokens_details.cached_tokens == 2
    assert usage.output_tokens == len(router.encode("hello world")) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert answer.id == router.starts[0].request


async def test_the_events_of_an_answer_with_every_kind_of_item(connect):
    client = await connect(ScriptedParts(CALLS))
    stream = await client.responses.create(model="tiny", input="hi", tools=[WEATHER], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert events[0].response.output == []
    final = events[-1].response
    assert [item.type for item in final.output] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.id for item in added] == [item.id for item in final.output]
    assert {item.status for item in added} == {"in_progress"}
    assert {item.status for item in done} == {"completed"}
    for number, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "item_id", "") == item.id]
        assert {event.output_index for event in own} == {number}
    assert len({item.id for item in final.output}) == 4


async def test_a_stream_adds_up_to_the_whole_answer(connect):
    client = await connect(ScriptedParts(CALLS, CALLS))
    body: Any = {"model": "tiny", "input": "hi", "tools": [WEATHER]}
    whole = await client.responses.create(**body)
    texts: dict[str, str] = {}
    final: Any = None
    async for event in await client.responses.create(**body, stream=True):
        if event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        final = getattr(event, "response", final)
    reasoning, message, first, second = whole.output
    assert reasoning.content[0].text == "I look."
    assert message.content[0].text == whole.output_text == "Let me see."
    assert (first.call_id, first.name) == ("call_a", "weather")
    assert json.loads(first.arguments) == {"place": "Rome"}
    assert json.loads(second.arguments) == {"place": "Oslo"}
    assert list(texts.values()) == [
        "I look.", "Let me see.", first.arguments, second.arguments,
    ]  # fmt: skip
    assert whole.usage == final.usage
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    assert whole.usage.input_tokens_details.cached_tokens == CACHED
    suffix, other = (one.id.removeprefix("resp_") for one in (whole, final))
    streamed = final.model_dump_json(include={"output"}).replace(other, suffix)
    assert streamed == whole.model_dump_json(include={"output"})


async def test_the_stream_helper_of_the_client(connect):
    client = await connect(ScriptedParts(CALLS))
    async with client.responses.stream(model="tiny", input="hi", tools=[WEATHER]) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "Let me see."


async def test_tools_and_tool_choice(connect):
    parts = ScriptedParts(*[CALLS] * 5)
    client = await connect(parts)
    other = {**WEATHER, "name": "news"}
    for choice, mode, only in (
        ("auto", "auto", ()),
        ("none", "none", ()),
        ("required", "required", ()),
        ({"type": "function", "name": "news"}, "required", ("news",)),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
            },
            "auto",
            ("weather",),
        ),
    ):
        answer = await client.responses.create(
            model="tiny",
            input="hi",
            tools=[WEATHER, other],
            tool_choice=choice,
            parallel_tool_calls=mode == "auto",
        )
        request = parts.requests[-1].tool_use
        assert (request.choice, tuple(request.only), request.parallel) == (
            mode,
            only,
            mode == "auto",
        )
        assert [tool.name for tool in request.tools] == ["weather", "news"]
        assert request.tools[0].strict
        assert request.tools[0].parameters == WEATHER["parameters"]
        assert [tool.name for tool in answer.tools] == ["weather", "news"]


async def test_a_tool_loop(connect):
    """Send the output back with the results of the calls, as clients without a store do."""
    parts = ScriptedParts(CALLS, deltas(TextPart("Warm.")))
    client = await connect(parts)
    items: list[Any] = [{"role": "user", "content": "hi"}]
    body: Any = {"model": "tiny", "tools": [WEATHER], "store": False, "instructions": "be short"}
    first = await client.responses.create(
        **body, input=items, include=["reasoning.encrypted_content"]
    )
    items += first.output
    for call in first.output[2:]:
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "20"})
    second = await client.responses.create(**body, input=items)
    assert second.output_text == "Warm."
    system, user, turn, one, two = parts.messages()
    assert (system["role"], user["role"]) == ("system", "user")
    assert turn["role"] == "assistant"
    assert turn["reasoning_content"] == "I look."
    assert turn["content"] == "Let me see."
    assert [call["id"] for call in turn["tool_calls"]] == ["call_a", "call_b"]
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"place": "Rome"}'
    assert one == {"role": "tool", "tool_call_id": "call_a", "content": "20"}
    assert two["tool_call_id"] == "call_b"


async def test_a_stored_conversation(connect):
    parts = ScriptedParts(CALLS, deltas(TextPart("Warm.")), deltas(TextPart("Bye.")))
    client = await connect(parts, responses=MemoryStore())
    first = await client.responses.create(
        model="tiny", input="hi", tools=[WEATHER], instructions="be short"
    )
    results: Any = [
        {"type": "function_call_output", "call_id": call, "output": "20"}
        for call in ("call_a", "call_b")
    ]
    second = await client.responses.create(
        model="tiny", input=results, previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    third = await client.responses.create(
        model="tiny", input="thanks", previous_response_id=second.id
    )
    assert third.output_text == "Bye."
    roles = [message["role"] for message in parts.messages()]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]

    assert (await client.responses.retrieve(first.id)).output == first.output
    listed = await client.responses.input_items.list(third.id, order="asc")
    kinds = [item.type for item in listed.data]
    assert kinds == [
        "message", "reasoning", "message", "function_call", "function_call",
        "function_call_output", "function_call_output", "message", "message",
    ]  # fmt: skip
    ids = [item.id async for item in client.responses.input_items.list(third.id, limit=2)]
    assert ids == [item.id for item in reversed(listed.data)], (
        "pages must list the newest items first"
    )
    assert len(set(ids)) == len(ids)

    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError, match="not found") as missing:
        await client.responses.create(model="tiny", input="x", previous_response_id=second.id)
    assert missing.value.code == "previous_response_not_found"
    assert missing.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(third.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_none")


async def test_tokens_are_counted(connect):
    router = FakeRouter(saying("hello"))
    router.blobs[router.cards[0].template_digest] = (
        b"{% for m in messages %}{{ m.content }}{% endfor %}"
        b"{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ verbosity }}"
    )
    client = await connect(router, responses=MemoryStore())
    first = await client.responses.create(model="tiny", input="hi")
    body: Any = {
        "model": "tiny", "input": "hello", "instructions": "be short", "tools": [WEATHER],
        "text": {"verbosity": "low"}, "previous_response_id": first.id,
    }  # fmt: skip
    counted = await client.responses.input_tokens.count(**body)
    assert counted.object == "response.input_tokens"
    assert len(router.starts) == 1, "counting must not run the model"
    await client.responses.create(**body)
    assert counted.input_tokens == len(router.starts[1].prompt_ids)


async def test_a_tenant_finds_only_its_responses(connect, serve):
    url = await serve(saying("hello"), responses=MemoryStore(), keys=("one", "two"))
    mine, theirs = await connect(url, "one"), await connect(url, "two")
    kept = await mine.responses.create(model="tiny", input="hi")
    assert (await mine.responses.retrieve(kept.id)).id == kept.id
    for attempt in (
        theirs.responses.retrieve(kept.id),
        theirs.responses.delete(kept.id),
        theirs.responses.input_items.list(kept.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await attempt
    with pytest.raises(openai.BadRequestError, match="not found"):
        await theirs.responses.create(model="tiny", input="x", previous_response_id=kept.id)
    assert (await mine.responses.retrieve(kept.id)).id == kept.id


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unstored_response_says_so(connect, stream):
    down = ServiceError(pb.UNAVAILABLE, "no database")
    for store, request in (
        (None, None),
        (MemoryStore(), False),
        (MemoryStore(room=False), True),
        (MemoryStore(fails=down), None),
    ):
        client = await connect(saying("hello"), responses=store)
        given: Any = {"model": "tiny", "input": "hi"} | (
            {} if request is None else {"store": request}
        )
        if stream:
            found = [event async for event in await client.responses.create(**given, stream=True)]
            answer = found[-1].response
        else:
            answer = await client.responses.create(**given)
        assert answer.output_text == "hello"
        assert answer.store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)


async def test_an_answer_cut_at_max_output_tokens(connect):
    client = await connect(saying("hello world"))
    answer = await client.responses.create(model="tiny", input="hi", max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "hello"
    assert answer.output[0].status == "incomplete"
    stream = await client.responses.create(
        model="tiny", input="hi", max_output_tokens=1, stream=True
    )
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_an_answer_without_content_is_an_empty_message(connect):
    answer = await (await connect(saying(""))).responses.create(model="tiny", input="hi")
    assert answer.output_text == ""
    assert [item.type for item in answer.output] == ["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(connect, stream):
    client = await connect(saying("hé world"))
    body: Any = {
        "model": "tiny", "input": "hi", "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    if stream:
        events = [event async for event in await client.responses.create(**body, stream=True)]
        answer = events[-1].response
        logprobs = [one for e in events if e.type.endswith("text.delta") for one in e.logprobs]
    else:
        answer = await client.responses.create(**body)
    scored = answer.output[0].content[0].logprobs
    assert len(scored) == answer.usage.output_tokens
    assert all(len(token.top_logprobs) == 2 for token in scored)
    assert bytes(b for token in scored[:-1] for b in token.bytes).decode() == "hé world"
    if stream:
        assert [one.token for one in logprobs] == [one.token for one in scored[:-1]]


async def test_structure_and_effort_reach_the_pipeline(connect):
    parts = ScriptedParts(*[deltas(TextPart("{}"))] * 3)
    client = await connect(parts)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer = await client.responses.create(
        model="tiny", input="hi", reasoning={"effort": "none", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}, "verbosity": "low"},
    )  # fmt: skip
    request = parts.requests[-1]
    structure = request.sampling.structure
    assert (structure.kind, structure.value) == ("json_schema", schema)
    assert structure.param == "text.format.schema"
    assert request.conversation.suggested == {
        "reasoning_effort": "none", "enable_thinking": False, "thinking": False, "verbosity": "low"
    }  # fmt: skip
    assert answer.text.format.schema_ == schema
    assert (answer.reasoning.effort, answer.reasoning.summary) == ("none", "detailed")
    await client.responses.create(
        model="tiny", input="hi", text={"format": {"type": "json_object"}}
    )
    assert parts.requests[-1].sampling.structure.kind == "json_object"
    await client.responses.create(model="tiny", input="hi", text={"format": {"type": "text"}})
    assert parts.requests[-1].sampling.structure is None


async def test_api_keys(connect, serve):
    url = await serve(saying("hello"), keys=("right",))
    with pytest.raises(openai.AuthenticationError):
        await (await connect(url, "wrong")).responses.create(model="tiny", input="hi")
    with pytest.raises(openai.AuthenticationError):
        await (await connect(url, "wrong")).responses.retrieve("resp_1")
    assert await (await connect(url, "right")).responses.create(model="tiny", input="hi")


async def test_an_unknown_model(connect):
    with pytest.raises(openai.NotFoundError) as caught:
        await (await connect(saying("x"))).responses.create(model="other", input="hi")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "error"),
    [(pb.OVERLOADED, openai.RateLimitError), (pb.UNAVAILABLE, openai.InternalServerError)],
)
async def test_failures_before_the_first_token(connect, code, error, stream):
    async def play(router, start):
        yield placed(start)
        yield failed(start, code, "because", retry_after_ms=1500)

    store = MemoryStore()
    client = await connect(play, responses=store)
    with pytest.raises(error) as caught:
        await client.responses.create(model="tiny", input="hi", stream=stream)
    assert caught.value.body["message"] == "because"
    assert caught.value.response.headers["retry-after"] == "2"
    assert store.kept == {}


async def test_a_failure_in_the_middle_of_a_stream(connect):
    async def play(router, start):
        yield tokens(start, router.encode("hello"), 0)
        yield failed(start, pb.POISON_REQUEST, "two workers died")

    store = MemoryStore()
    client = await connect(play, responses=store)
    stream = await client.responses.create(model="tiny", input="hi", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.failed"
    response = events[-1].response
    assert response.status == "failed"
    assert (response.error.code, response.error.message) == ("server_error", "two workers died")
    assert store.kept == {}


async def test_an_unexpected_error_is_reported_without_detail(connect, caplog):
    client = await connect(ScriptedParts([*CALLS[:1], RuntimeError("secret")]))
    stream = await client.responses.create(model="tiny", input="hi", stream=True)
    last = [event async for event in stream][-1]
    assert last.response.error.code == "server_error"
    assert "secret" not in last.response.error.message
    assert "secret" in caplog.text


async def test_a_client_that_leaves_cancels_its_request(connect):
    async def endless(router, start):
        yield placed(start)
        for position in range(10**9):
            yield tokens(start, router.encode("x"), position)
            await asyncio.sleep(0)

    router = FakeRouter(endless)
    store = MemoryStore()
    client = await connect(router, responses=store)
    stream = await client.responses.create(model="tiny", input="hi", stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await eventually(router.closed.is_set)
    assert router.left == [router.starts[0].request]
    assert store.kept == {}
