"""The fields of requests to /v1/messages, and the errors for invalid ones."""

from typing import Any

import httpx
import pytest
from anthropic.types import ModelInfo
from fakes.router import FakeRouter, saying
from fakes.scripted_parts import deltas
from fakes.tool_model import THINKING, ToolModel
from oracles.http_errors import JSON, LARGE, nested

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.anthropic.api import MessageContent
from pdserve.gateway.anthropic.conversation import EDITS
from pdserve.gateway.anthropic.request_models import (
    FIELD_ALIASES,
    IGNORED_FIELDS,
    OMITTED_FIELDS,
    REFUSED_FIELDS,
    MessagesBody,
    parse,
)
from pdserve.text import ReasoningPart, TextPart, ToolUse

pytestmark = pytest.mark.anyio
URL = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
REQUEST: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": HI}
BODIES: Any = {URL: REQUEST, COUNT: {"model": "tiny", "messages": HI}}
WANTED = (True, 7, "x", ["x"], {"x": "x"})  # one non-default value of each type
TOOL = {"name": "f", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
SCHEMA = {"type": "json_schema", "schema": {}}
ANY = {"type": "any"}


def check(reply: httpx.Response, status: int, kind: str = "invalid_request_error") -> str:
    """Check the status and shape of an error and return its message."""
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
async def test_unsupported_fields_are_refused_by_name(make_http, url):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    request = BODIES[url]
    assert not IGNORED_FIELDS & MessagesBody.model_fields.keys()
    for name in REFUSED_FIELDS.keys() - MessagesBody.model_fields.keys():
        for value in WANTED:
            if value in REFUSED_FIELDS[name]:
                continue
            message = check(await client.post(url, json={**request, name: value}), 400)
            assert message.startswith(f"{name} is not supported")
            assert (f"use {FIELD_ALIASES.get(name)}" in message) is (name in FIELD_ALIASES)
    assert router.starts == []


@pytest.mark.parametrize("url", BODIES)
async def test_no_op_values_of_unsupported_fields_are_accepted(make_http, url):
    client = make_http(saying("x"))
    for number in range(max(map(len, REFUSED_FIELDS.values()))):
        given = {
            name: nothing[min(number, len(nothing) - 1)]
            for name, nothing in REFUSED_FIELDS.items()
            if name not in MessagesBody.model_fields
        }
        ignored = dict.fromkeys(IGNORED_FIELDS, "x")
        body = {**BODIES[url], **given, **ignored, "unknown": 1}
        reply = await client.post(url, json=body, headers={"anthropic-version": "2023-06-01"})
        assert reply.status_code == 200, reply.json()


async def test_equivalent_fields_of_other_servers_are_accepted(make_http, subtests):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for fields in (
        {"min_p": 0.0, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        {"response_format": {"type": "text"}},
        {"thinking": {"type": "disabled", "budget_tokens": 0}},
        {"max_tokens": -1},
    ):
        with subtests.test(fields=fields):
            reply = await client.post(URL, json={**REQUEST, **fields})
            assert reply.status_code == 200, reply.json()
    assert router.starts[0].params.max_tokens == 9
    assert router.starts[-1].params.max_tokens == 0  # limited only by the context


async def test_alternative_names_for_enabling_thinking(make_http, subtests):
    template = "{{ messages[0].content }} {{ enable_thinking }}"
    router = ToolModel("x", template=template)
    client = make_http(router)
    for name in ("thinking", "enable_thinking", "think"):
        for value in (True, False):
            with subtests.test(name=name, value=value):
                for url in (URL, COUNT):
                    reply = await client.post(url, json={**BODIES[url], name: value})
                    assert reply.status_code == 200, reply.json()
                assert router.prompt(-1) == f"hi {value}"
    reply = await client.post(URL, json={**REQUEST, "output_config": {"effort": "none"}})
    assert (reply.status_code, router.prompt(-1)) == (200, "hi False")
    contrary = {**REQUEST, "think": True, "thinking": {"type": "disabled"}}
    message = check(await client.post(URL, json=contrary), 400)
    assert message == "thinking contradicts think"


def test_each_known_field_is_in_one_list() -> None:
    assert not (IGNORED_FIELDS | OMITTED_FIELDS) & REFUSED_FIELDS.keys()


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


def document(kind: str, **source: Any) -> dict[str, Any]:
    return {"type": "document", "source": {"type": kind, **source}}


WRONG = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "system", "content": [{"type": "image"}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (said(), "messages"),
    (said({"type": "text"}), "messages[0].content[0].text"),
    (said({"text": "x"}), "messages[0].content[0].type"),
    (said({"type": "image", "source": {}}), "messages[0].content[0].type"),
    (said({"type": "document"}), "messages[0].content[0].source.type"),
    (said(document("url", url="x")), "messages[0].content[0].source.type"),
    (
        said(document("content", content=[{"type": "image"}])),
        "messages[0].content[0].source.content[0].type",
    ),
    ({"messages": [*HI, {"role": "system", "output_config": {}}]}, "messages[1].content"),
    (
        {"messages": [{"role": "system", "content": "x", "output_config": {"format": SCHEMA}}]},
        "messages[0].output_config.format",
    ),
    (
        {"messages": [{"role": "system", "content": "x", "clear_at": "noon"}]},
        "messages[0].clear_at",
    ),
    ({"messages": [{**HI[0], "clear_at": "never"}]}, "messages[0].clear_at"),
    ({"messages": [{**HI[0], "output_config": {"effort": "low"}}]}, "messages[0].output_config"),
    ({"output_format": {"type": "xml"}}, "output_format.type"),
    (said(USE), "messages[0].content[0].type"),
    (said({"type": "tool_result"}, role="assistant"), "messages[0].content[0].type"),
    (said(USE, role="assistant"), "messages"),
    (
        said({"type": "tool_result", "tool_use_id": "c"}),
        "messages[0].content[0].tool_use_id",
    ),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"temperature": 1.1}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].type"),
    (
        {
            "tools": [{"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        "tool_choice.name",
    ),
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
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"effort": "huge", "format": SCHEMA}}, "output_config.effort"),
]


