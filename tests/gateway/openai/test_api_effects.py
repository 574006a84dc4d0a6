"""Each field that docs/api.md lists as served has an effect: two values of it lead to two answers
or two requests to the router. Exceptions are listed here with their reason."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_page import ROUTES
from builders.api_fields import GIVEN, LEAST, MESSAGES, OWN, RESPONSES, SCHEMA, TAG, TOOL
from fakes.router import saying
from fakes.scripted_parts import MemoryStore
from fakes.tool_model import THINKING, calls
from oracles.http_errors import CHAT, HI, LARGE, PLAIN
from systems.served_gateway import every_kind

from pdserve.text import sampling

pytestmark = pytest.mark.anyio
PATHS = (CHAT, PLAIN, RESPONSES, MESSAGES)
TEMPLATE = (
    THINKING
    + "{{ reasoning_effort }}{{ verbosity }}{{ enable_thinking }}{{ add_generation_prompt }}"
)
ANSWER = f"<think>hm</think><|im_start|>hello {calls('f')}{calls('f')} world"
NO_BOS = "the tokenizer of the fake model adds no token (tests/text/test_tokenizer.py)"
WHOSE = "whom the usage is counted for (tests/gateway/openai/test_usage.py)"
ONE = "it can have one value only, which says what is done anyway"
SHOWN = "the answer repeats it, which is all that it is for"
# The fields of a response that do not repeat the request.
ANSWERS = ("status", "output", "usage", "incomplete_details", "store")
WITHOUT: dict[tuple[str, str], str] = {
    (PLAIN, "add_special_tokens"): NO_BOS,
    **{(path, name): WHOSE for path in (CHAT, PLAIN, RESPONSES)
       for name in ("user", "session_id")},
    (RESPONSES, "max_tool_calls"): "of servers' tools alone (tests/gateway/mcp/test_loop.py)",
    **{
        (RESPONSES, name): SHOWN
        for name in ("metadata", "safety_identifier", "prompt_cache_key")
    },
    (CHAT, "reasoning.summary"): ONE,
    (MESSAGES, "thinking.display"): ONE,
    (MESSAGES, "output_format.type"): ONE,
    **{(MESSAGES, name): WHOSE for name in ("metadata", "metadata.user_id")},
    **{
        (path, "structured_outputs.disable_fallback"): "there is nothing to fall back to"
        for path in (CHAT, PLAIN)
    },
}  # fmt: skip
# Fields of which one of the two values is an error, which is the effect.
ONE_IS_REFUSED = {
    *((path, "model") for path in PATHS),
    (CHAT, "add_special_tokens"),
    (PLAIN, "prompt_token_ids"),
    (MESSAGES, "tool_choice.name"),
}
ROOM: dict[str, dict[str, Any]] = {
    PLAIN: {"max_tokens": 200, "prompt": "hello wide world"},
    MESSAGES: {"max_tokens": 200},
}
CALLABLE = {
    CHAT: {"tools": [TOOL]},
    RESPONSES: {"tools": [{"type": "function", **TOOL["function"]}]},
    MESSAGES: {"tools": [{"name": "f", "input_schema": SCHEMA}]},
}
STREAM = {"stream": True}
JSON_SCHEMA = {"name": "x", "schema": SCHEMA}
INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ENUM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
# Pairs of extra fields for a body. The default pair is the value from GIVEN, and nothing.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({"model": "tiny"}, {"model": "embedder"}),
    "messages": ({"messages": HI}, {"messages": HI * 2}),
    "prompt": ({"prompt": "a"}, {"prompt": "b"}),
    "input": ({"input": "a"}, {"input": "b"}),
    "continue_final_message": (
        GIVEN["continue_final_message"],
        {"messages": GIVEN["continue_final_message"]["messages"]},
    ),
    "max_tokens": ({"max_tokens": 5}, {"max_tokens": 6}),
    "repeat_last_n": (
        {"repetition_penalty": 1.1, "repeat_last_n": 0}, {"repetition_penalty": 1.1}
    ),
    "skip_special_tokens": ({"skip_special_tokens": False}, {}),
    "include_stop_str_in_output": (
        {"stop": "world", "include_stop_str_in_output": True}, {"stop": "world"}
    ),
    "stop": ({"stop": "world"}, {}),
    "stop_sequences": ({"stop_sequences": ["world"]}, {}),
    "stream_options.include_usage": (
        {**STREAM, "stream_options": {"include_usage": True}},
        {**STREAM, "stream_options": {}},
    ),
    "stream_options.continuous_usage_stats": (
        {**STREAM, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {**STREAM, "stream_options": {"include_usage": True}},
    ),
    "add_special_tokens": ({"add_special_tokens": True}, {}),
    "response_format.type": (
        {"response_format": {"type": "json_object"}}, {"response_format": {"type": "text"}}
    ),
    "response_format.json_schema": tuple(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        for schema in (SCHEMA, INTEGER)
    ),
    "response_format.schema": tuple(
        {"response_format": {"type": "json_object", "schema": schema}}
        for schema in (SCHEMA, INTEGER)
    ),
    "response_format.structures": tuple(
        {"response_format": {
            "type": "structural_tag", "structures": [{**TAG, "schema": schema}], "triggers": ["<"]
        }}
        for schema in (SCHEMA, INTEGER)
    ),
    "response_format.triggers": tuple(
        {"response_format": {
            "type": "structural_tag", "structures": [TAG], "triggers": [trigger]
        }}
        for trigger in ("<", "<a")
    ),
    "structural_tag.structures": tuple(
        {"structural_tag": {"structures": [{**TAG, "schema": schema}], "triggers": ["<"]}}
        for schema in (SCHEMA, INTEGER)
    ),
    "structural_tag.triggers": tuple(
        {"structural_tag": {"structures": [TAG], "triggers": [trigger]}} for trigger in ("<", "<a")
    ),
    "structured_outputs.json": tuple(
        {"structured_outputs": {"json": schema}} for schema in (SCHEMA, INTEGER)
    ),
    "structured_outputs.regex": tuple({"structured_outputs": {"regex": r}} for r in "ab"),
    "structured_outputs.choice": tuple({"structured_outputs": {"choice": [c]}} for c in "ab"),
    "structured_outputs.grammar": tuple(
        {"structured_outputs": {"grammar": f'root ::= "{c}"'}} for c in "ab"
    ),
    "structured_outputs.json_object": ({"structured_outputs": {"json_object": True}}, {}),
    "structured_outputs.structural_tag": tuple(
        {"structured_outputs": {"structural_tag": {"structures": [TAG], "triggers": [trigger]}}}
        for trigger in ("<", "<a")
    ),
    "structured_outputs.disable_any_whitespace": tuple(
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": off}}
        for off in (True, False)
    ),
    "structured_outputs.disable_fallback": tuple(
        {"structured_outputs": {"json": SCHEMA, "disable_fallback": off}} for off in (True, False)
    ),
    "reasoning.summary": ({"reasoning": {"summary": "auto"}}, {}),
    "thinking.display": tuple(
        {"thinking": {"type": "adaptive", **more}} for more in ({"display": "summarized"}, {})
    ),
    "metadata.user_id": tuple({"metadata": {"user_id": name}} for name in "ab"),
    "text.format": ({"text": {"format": ENUM}}, {"text": {"format": {**ENUM, "schema": INTEGER}}}),
    "text.verbosity": ({"text": {"verbosity": "low"}}, {"text": {"verbosity": "high"}}),
    "reasoning.effort": ({"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "high"}}),
    "reasoning.enabled": tuple({"reasoning": {"enabled": on}} for on in (True, False)),
    "reasoning.max_tokens": tuple({"reasoning": {"max_tokens": n}} for n in (2, 3)),
    "reasoning.exclude": tuple({"reasoning": {"exclude": out}} for out in (True, False)),
    "thinking.type": ({"thinking": {"type": "adaptive"}}, {"thinking": {"type": "disabled"}}),
    "thinking.budget_tokens": tuple(
        {"thinking": {"type": "enabled", "budget_tokens": n}} for n in (2, 3)
    ),
    "output_config.effort": (
        {"output_config": {"effort": "low"}}, {"output_config": {"effort": "high"}}
    ),
    "output_config.format": tuple(
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        for schema in (SCHEMA, INTEGER)
    ),
    "output_format.type": (GIVEN["output_format"], GIVEN["output_format"]),
    "output_format.schema": tuple(
        {"output_format": {"type": "json_schema", "schema": schema}}
        for schema in (SCHEMA, INTEGER)
    ),
}  # fmt: skip
OF_TOOLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tool_choice": ({}, {"tool_choice": "none"}),
    "parallel_tool_calls": ({}, {"parallel_tool_calls": False}),
    "tool_choice.type": ({}, {"tool_choice": {"type": "none"}}),
    "tool_choice.name": (
        {"tool_choice": {"type": "tool", "name": "f"}},
        {"tool_choice": {"type": "tool", "name": "g"}},
    ),
    "tool_choice.disable_parallel_tool_use": (
        {"tool_choice": {"type": "auto"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
}


def fields(path: str) -> Iterator[str]:
    """The served fields of a route, including those of nested objects."""
    (route,) = (route for route in ROUTES if route.path == path)
    for body in route.bodies:
        schema = body.model_json_schema()
        for name, kind in schema["properties"].items():
            if kind.get("type") == "null":
                continue
            yield name
            for one in kind.get("anyOf", [kind]):
                within = schema.get("$defs", {}).get(one.get("$ref", "").rpartition("/")[2], {})
                yield from (
                    f"{name}.{part}"
                    for part, its in within.get("properties", {}).items()
                    if its.get("type") != "null"
                )


def pair(path: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if name in OF_TOOLS:
        first, second = OF_TOOLS[name]
        if path == MESSAGES and name == "tool_choice":
            second = {"tool_choice": {"type": "none"}}
        return {**CALLABLE[path], **first}, {**CALLABLE[path], **second}
    if name in PAIRS and (path, name) not in OWN:
        return PAIRS[name]
    given = OWN[path, name] if (path, name) in OWN else GIVEN[name]
    return given, {key: value for key, value in given.items() if key != name}


@pytest.mark.parametrize("path", PATHS)
async def test_each_served_field_has_an_effect(make_http, monkeypatch, path):
    router = every_kind()
    router.play = saying(ANSWER)
    router.blobs[router.cards[0].template_digest] = TEMPLATE.encode()
    client: httpx.AsyncClient = make_http(router, responses=MemoryStore(), bounds=LARGE)
    monkeypatch.setattr(sampling.secrets, "randbits", lambda bits: 5)
    kept = (await client.post(RESPONSES, json=LEAST[RESPONSES])).json()["id"]
    monkeypatch.setitem(GIVEN, "previous_response_id", {"previous_response_id": kept})

    async def seen(more: dict[str, Any]) -> tuple[Any, ...]:
        router.starts.clear()
        reply = await client.post(path, json={**LEAST[path], **ROOM.get(path, {}), **more})
        text = reply.text
        if path == RESPONSES and text.startswith("{") and reply.status_code == 200:
            text = json.dumps({name: reply.json()[name] for name in ANSWERS})
        text = re.sub(r"[0-9a-f]{24,32}", "ID", text)
        text = re.sub(r'"(created|created_at|completed_at)":\d+', "", text)
        sent = [
            (list(s.prompt_ids), s.params, s.cache_salt, s.priority, s.seed) for s in router.starts
        ]
        return reply.status_code, text, sent

    found = list(fields(path))
    assert len(found) > 10
    for name in found:
        first, second = pair(path, name)
        one, other = await seen(first), await seen(second)
        refused = (path, name) in ONE_IS_REFUSED
        assert sorted((one[0], other[0])) == [200, 400 if refused else 200], (name, one, other)
        assert (one == other) is ((path, name) in WITHOUT), name
    assert {name for where, name in WITHOUT if where == path} <= set(found)
