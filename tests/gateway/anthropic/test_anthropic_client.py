"""The official anthropic client against /v1/messages, over a socket."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic
import pytest
from fakes.router import FakeRouter, failed, placed, saying, tokens
from fakes.scripted_parts import CACHED, CALLS, ScriptedParts, deltas
from systems.eventually import eventually

from pdserve.protos import common_pb2 as pb
from pdserve.text import TextPart, ToolCallPart

pytestmark = pytest.mark.anyio
HI: list[Any] = [{"role": "user", "content": "hi"}]
REQUEST: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": HI}
WEATHER: Any = {
    "name": "weather",
    "description": "of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}


@pytest.fixture
def connect(connect_to) -> Callable[..., Any]:
    def make(play: Any, key: str = "none", **options: Any) -> Any:
        client_of = partial(anthropic.AsyncAnthropic, api_key=key, max_retries=0)
        return connect_to(lambda url: client_of(base_url=url), play, **options)

    return make


async def test_a_text_answer(connect):
    router = FakeRouter(saying("hello world", cached=2))
    client = await connect(router)
    answer = await client.messages.create(
        **REQUEST, metadata={"user_id": "u"}, system="be short", service_tier="auto",
        extra_body={"temperature": 0.5, "top_p": 0.75, "top_k": 7},
    )  # fmt: skip
    assert [block.text for block in answer.content] == ["hello world"]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    start = router.starts[0]
    assert (start.params.temperature, start.params.top_p, start.params.top_k) == (0.5, 0.75, 7)
    assert start.params.max_tokens == 100
    assert answer.id == start.request
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(start.prompt_ids)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (2, 0)
    assert usage.output_tokens == len(router.encode("hello world")) + 1


async def test_the_events_of_an_answer_with_every_kind_of_block(connect):
    client = await connect(ScriptedParts(CALLS))
    stream = await client.messages.create(**REQUEST, tools=[WEATHER], stream=True)
    events = [event async for event in stream]
    kinds = [event.type.removeprefix("content_block_") for event in events]
    assert kinds == [
        "message_start",
        "start", "delta", "delta", "delta", "stop",
        "start", "delta", "delta", "stop",
        "start", "delta", "delta", "stop",
        "start", "delta", "stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    opening = events[0].message
    assert (opening.content, opening.stop_reason, opening.role) == ([], None, "assistant")
    assert opening.usage.input_tokens > 0
    numbers = [event.index for event in events if event.type.startswith("content_block_")]
    assert numbers == [0] * 5 + [1] * 4 + [2] * 4 + [3] * 3
    deltas_ = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas_ == [
        *["thinking_delta"] * 2, "signature_delta", *["text_delta"] * 2, *["input_json_delta"] * 3,
    ]  # fmt: skip
    calls = [e.content_block for e in events if e.type == "content_block_start"][2:]
    assert [(call.id, call.name, call.input) for call in calls] == [
        ("call_a", "weather", {}), ("call_b", "weather", {}),
    ]  # fmt: skip
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens == 9


async def test_a_stream_adds_up_to_the_whole_answer(connect):
    client = await connect(ScriptedParts(CALLS, CALLS))
    whole = await client.messages.create(**REQUEST, tools=[WEATHER])
    async with client.messages.stream(**REQUEST, tools=[WEATHER]) as stream:
        streamed = await stream.get_final_message()
    thinking, text, first, second = whole.content
    assert (thinking.thinking, thinking.type) == ("I look.", "thinking")
    assert thinking.signature
    assert text.text == "Let me see."
    assert (first.id, first.name, first.input) == ("call_a", "weather", {"place": "Rome"})
    assert (second.id, second.input) == ("call_b", {"place": "Oslo"})
    for answer in (whole, streamed):
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens == 9
        assert answer.usage.cache_read_input_tokens == CACHED
    for one, other in zip(whole.content, streamed.content, strict=True):
        same = {"type", "text", "thinking", "signature", "id", "name", "input"}
        assert one.model_dump(include=same) == other.model_dump(include=same)
    assert whole.usage.input_tokens == streamed.usage.input_tokens


async def test_a_tool_loop(connect):
    """Send the answer back unchanged, with the results of its calls."""
    parts = ScriptedParts(CALLS, deltas(TextPart("Warm.")))
    client = await connect(parts)
    body = {**REQUEST, "tools": [WEATHER], "system": [{"type": "text", "text": "be short"}]}
    first = await client.messages.create(**body)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": "call_a", "content": "20"},
        {
            "type": "tool_result",
            "tool_use_id": "call_b",
            "content": [{"type": "text", "text": "no such place"}],
            "is_error": True,
            "cache_control": {"type": "ephemeral"},
        },
        {"type": "text", "text": "well?"},
    ]
    body["messages"] = [
        *HI,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
        {"role": "user", "content": "say it"},
    ]
    second = await client.messages.create(**body)
    assert second.content[0].text == "Warm."
    system, user, turn, one, two, more = parts.messages()
    assert system == {"role": "system", "content": [{"type": "text", "text": "be short"}]}
    assert user["role"] == "user"
    assert turn["reasoning_content"] == "I look."
    assert turn["content"] == "Let me see."
    assert [call["function"] for call in turn["tool_calls"]] == [
        {"name": "weather", "arguments": {"place": "Rome"}},
        {"name": "weather", "arguments": {"place": "Oslo"}},
    ]
    assert (one["role"], one["tool_call_id"]) == ("tool", "call_a")
    assert one["content"] == "20"
    assert [part["text"] for part in two["content"]] == ["Error:", "no such place"]
    assert [part["text"] for part in more["content"]] == ["well?", "say it"]


async def test_tool_choice(connect):
    parts = ScriptedParts(*[CALLS] * 5)
    client = await connect(parts)
    other = {**WEATHER, "name": "news", "type": "custom", "strict": True}
    for choice, mode, only, parallel in (
        (None, "auto", (), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", (), False),
        ({"type": "any"}, "required", (), True),
        ({"type": "tool", "name": "news"}, "required", ("news",), True),
        ({"type": "none"}, "none", (), True),
    ):
        more = {} if choice is None else {"tool_choice": choice}
        await client.messages.create(**REQUEST, tools=[WEATHER, other], **more)
        request = parts.requests[-1].tool_use
        assert (request.choice, tuple(request.only), request.parallel) == (mode, only, parallel)
        assert [(tool.name, tool.strict) for tool in request.tools] == [
            ("weather", False), ("news", True),
        ]  # fmt: skip
        assert request.tools[0].parameters == WEATHER["input_schema"]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences(connect, stream):
    client = await connect(saying("hello world hello"))
    body = {**REQUEST, "stop_sequences": ["never", "wor"]}
    if stream:
        async with client.messages.stream(**body) as events:
            answer = await events.get_final_message()
    else:
        answer = await client.messages.create(**body)
    assert answer.content[0].text == "hello "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "wor")


async def test_a_stop_sequence_at_the_last_token(connect):
    """Match a stop sequence that the last token allowed by max_tokens completes."""
    client = await connect(saying("ab"))
    answer = await client.messages.create(**{**REQUEST, "max_tokens": 2}, stop_sequences=["b"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "b")


async def test_an_answer_cut_at_max_tokens(connect):
    client = await connect(saying("hello world"))
    answer = await client.messages.create(**{**REQUEST, "max_tokens": 1})
    assert answer.content[0].text == "hello"
    assert answer.stop_reason == "max_tokens"


async def test_a_cut_call_has_the_complete_part_of_its_input(connect):
    call = ToolCallPart(0, "call_a", "weather", '{"place": "Rome", "day": ')
    cut = deltas(call, ToolCallPart(0, cut=True), finish="length")
    client = await connect(ScriptedParts(cut))
    answer = await client.messages.create(**REQUEST, tools=[WEATHER])
    assert answer.content[0].input == {"place": "Rome"}
    assert answer.stop_reason == "max_tokens"


async def test_an_answer_without_content(connect):
    answer = await (await connect(saying(""))).messages.create(**REQUEST)
    assert (answer.content, answer.stop_reason) == ([], "end_turn")


async def test_a_last_assistant_message_is_continued(connect):
    router = FakeRouter(saying(" world"))
    turns = [*HI, {"role": "assistant", "content": "hello"}]
    answer = await (await connect(router)).messages.create(**{**REQUEST, "messages": turns})
    assert answer.content[0].text == " world"
    prompt = router.words.decode(router.starts[0].prompt_ids, skip_special_tokens=False)
    assert prompt.endswith("assistant\nhello")


async def test_consecutive_assistant_messages_are_one_turn(connect):
    parts = ScriptedParts(deltas(TextPart("!")))
    use = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "20"}
    turns: list[Any] = [
        *HI,
        {"role": "assistant", "content": "hello"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "It is"},
        {"role": "assistant", "content": "warm"},
    ]
    await (await connect(parts)).messages.create(**{**REQUEST, "messages": turns})
    _, first, _, last = parts.messages()
    assert (first["role"], first["content"]) == ("assistant", "hello\nI look.")
    assert [call["id"] for call in first["tool_calls"]] == ["c"]
    assert last == {"role": "assistant", "content": "It is\nwarm"}


async def test_thinking_structure_and_effort_reach_the_pipeline(connect):
    parts = ScriptedParts(*[CALLS] * 3)
    client = await connect(parts)
    schema = {"type": "object"}
    config: Any = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
    for thinking, budget, enabled in (
        ({"type": "enabled", "budget_tokens": 50}, 50, True),
        ({"type": "adaptive"}, None, True),
        ({"type": "disabled"}, None, False),
    ):
        await client.messages.create(**REQUEST, thinking=thinking, output_config=config)
        request = parts.requests[-1]
        assert request.sampling.thinking_budget == budget
        assert request.conversation.suggested == {
            "enable_thinking": enabled, "thinking": enabled, "reasoning_effort": "max",
        }  # fmt: skip
        structure = request.sampling.structure
        assert (structure.kind, structure.value) == ("json_schema", schema)


async def test_tokens_are_counted(connect):
    router = FakeRouter(saying("x"))
    client = await connect(router)
    turns = [*HI, {"role": "assistant", "content": "hello"}, *HI]
    counted = await client.messages.count_tokens(model="tiny", messages=turns, system="be short")
    await client.messages.create(**{**REQUEST, "messages": turns}, system="be short")
    assert counted.input_tokens == len(router.starts[0].prompt_ids)
    assert len(router.starts) == 1, "counting must not run the model"


async def test_tools_are_counted(connect):
    router = FakeRouter(saying("x"))
    digest = router.cards[0].template_digest
    router.blobs[digest] = b"{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}x"
    client = await connect(router)
    plain = await client.messages.count_tokens(model="tiny", messages=HI)
    more = await client.messages.count_tokens(model="tiny", messages=HI, tools=[WEATHER])
    assert more.input_tokens == plain.input_tokens + len(router.encode("weather"))


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_api_keys(connect, serve, header):
    url = await serve(saying("hello"), keys=("right",))

    def client(key: str) -> anthropic.AsyncAnthropic:
        named = {"api_key": key} if header == "x-api-key" else {"auth_token": key}
        return anthropic.AsyncAnthropic(**named, base_url=url, max_retries=0)

    async with client("right") as right, client("wrong") as wrong:
        assert (await right.messages.create(**REQUEST)).content
        for attempt in (
            wrong.messages.create(**REQUEST),
            wrong.messages.count_tokens(model="tiny", messages=HI),
        ):
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await attempt
            assert caught.value.body["error"]["type"] == "authentication_error"
            assert caught.value.body["request_id"] == caught.value.response.headers["x-request-id"]


async def test_an_unknown_model(connect):
    client = await connect(saying("x"))
    for attempt in (
        client.messages.create(**{**REQUEST, "model": "other"}),
        client.messages.count_tokens(model="other", messages=HI),
    ):
        with pytest.raises(anthropic.NotFoundError, match="other") as caught:
            await attempt
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == "not_found_error"
        assert caught.value.body["request_id"] == caught.value.request_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (pb.OVERLOADED, 429, "rate_limit_error"),
        (pb.UNAVAILABLE, 529, "overloaded_error"),
        (pb.QUEUE_TIMEOUT, 529, "overloaded_error"),
        (pb.DEADLINE_EXCEEDED, 504, "timeout_error"),
        (pb.POISON_REQUEST, 500, "api_error"),
    ],
)
async def test_failures_before_the_first_token(connect, code, status, kind, stream):
    async def play(router, start):
        yield placed(start)
        yield failed(start, code, "because", retry_after_ms=1500)

    client = await connect(play)
    with pytest.raises(anthropic.APIStatusError) as caught:
        await client.messages.create(**REQUEST, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.body["error"] == {"type": kind, "message": "because"}
    retry = caught.value.response.headers.get("retry-after")
    assert retry == ("2" if status in (429, 529) else None)


async def test_a_failure_in_the_middle_of_a_stream(connect):
    async def play(router, start):
        yield tokens(start, router.encode("hello"), 0)
        yield failed(start, pb.POISON_REQUEST, "two workers died")

    stream = await (await connect(play)).messages.create(**REQUEST, stream=True)
    seen: list[str] = []

    async def read() -> None:
        async for event in stream:
            if event.type == "content_block_delta":
                seen.append(event.delta.text)

    with pytest.raises(anthropic.APIStatusError, match="two workers died") as caught:
        await read()
    assert caught.value.body["error"]["type"] == "api_error"
    assert seen == ["hello"]


async def test_a_client_that_leaves_cancels_its_request(connect):
    async def endless(router, start):
        yield placed(start)
        for position in range(10**9):
            yield tokens(start, router.encode("x"), position)
            await asyncio.sleep(0)

    router = FakeRouter(endless)
    stream = await (await connect(router)).messages.create(**REQUEST, stream=True)
    async for event in stream:
        if event.type == "content_block_delta":
            break
    await stream.close()
    await eventually(router.closed.is_set)
    assert router.left == [router.starts[0].request]
