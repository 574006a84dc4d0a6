"""What requests to /v1/messages may have, and what a wrong one is told."""

from typing import Any

import httpx
import pytest
from fakes.router import FakeRouter, saying
from oracles.http_errors import JSON, LARGE, nested

from pdserve.gateway.anthropic.fields import IGNORED, INSTEAD, REFUSED
from pdserve.gateway.anthropic.schema import CountBody, MessagesBody, parse_messages
from pdserve.gateway.limits import AdmissionLimits
from pdserve.gateway.requests.tool_use import ToolUse

pytestmark = pytest.mark.anyio
URL = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": HI}
BODIES: Any = {URL: (ASKED, MessagesBody), COUNT: ({"model": "tiny", "messages": HI}, CountBody)}
WANTED = (True, 7, "x", ["x"], {"x": "x"})  # of each kind of value, one that asks for something
TOOL = {"name": "f", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
SCHEMA = {"type": "json_schema", "schema": {}}


def check(reply: httpx.Response, status: int, kind: str = "invalid_request_error") -> str:
    """The message of an error."""
    body = reply.json()
    assert reply.status_code == status, body
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == reply.headers["x-request-id"] == reply.headers["request-id"]
    message: str = body["error"]["message"]
    return message


@pytest.mark.parametrize("url", BODIES)
async def test_what_is_not_served_is_refused_by_name(make_http, url):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    asked, kind = BODIES[url]
    assert not (REFUSED.keys() | IGNORED) & kind.model_fields.keys()
    for name, nothing in REFUSED.items():
        for value in WANTED:
            if value in nothing:
                continue
            message = check(await client.post(url, json={**asked, name: value}), 400)
            assert message.startswith(f"{name} is not supported")
            assert (f"use {INSTEAD.get(name)}" in message) is (name in INSTEAD)
    assert router.starts == []


@pytest.mark.parametrize("url", BODIES)
async def test_values_that_ask_for_nothing_are_taken(make_http, url):
    client = make_http(saying("x"))
    for number in range(max(map(len, REFUSED.values()))):
        given = {name: nothing[min(number, len(nothing) - 1)] for name, nothing in REFUSED.items()}
        ignored = dict.fromkeys(IGNORED, "x")
        asked = {**BODIES[url][0], **given, **ignored, "unknown": 1}
        reply = await client.post(url, json=asked, headers={"anthropic-version": "2023-06-01"})
        assert reply.status_code == 200, reply.json()


# Anthropic's own, as its client lists them, betas too.
ANTHROPIC = (
    "betas", "billing_policy", "cache_control", "compaction", "container", "context_management",
    "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "max_tokens",
    "mcp_servers", "messages", "metadata", "model", "output_config", "service_tier", "speed",
    "stop_sequences", "stream", "system", "temperature", "thinking", "thread", "tool_choice",
    "tools", "top_k", "top_p", "user_profile_id", "workspace_id",
)  # fmt: skip


def test_each_known_field_has_one_place() -> None:
    assert set(ANTHROPIC) <= MessagesBody.model_fields.keys() | REFUSED.keys() | IGNORED
    assert not IGNORED & REFUSED.keys()


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


WRONG = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    (said(), "messages"),
    (said({"type": "text"}), "messages[0].content[0].text"),
    (said({"text": "x"}), "messages[0].content[0].type"),
    (said({"type": "image", "source": {}}), "messages[0].content[0].type"),
    (said({"type": "document"}), "messages[0].content[0].type"),
    (said(USE), "messages[0].content[0].type"),
    (said({**USE, "input": "{}"}, role="assistant"), "messages[0].content[0].input"),
    (said({"type": "tool_result"}, role="assistant"), "messages[0].content[0].type"),
    (said(USE, role="assistant"), "messages"),
    (
        said({"type": "tool_result", "tool_use_id": "c"}),
        "messages[0].content[0].tool_use_id",
    ),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"temperature": 1.1}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, {**TOOL, "name": "a b"}]}, "tools[1].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "input_schema": nested(40)}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "input_schema": {"enum": [1] * 5000}}]}, "tools[0].input_schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"effort": "huge", "format": SCHEMA}}, "output_config.effort"),
]


async def test_a_wrong_field_is_named(make_http, subtests):
    router = FakeRouter(saying("x"))
    client = make_http(router, bounds=LARGE)
    for fields, named in WRONG:
        with subtests.test(fields=fields):
            router.starts.clear()
            asked = {key: value for key, value in {**ASKED, **fields}.items() if value is not None}
            message = check(await client.post(URL, json=asked), 400)
            assert message.startswith((f"{named}:", f"{named} "))
            assert len(message) < 300
            assert router.starts == []


async def test_what_another_provider_keeps_secret_is_left_out(make_http):
    router = FakeRouter(saying("x"))
    secret = {"type": "redacted_thinking", "data": "x"}
    turn = {"role": "assistant", "content": [secret, {"type": "text", "text": "hello"}]}
    reply = await make_http(router).post(URL, json={**ASKED, "messages": [*HI, turn, *HI]})
    assert reply.status_code == 200, reply.json()
    assert reply.headers["request-id"] == reply.headers["x-request-id"]


async def test_errors_of_the_shell_have_the_shape_of_these_paths(make_http):
    client = make_http(saying("x"), keys=("k",))
    client.headers["x-api-key"] = "k"
    check(await client.post(URL, content=b"[", headers=JSON), 400)
    check(await client.get(URL), 405)
    check(await client.post(f"{URL}/batches", json={}), 404, "not_found_error")
    check(await client.post(f"{URL}/nothing", json={}), 404, "not_found_error")
    check(await client.post(URL, content=b" " * (1 << 17), headers=JSON), 413, "request_too_large")
    client.headers["x-api-key"] = "wrong"
    check(await client.post(URL, json=ASKED), 401, "authentication_error")


async def test_a_page_of_a_stranger_is_kept_out(make_http):
    client = make_http(saying("x"), local=True)
    headers = {"host": "localhost", "origin": "https://evil.example"}
    check(await client.post(URL, json=ASKED, headers=headers), 403, "permission_error")


@pytest.mark.parametrize("url", BODIES)
async def test_limits_are_those_of_every_api(make_http, url):
    full = AdmissionLimits(1, 1)
    with full.admit(b""):
        reply = await make_http(saying("x"), limits=full).post(url, json=BODIES[url][0])
    check(reply, 429, "rate_limit_error")
    assert reply.headers["retry-after"] == "1"


async def test_the_models_stay_openais(make_http):
    client = make_http(saying("x"))
    reply = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert reply.json()["object"] == "list"


def test_no_tools_at_all_can_be_asked_for_without_any() -> None:
    """Servers' tools count as well (gateway/mcp)."""
    messages = [{"role": "user", "content": "hi"}]
    asked = {"model": "m", "max_tokens": 5, "messages": messages, "tool_choice": {"type": "none"}}
    assert parse_messages(asked).tool_use() == ToolUse((), "none")