async def test_an_invalid_field_is_named(make_http, subtests):
    router = FakeRouter(saying("x"))
    client = make_http(router, bounds=LARGE)
    for fields, named in WRONG:
        with subtests.test(fields=fields):
            router.starts.clear()
            request = {
                key: value for key, value in {**REQUEST, **fields}.items() if value is not None
            }
            message = check(await client.post(URL, json=request), 400)
            assert message.startswith((f"{named}:", f"{named} "))
            assert len(message) < 300
            assert router.starts == []


async def test_redacted_thinking_is_dropped(make_http):
    router = FakeRouter(saying("x"))
    secret = {"type": "redacted_thinking", "data": "x"}
    turn = {"role": "assistant", "content": [secret, {"type": "text", "text": "hello"}]}
    reply = await make_http(router).post(URL, json={**REQUEST, "messages": [*HI, turn, *HI]})
    assert reply.status_code == 200, reply.json()
    assert reply.headers["request-id"] == reply.headers["x-request-id"]


async def test_http_errors_have_the_shape_of_the_api(make_http):
    client = make_http(saying("x"), keys=("k",))
    client.headers["x-api-key"] = "k"
    check(await client.post(URL, content=b"[", headers=JSON), 400)
    check(await client.get(URL), 405)
    check(await client.post(f"{URL}/batches", json={}), 404, "not_found_error")
    check(await client.post(f"{URL}/nothing", json={}), 404, "not_found_error")
    check(await client.post(URL, content=b" " * (1 << 17), headers=JSON), 413, "request_too_large")
    client.headers["x-api-key"] = "wrong"
    check(await client.post(URL, json=REQUEST), 401, "authentication_error")


