"""What requests to /v1/responses may have, and what a wrong one is told."""

import asyncio
from typing import Any

import pytest
from fakes.router import FakeRouter, finished, placed, saying, served, tokens
from fakes.scripted_parts import MemoryStore, ScriptedParts, deltas
from oracles.http_errors import LARGE, check, nested

from pdserve.gateway.http.dialect import HttpLimits
from pdserve.gateway.openai.responses.fields import IGNORED, INSTEAD, REFUSED
from pdserve.gateway.openai.responses.items import MAX_ITEMS
from pdserve.gateway.openai.responses.schema import ResponsesBody
from pdserve.gateway.openai.responses.tools import tool_use
from pdserve.gateway.requests.tool_use import ToolUse
from pdserve.gateway.text.parts import TextPart
from pdserve.protos import common_pb2 as pb

pytestmark = pytest.mark.anyio
URL = "/v1/responses"
ASKED: dict[str, Any] = {"model": "tiny", "input": "hi"}
WANTED = (True, 7, "x", ["x"], {"x": "x"})  # of each kind of value, one that asks for something
TOOL = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


async def test_what_is_not_served_is_refused_by_name(make_http):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for name in REFUSED.keys() - ResponsesBody.model_fields.keys():
        for value in WANTED:
            if value in REFUSED[name]:
                continue
            error = check(await client.post(URL, json={**ASKED, name: value}), 400, name)
            assert error["message"].startswith(f"{name} is not supported")
            assert (f"use {INSTEAD.get(name)}" in error["message"]) is (name in INSTEAD)
    assert router.starts == []


async def test_values_that_ask_for_nothing_are_taken(make_http):
    client = make_http(saying("x"))
    for number in range(max(map(len, REFUSED.values()))):
        given = {
            name: nothing[min(number, len(nothing) - 1)]
            for name, nothing in REFUSED.items()
            if name not in ResponsesBody.model_fields
        }
        ignored = dict.fromkeys(IGNORED, "x")
        reply = await client.post(URL, json={**ASKED, **given, **ignored, "unknown": 1})
        assert reply.status_code == 200, reply.json()


# OpenAI's own, as its client lists them.
OPENAI = (
    "access_programs", "background", "context_management", "conversation", "image", "include",
    "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model",
    "moderation", "parallel_tool_calls", "previous_response_id", "prompt", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "reasoning", "safety_identifier",
    "service_tier", "store", "stream", "stream_options", "temperature", "text", "tool_choice",
    "tools", "top_logprobs", "top_p", "truncation", "user",
)  # fmt: skip


def test_each_known_field_has_one_place() -> None:
    served = ResponsesBody.model_fields.keys()
    assert set(OPENAI) <= served | REFUSED.keys() | IGNORED
    assert not IGNORED & (served | (REFUSED.keys() - served))


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_bounded(make_http, monkeypatch, stream):
    """By what max_output_tokens allows, or as they come; a stream's last event has all of them."""
    monkeypatch.setattr("pdserve.gateway.sampling.MAX_LOGPROBS", 10 * 3)
    client = make_http(saying("hello " * 100))
    include = ["message.output_text.logprobs"]
    scored = {**ASKED, "include": include, "top_logprobs": 2, "stream": stream}
    fits = await client.post(URL, json={**scored, "max_output_tokens": 10})
    assert fits.status_code == 200
    assert "response.failed" not in fits.text
    refused = await client.post(URL, json={**scored, "max_output_tokens": 11})
    error = check(refused, 400, "max_output_tokens")
    assert "ask for fewer tokens" in error["message"]
    later = await client.post(URL, json=scored)
    assert later.status_code == (200 if stream else 400)
    assert "at most 30 in one answer" in later.text


WRONG = [
    ({"input": 7}, "input"),
    ({"input": ["x"]}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 7}]}]},
        "input[0].content[0].text",
    ),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{**CALL, "arguments": "["}]}, "input[0].arguments"),
    ({"input": [{**CALL, "arguments": "[]"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": "x"}] * (MAX_ITEMS + 1)}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [TOOL, {**TOOL, "name": "a b"}]}, "tools[1].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
    ({"tools": [{**TOOL, "parameters": nested(40)}]}, "tools[0].parameters"),
    ({"tools": [{**TOOL, "parameters": {"enum": [1] * 5000}}]}, "tools[0].parameters"),
    ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {**TOOL, "name": "g"}}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": [{}]}},
        "tool_choice.mode",
    ),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"include": ["x"]}, "include[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
]


async def test_a_wrong_field_is_named(make_http, subtests):
    router = FakeRouter(saying("x"))
    client = make_http(router, bounds=LARGE)
    for fields, param in WRONG:
        with subtests.test(fields=fields):
            router.starts.clear()
            error = check(await client.post(URL, json={**ASKED, **fields}), 400, param)
            assert len(error["message"]) < 300
            assert router.starts == []


async def test_instructions_and_rules_are_one_message(make_http):
    parts = ScriptedParts(deltas(TextPart("x")))
    items = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "stop"},
    ]
    client = make_http(saying("unused"), arrange=parts.install)
    reply = await client.post(
        URL, json={"model": "tiny", "instructions": "be short", "input": items}
    )
    assert reply.status_code == 200, reply.json()
    rules, _, later = parts.messages()
    assert rules["role"] == "system"
    assert [part["text"] for part in rules["content"]] == ["be short", "be kind"]
    assert later["role"] == "developer"


async def test_turns_of_the_assistant_are_kept_apart(make_http):
    """What it says after a call is a new turn, and so is what it thinks after a text."""
    parts = ScriptedParts(deltas(TextPart("x")))
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    items = [said, CALL, said, thought, said, said, CALL]
    client = make_http(saying("unused"), arrange=parts.install)
    reply = await client.post(URL, json={"model": "tiny", "input": items})
    assert reply.status_code == 200, reply.json()
    found = [sorted(k for k, v in m.items() if v and k != "role") for m in parts.messages()]
    assert found == [
        ["content", "tool_calls"],
        ["content"],
        ["content", "reasoning_content"],
        ["content", "tool_calls"],
    ]


async def test_a_conversation_cannot_grow_beyond_its_items(make_http):
    store = MemoryStore()
    client = make_http(saying("x"), responses=store, bounds=LARGE)
    first = (await client.post(URL, json=ASKED)).json()
    turns = [{"role": "user", "content": ""}] * (MAX_ITEMS - 1)
    more = {"input": turns, "previous_response_id": first["id"]}
    check(await client.post(URL, json={**ASKED, **more}), 400, "input")


@pytest.mark.parametrize("path", [URL, f"{URL}/input_tokens"])
async def test_what_the_template_refuses_is_the_input(make_http, path):
    for template in (b"{{ raise_exception('no') }}", b"{{ 1 / 0 }}", b""):
        router = FakeRouter(saying("x"))
        router.blobs[router.cards[0].template_digest] = template
        check(await make_http(router).post(path, json=ASKED), 400, "input")
    body = {**ASKED, "input": "x " * 50_000}
    client = make_http(saying("x"), bounds=LARGE)
    check(await client.post(path, json=body), 400, "input", "context_length_exceeded")
    if path == URL:
        body = {**ASKED, "input": "x " * 400}
        check(await client.post(path, json=body), 400, "input", "context_length_exceeded")


async def test_what_is_kept_counts_as_a_body_while_it_is_used(make_http):
    """Else small requests could bring along as much as they like."""
    held = asyncio.Event()

    async def play(router, start):
        yield placed(start)
        if len(router.starts) > 1:
            held.set()
            await asyncio.Event().wait()
        yield tokens(start, [router.eos], 0, finish=pb.STOP)
        yield finished(start)

    bounds = HttpLimits(1 << 16, 1 << 17, 60, max_buffer_bytes=1 << 16, stall_s=60)
    card, blobs = served(context_len=1 << 17)
    router = FakeRouter(play, [card], blobs)
    client = make_http(router, responses=MemoryStore(), bounds=bounds)
    first = await client.post(URL, json={**ASKED, "input": "x" * 40_000})
    more = {**ASKED, "previous_response_id": first.json()["id"]}
    waiting = asyncio.create_task(client.post(URL, json=more))
    await held.wait()
    reply = await client.post(URL, json=more)
    assert (reply.status_code, reply.json()["error"]["message"]) == (429, "too many bodies at once")
    assert len(router.starts) == 2
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


WRONG_PAGES = [
    ("limit=0", "limit"),
    ("limit=101", "limit"),
    ("order=up", "order"),
    ("after=x", "after"),
]


async def test_a_wrong_page_is_told(make_http, subtests):
    client = make_http(saying("x"), responses=MemoryStore())
    name = (await client.post(URL, json=ASKED)).json()["id"]
    for query, param in WRONG_PAGES:
        with subtests.test(query):
            check(await client.get(f"{URL}/{name}/input_items?{query}"), 400, param)


async def test_a_kept_response_is_not_streamed(make_http):
    client = make_http(saying("x"), responses=MemoryStore())
    name = (await client.post(URL, json=ASKED)).json()["id"]
    check(await client.get(f"{URL}/{name}?stream=true"), 400, "stream")


def test_no_tools_at_all_can_be_asked_for_without_any() -> None:
    """Servers' tools count as well (gateway/mcp)."""
    assert tool_use((), "none", parallel=True) == ToolUse((), "none")
    assert tool_use((), None, parallel=True) is None