async def test_a_foreign_origin_is_refused(make_http):
    client = make_http(saying("x"), local=True)
    headers = {"host": "localhost", "origin": "https://evil.example"}
    check(await client.post(URL, json=REQUEST, headers=headers), 403, "permission_error")


@pytest.mark.parametrize("url", BODIES)
async def test_admission_limits_apply(make_http, url):
    full = AdmissionLimits(1, 1)
    with full.admit(b""):
        reply = await make_http(saying("x"), limits=full).post(url, json=BODIES[url])
    check(reply, 429, "rate_limit_error")
    assert reply.headers["retry-after"] == "1"


async def test_models_are_listed_in_the_shape_of_the_api(make_http):
    client = make_http(saying("x"))
    for path in ("/v1/models", "/v1/models/tiny"):
        plain = (await client.get(path)).json()
        assert plain["object"] in ("list", "model")
        reply = await client.get(path, headers={"anthropic-version": "2023-06-01"})
        page = reply.json()
        info = page["data"][0] if "data" in page else page
        assert (info["type"], info["id"], info["display_name"]) == ("model", "tiny", "tiny")
        assert ModelInfo.model_validate(info).max_input_tokens
    page = (await client.get("/v1/models", headers={"anthropic-version": "x"})).json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "tiny", "tiny")


def test_tool_choice_none_is_accepted_without_tools() -> None:
    """Accept `none` without tools, because tools of MCP servers count as well (gateway/mcp)."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "max_tokens": 5, "messages": messages, "tool_choice": {"type": "none"}}
    assert parse(MessagesBody, body).tool_use() == ToolUse((), "none")


def turns(*messages: Any, **fields: Any) -> list[Any]:
    """The turns that the template renders."""
    body = {"model": "tiny", "max_tokens": 9, "messages": list(messages), **fields}
    return list(parse(MessagesBody, body).conversation().messages)


def texts(turn: Any) -> list[str]:
    return [part["text"] for part in turn["content"]]


async def test_system_messages_keep_their_places(make_http):
    cached = {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "a"},
        {"role": "system", "content": [cached]},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [result]},
        {"role": "system", "content": "last"},
    ]
    made = turns(*messages, system="rules")
    assert [turn["role"] for turn in made] == [
        "system", "user", "system", "system", "assistant", "tool", "system",
    ]  # fmt: skip
    assert [texts(turn) for turn in made if turn["role"] == "system"] == [
        ["rules"], ["a"], ["c"], ["last"],
    ]  # fmt: skip
    client = make_http(saying("x"))
    for url in BODIES:
        reply = await client.post(url, json={**BODIES[url], "messages": messages})
        assert reply.status_code == 200, reply.json()


def test_messages_between_a_call_and_its_result_are_moved(subtests) -> None:
    called = {"role": "assistant", "content": [USE, {**USE, "id": "d"}]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    both = [result, {**result, "tool_use_id": "d"}]
    rule = {"role": "system", "content": "a"}
    text = {"type": "text", "text": "hi"}
    for messages in (
        [rule, {"role": "user", "content": [*both, text]}],
        [rule, {"role": "user", "content": [both[0], text, both[1]]}],
        [{"role": "user", "content": both[:1]}, rule, {"role": "user", "content": [both[1], text]}],
        [{"role": "user", "content": [text, both[0]]}, rule, {"role": "user", "content": both[1:]}],
    ):
        with subtests.test(messages):
            roles = [turn["role"] for turn in turns(*HI, called, *messages)]
            assert roles[:4] == ["user", "assistant", "tool", "tool"]
            assert sorted(roles[4:]) == ["system", "user"]


def test_a_system_message_may_expire_and_set_the_effort() -> None:
    def rule(text: str, **more: Any) -> dict[str, Any]:
        return {"role": "system", "content": text, **more}

    once = {"clear_at": "next_user_message"}
    answer = {"role": "assistant", "content": "x"}
    made = turns(*HI, rule("a", **once), answer, rule("b", **once), answer, *HI, rule("c", **once))
    roles = [turn["role"] for turn in made]
    assert roles == ["user", "assistant", "user", "system"], (
        "the two assistant messages must be one turn"
    )
    assert texts(made[-1]) == ["c"]
    kept = turns(*HI, rule("a", clear_at="never"), rule("b", clear_at=None), *HI)
    assert [texts(turn) for turn in kept] == [["hi"], ["a"], ["b"], ["hi"]]
    low, high = ({"output_config": {"effort": effort}} for effort in ("low", "high"))
    for messages, fields, effort in (
        ([*HI, {"role": "system", **low}], high, "low"),
        ([rule("a", **low), rule("b", output_config={}), *HI], {}, "low"),
        ([rule("a", **low), *HI, rule("b", **high, **once), *HI], {}, "high"),
        (HI, high, "high"),
    ):
        body = {"max_tokens": 9, "messages": messages, **fields}
        conversation = parse(MessagesBody, body).conversation()
        assert conversation.suggested == {"reasoning_effort": effort}


def test_the_text_of_a_document_is_kept() -> None:
    plain = document("text", media_type="text/plain", data="hello")
    parts = document("content", content=[{"type": "text", "text": text} for text in "ab"])
    for block, text in (
        (plain, "hello"),
        ({**plain, "title": "T", "context": "C", "citations": {"enabled": True}}, "T\nC\nhello"),
        ({**parts, "title": None}, "a\nb"),
        (document("content", content="whole"), "whole"),
    ):
        result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
        call = {"role": "assistant", "content": [USE]}
        first, _, answer = turns(
            {"role": "user", "content": [block]}, call, *said(result)["messages"]
        )
        assert texts(first) == texts(answer) == [f"[document]\n{text}"]


def test_an_earlier_name_of_the_output_format() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields, name in (
        ({"output_format": form}, "output_format.schema"),
        ({"output_config": {"format": form}}, "output_config.format.schema"),
    ):
        structure = parse(MessagesBody, {**REQUEST, **fields}).structure()
        assert structure is not None
        assert (structure.value, structure.param) == (form["schema"], name)


def test_a_billing_header_that_changes_with_each_request_is_dropped() -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=1f;"
    for system in (
        [{"type": "text", "text": billing}, {"type": "text", "text": "rules"}],
        f"{billing}\nrules",
    ):
        assert texts(turns(*HI, system=system)[0]) == ["rules"]
    assert [turn["role"] for turn in turns(*HI, system=billing)] == ["user"]


def test_non_object_arguments_reach_the_template_unchanged() -> None:
    for given, taken in (("{'a': 1}", "{'a': 1}"), ([1], "[1]"), (None, {}), ({"a": 1}, {"a": 1})):
        made = turns(*HI, {"role": "assistant", "content": [{**USE, "input": given}]}, *HI)
        assert made[1]["tool_calls"][0]["function"]["arguments"] == taken


def test_a_hidden_thought_is_restored_from_its_signature() -> None:
    for hidden in (False, True):
        content = MessageContent(shows_thinking=not hidden)
        events = [
            event
            for delta in deltas(ReasoningPart("I l"), ReasoningPart("öok."), TextPart("a"))
            for event in content.push(delta)
        ]
        kinds = [event["delta"]["type"] for event in events if "delta" in event]
        shown = [] if hidden else ["thinking_delta"] * 2
        assert kinds == [*shown, "signature_delta", "text_delta"]
        thought = content.blocks[0]
        assert thought["thinking"] == ("" if hidden else "I löok.")
        again = turns(*HI, {"role": "assistant", "content": content.blocks}, *HI)
        assert again[1]["reasoning_content"] == "I löok."
    for signature in ("", "no base64", "AAAA", 7, "dGhvdWdodDr/"):
        forged = {"type": "thinking", "thinking": "", "signature": signature}
        again = turns(*HI, {"role": "assistant", "content": [forged]}, *HI)
        assert "reasoning_content" not in again[1]


async def test_hints_are_accepted(make_http, subtests):
    client = make_http(ToolModel("x", template=THINKING), bounds=LARGE)
    for fields in (
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"thinking": {"type": "enabled", "budget_tokens": 2.0, "display": "anything"}},
        {"thinking": {"type": "between_tools"}},
        {"thinking": {"type": "auto"}},
        {"output_config": {"effort": "minimal"}},
        {"output_config": {"effort": "auto"}},
        {"top_p": 0, "max_tokens": 9.0, "top_k": 3.0},
        {"metadata": {"user_id": 7, "more": []}},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "required"},
        *({"context_management": {"edits": [{"type": name, "keep": {}}]}} for name in EDITS),
        {"context_management": {"edits": [{"type": "compact_20990101"}]}},
        {"tools": [{**TOOL, "name": f"f{n}"} for n in range(150)]},
        {"messages": [*HI, {"role": "assistant", "content": None}, *HI]},
    ):
        with subtests.test(fields=str(fields)[:80]):
            reply = await client.post(URL, json={**REQUEST, **fields})
            assert reply.status_code == 200, reply.json()


async def test_a_top_p_of_0_takes_the_best_token(make_http):
    router = FakeRouter(saying("x"))
    assert (await make_http(router).post(URL, json={**REQUEST, "top_p": 0})).status_code == 200
    assert (router.starts[0].params.top_p, router.starts[0].params.top_k) == (1, 1)


async def test_tools_share_a_size_limit(make_http):
    client = make_http(saying("x"), bounds=LARGE)
    large = {"type": "object", "properties": {str(n): {} for n in range(1200)}}
    for tools in (
        [{**TOOL, "name": f"f{n}"} for n in range(1025)],
        [{"name": f"f{n}", "input_schema": large} for n in range(60)],
        [{**TOOL, "name": f"f{n}", "description": "x" * 60_000} for n in range(20)],
    ):
        reply = await client.post(URL, json={**REQUEST, "tools": tools})
        if reply.status_code != 413:
            assert check(reply, 400).startswith("tools")


async def test_built_in_tools_of_the_provider_are_dropped_and_logged(make_http, caplog):
    router = ToolModel("x")
    client = make_http(router)
    search = {"type": "web_search_20990101", "name": "web_search", "max_uses": 5}
    servers = [{"type": "url", "name": "s", "url": "https://example.invalid"}]
    with caplog.at_level("DEBUG"):
        body = {**REQUEST, "tools": [search, TOOL], "mcp_servers": servers}
        reply = await client.post(URL, json=body)
    assert reply.status_code == 200, reply.json()
    assert "tools: f<|im_start|>" in router.prompt(0)
    assert "left out and logged: tools 'web_search_20990101'" in caplog.text
    assert "left out and logged: fields 'mcp_servers'" in caplog.text
    check(await client.post(URL, json={**REQUEST, "tools": [search], "tool_choice": ANY}), 400)


def test_results_of_built_in_tools_are_kept_as_text() -> None:
    found = [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "SECRET"}]
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": found},
        {"type": "text", "text": "so"},
        {"type": "compaction", "content": "before", "encrypted_content": "SECRET"},
        {"type": "fallback", "from": {}, "to": {}},
        {"type": "a_kind_of_tomorrow", "x": "y"},
    ]
    said = turns(*HI, {"role": "assistant", "content": blocks}, *HI)[1]["content"]
    assert said.splitlines() == [
        "[server_tool_use]", "web_search", '{"query":"q"}', "[web_search_tool_result]",
        '[{"type":"web_search_result","title":"T","url":"u"}]', "so", "[compaction]", "before",
    ]  # fmt: skip
    searched = {"type": "search_result", "title": "T", "source": "u",
                "content": [{"type": "text", "text": "found"}]}  # fmt: skip
    (turn,) = turns({"role": "user", "content": [searched]})
    assert texts(turn) == ["[search_result]\nT\nu\nfound"]
