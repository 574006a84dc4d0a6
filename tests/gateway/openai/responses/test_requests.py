"""The fields of requests to /v1/responses, and the errors for invalid ones."""

import asyncio
import json
import logging
import random
import re
from itertools import product
from typing import Any

import pytest
from fakes.router import FakeRouter, failed, finished, placed, saying, served, tokens
from fakes.scripted_parts import MemoryStore, ScriptedParts, deltas
from fakes.tool_model import TEMPLATE, ToolModel, calls
from oracles.http_errors import LARGE, check, nested

from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.fields import OMITTED_TYPE, Handling
from pdserve.gateway.http.responses import HEAD_S
from pdserve.gateway.openai.request_models.tools import CustomInput
from pdserve.gateway.openai.responses.items import MAX_ITEMS, conversation, parse_input
from pdserve.gateway.openai.responses.request_model import (
    FIELD_ALIASES,
    IGNORED_FIELDS,
    REFUSED_FIELDS,
    ResponsesBody,
)
from pdserve.gateway.openai.responses.tools import (
    TOOL_CHOICES,
    TOOLS,
    FunctionTool,
    Offer,
    parse_tools,
    tool_use,
)
from pdserve.protos import common_pb2 as pb
from pdserve.text import TextPart, ToolUse

pytestmark = pytest.mark.anyio
URL = "/v1/responses"
REQUEST: dict[str, Any] = {"model": "tiny", "input": "hi"}
WANTED = (True, 7, "x", ["x"], {"x": "x"})  # one non-default value of each type
TOOL = {"type": "function", "name": "f"}
GROUP: dict[str, Any] = {"type": "namespace", "name": "n", "tools": []}
HI = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


async def test_unsupported_fields_are_refused_by_name(make_http):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for name in REFUSED_FIELDS.keys() - ResponsesBody.model_fields.keys():
        for value in WANTED:
            if value in REFUSED_FIELDS[name]:
                continue
            error = check(await client.post(URL, json={**REQUEST, name: value}), 400, name)
            assert error["message"].startswith(f"{name} is not supported")
            assert (f"use {FIELD_ALIASES.get(name)}" in error["message"]) is (name in FIELD_ALIASES)
    assert router.starts == []


async def test_a_dropped_tool_is_logged_once_per_request(make_http, caplog, subtests):
    caplog.set_level(logging.DEBUG, "pdserve.gateway.http.fields")
    hosted = {"type": "web_search"}
    more = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [hosted, {**TOOL, "name": "g"}],
    }
    chat = {"model": "tiny", "messages": [HI]}
    client = make_http(saying("x"), responses=MemoryStore())
    request = {**REQUEST, "tools": [hosted, hosted, TOOL]}
    first = (await client.post(URL, json=request)).json()
    items = {"input": [more, more, HI], "previous_response_id": first["id"]}
    searching = {"type": "web_search_20250305", "name": "web_search"}
    for url, body in (
        (URL, request),
        (URL, {**request, **items}),
        (URL, {**request, **items, "stream": True}),
        (f"{URL}/input_tokens", {**request, **items}),
        ("/v1/chat/completions", {**chat, "tools": [hosted, hosted]}),
        ("/v1/messages", {**chat, "max_tokens": 5, "tools": [searching]}),
        ("/v1/messages/count_tokens", {**chat, "tools": [searching]}),
        ("/api/chat", {**chat, "tools": [hosted]}),
    ):
        with subtests.test(url=url, body=str(body)):
            caplog.clear()
            reply = await client.post(url, json=body)
            assert reply.status_code == 200, reply.text
            (text,) = caplog.messages
            assert text.startswith(
                "a request has unsupported fields or entries, which are left out and logged: "
            )
            assert "web_search" in caplog.text


async def test_an_overflow_found_late(make_http, subtests):
    """Report an overflow found by a worker, also after the head of a stream."""
    why = "This model's maximum context length is 512 tokens. However, you requested 600 tokens"
    late = False

    async def play(router, start):
        yield placed(start)
        await asyncio.sleep(2 * HEAD_S if late else 0)
        yield failed(start, pb.CONTEXT_LENGTH_EXCEEDED, why)

    client = make_http(play)
    expected = {"code": "context_length_exceeded", "message": f"{why} (context_length_exceeded)"}
    for late, streams in product((False, True), repeat=2):
        with subtests.test(late=late, streams=streams):
            reply = await client.post(URL, json={**REQUEST, "stream": streams})
            if late and streams:
                assert reply.status_code == 200
                events = [json.loads(line[6:]) for line in reply.text.splitlines() if "{" in line]
                assert [event["type"] for event in events] == [
                    "response.created", "response.in_progress", "response.failed",
                ]  # fmt: skip
                response = events[-1]["response"]
                assert (response["status"], response["output"]) == ("failed", [])
                assert response["error"] == expected
            else:
                error = check(reply, 400, code="context_length_exceeded")
                assert error["message"] == expected["message"]


async def test_no_op_values_of_unsupported_fields_are_accepted(make_http):
    client = make_http(saying("x"))
    for number in range(max(map(len, REFUSED_FIELDS.values()))):
        given = {
            name: nothing[min(number, len(nothing) - 1)]
            for name, nothing in REFUSED_FIELDS.items()
            if name not in ResponsesBody.model_fields
        }
        ignored = dict.fromkeys(IGNORED_FIELDS, "x")
        reply = await client.post(URL, json={**REQUEST, **given, **ignored, "unknown": 1})
        assert reply.status_code == 200, reply.json()


def test_each_known_field_is_in_one_list() -> None:
    served = ResponsesBody.model_fields.keys()
    assert not IGNORED_FIELDS & (served | (REFUSED_FIELDS.keys() - served))


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_bounded(make_http, monkeypatch, stream):
    """Bound them by max_output_tokens, or as they are generated; the last event of a stream repeats
    all."""
    monkeypatch.setattr("pdserve.gateway.sampling.MAX_LOGPROBS", 10 * 3)
    client = make_http(saying("hello " * 100))
    include = ["message.output_text.logprobs"]
    scored = {**REQUEST, "include": include, "top_logprobs": 2, "stream": stream}
    fits = await client.post(URL, json={**scored, "max_output_tokens": 10})
    assert fits.status_code == 200
    assert "response.failed" not in fits.text
    refused = await client.post(URL, json={**scored, "max_output_tokens": 11})
    error = check(refused, 400, "max_output_tokens")
    assert "request fewer tokens" in error["message"]
    later = await client.post(URL, json=scored)
    assert later.status_code == (200 if stream else 400)
    assert "exceed 30 in one answer" in later.text


WRONG = [
    ({"input": 7}, "input"),
    ({"input": ["x"]}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
    ({"input": [{"id": "msg_x_0"}]}, "input[0].id"),
    ({"input": [{"type": "item_reference", "id": ""}]}, "input[0].id"),
    (
        {"input": [{**HI, "id": "a"}, {"type": "web_search_call", "id": [1]}, {"id": "a"}]},
        "input[1].id",
    ),
    ({"input": [{"type": "additional_tools", "tools": [TOOL] * 1025}]}, "input[0].tools"),
    ({"input": [{"content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "compaction_trigger"}]}, "input[0].type"),
    ({"input": [{"type": "input_image", "image_url": "u"}]}, "input[0].type"),
    ({"input": [{"type": "configuration_update", "text": {"format": {}}}]}, "input[0].text"),
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
    ({"input": [{"role": "user", "content": [{"x": "hi"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": "x"}] * (MAX_ITEMS + 1)}, "input"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [{**GROUP, "tools": [{"type": "web_search"}, GROUP]}]},
        "tools[0].tools[1].type",
    ),
    *(
        ({"tools": [{"type": "custom", "name": "f", "format": form}]}, f"tools[0].format.{field}")
        for form, field in (
            ({"type": "grammar"}, "syntax"),
            ({"type": "grammar", "definition": "start: x"}, "syntax"),
            ({"definition": "start: x"}, "syntax"),
            ({"type": "grammar", "syntax": "regex"}, "definition"),
            ({"type": "grammar", "grammar": {"syntax": "lark"}}, "definition"),
            ({"syntax": "lark", "definition": ""}, "definition"),
        )
    ),
    ({"tools": [{"type": "custom", "name": "f"}, TOOL]}, "tools[1].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [TOOL, {**TOOL, "name": "a b"}]}, "tools[1].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
    ({"tools": [{**TOOL, "parameters": nested(40)}]}, "tools[0].parameters"),
    ({"tools": [{**TOOL, "parameters": {"enum": [1] * 5000}}]}, "tools[0].parameters"),
    ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{**TOOL, "name": f"f{n}"} for n in range(1025)]}, "tools"),
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
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"include": [7]}, "include[0]"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 3}, "reasoning": {"max_tokens": 4}},
        "reasoning.max_tokens",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
]


async def test_an_invalid_field_is_named(make_http, subtests):
    router = FakeRouter(saying("x"))
    client = make_http(router, bounds=LARGE)
    for fields, param in WRONG:
        with subtests.test(fields=fields):
            router.starts.clear()
            error = check(await client.post(URL, json={**REQUEST, **fields}), 400, param)
            assert len(error["message"]) < 300
            assert router.starts == []


async def test_fields_of_other_servers_of_this_api_are_accepted(make_http, subtests):
    given = {
        "top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }  # fmt: skip
    router = ToolModel("x", template="{{ messages[0].content }} {{ enable_thinking }}")
    client = make_http(router)
    reply = await client.post(URL, json={**REQUEST, **given, "seed": 7})
    assert reply.status_code == 200, reply.text
    params = router.starts[0].params
    assert router.starts[0].seed == 7
    assert {name: getattr(params, name) for name in given} == given
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    for path in (URL, f"{URL}/input_tokens"):
        assert (await client.post(path, json=REQUEST | variables)).status_code == 200
        error = check(
            await client.post(path, json={**REQUEST, "chat_template_kwargs": {"a": []}}),
            400, "chat_template_kwargs",
        )  # fmt: skip
        assert "'a' must be" in error["message"]
    assert router.prompt(1) == "hi False"
    for name, value in (("top_k", -2), ("min_p", 2), ("presence_penalty", 3), ("seed", "x")):
        with subtests.test(name):
            check(await client.post(URL, json={**REQUEST, name: value}), 400, name)


async def test_empty_values_are_accepted(make_http, subtests):
    compaction = {"type": "compaction", "compact_threshold": 1000}
    custom = {"type": "custom_tool_call", "call_id": "g", "name": "g", "input": None}
    outputs = (
        {"type": "function_call_output", "call_id": "c", "output": None},
        {"type": "custom_tool_call_output", "call_id": "g", "output": None},
    )
    for fields in (
        {"previous_response_id": ""},
        {"context_management": [compaction]},
        {"input": [{"role": "user", "content": [{"text": "hi"}]}]},
        {"reasoning": {"effort": "max", "context": "auto", "mode": "standard"}},
        {"input": [HI, CALL, custom, *outputs]},
    ):
        with subtests.test(fields):
            router = ToolModel("x")
            reply = await make_http(router).post(URL, json=REQUEST | fields)
            assert reply.status_code == 200, reply.text
    prompt = router.prompt(0)
    assert prompt.count("<tool_call>") == prompt.count("<|im_start|>tool\n") == 2


async def test_instructions_and_developer_messages_are_one_message(make_http):
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


async def test_assistant_turns_are_kept_apart(make_http):
    """Start a new turn for text after a call and for a thought after text."""
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


async def test_a_conversation_is_limited_in_items(make_http):
    store = MemoryStore()
    client = make_http(saying("x"), responses=store, bounds=LARGE)
    first = (await client.post(URL, json=REQUEST)).json()
    turns = [{"role": "user", "content": ""}] * (MAX_ITEMS - 1)
    more = {"input": turns, "previous_response_id": first["id"]}
    check(await client.post(URL, json={**REQUEST, **more}), 400, "input")


@pytest.mark.parametrize("path", [URL, f"{URL}/input_tokens"])
async def test_template_errors_name_the_input(make_http, path):
    for template in (b"{{ raise_exception('no') }}", b"{{ 1 / 0 }}", b""):
        router = FakeRouter(saying("x"))
        router.blobs[router.cards[0].template_digest] = template
        check(await make_http(router).post(path, json=REQUEST), 400, "input")
    body = {**REQUEST, "input": "x " * 50_000}
    client = make_http(saying("x"), bounds=LARGE)
    check(await client.post(path, json=body), 400, "input", "context_length_exceeded")
    if path == URL:
        body = {**REQUEST, "input": "x " * 400}
        check(await client.post(path, json=body), 400, "input", "context_length_exceeded")


@pytest.mark.parametrize("by_item", [False, True])
async def test_stored_items_count_as_body_bytes_while_used(make_http, by_item):
    """Count stored items, or small requests could load any amount."""
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
    first = await client.post(URL, json={**REQUEST, "input": "x" * 40_000})
    name = first.json()["id"]
    more = {**REQUEST, "previous_response_id": name}
    if by_item:
        items = (await client.get(f"{URL}/{name}/input_items")).json()["data"]
        more = {**REQUEST, "input": [{"id": items[0]["id"]}]}
    waiting = asyncio.create_task(client.post(URL, json=more))
    await held.wait()
    reply = await client.post(URL, json=more)
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        429,
        "too many request bodies at once; retry later",
    )
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


async def test_invalid_page_parameters_are_named(make_http, subtests):
    client = make_http(saying("x"), responses=MemoryStore())
    name = (await client.post(URL, json=REQUEST)).json()["id"]
    for query, param in WRONG_PAGES:
        with subtests.test(query):
            check(await client.get(f"{URL}/{name}/input_items?{query}"), 400, param)


async def test_a_stored_response_cannot_be_streamed(make_http):
    client = make_http(saying("x"), responses=MemoryStore())
    name = (await client.post(URL, json=REQUEST)).json()["id"]
    check(await client.get(f"{URL}/{name}?stream=true"), 400, "stream")


def test_tool_choice_none_is_accepted_without_tools() -> None:
    """Accept `none` without tools, because tools of MCP servers count as well (gateway/mcp)."""
    assert tool_use(Offer(), "none", parallel=True) == ToolUse((), "none")
    assert tool_use(Offer(), None, parallel=True) is None


def namespace(*tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": "agents", "description": "", "tools": list(tools)}


CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "text"}}
SPAWN = {**TOOL, "name": "spawn"}
HOSTED = [{"type": kind} for kind, member in TOOLS.items() if member is OMITTED_TYPE]


async def test_functions_of_a_namespace_have_both_names(make_http):
    router = ToolModel(calls("agents__spawn", '{"a": 1}'))
    client = make_http(router)
    body = {**REQUEST, "tools": [TOOL, namespace(SPAWN, CUSTOM)]}
    answer = (await client.post(URL, json=body)).json()
    assert "tools: f agents__spawn agents__patch" in router.prompt(0)
    (item,) = answer["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "spawn")
    assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace"]
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
    reply = await client.post(URL, json={**body, "input": [item, output]})
    assert reply.status_code == 200, reply.json()
    assert '"agents__spawn"' in router.prompt(1)
    for choice in (
        {"type": "function", "name": "spawn", "namespace": "agents"},
        {"type": "function", "name": "spawn"},
        {"type": "namespace", "name": "agents"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"},
                                                            {"type": "web_search"}]},
    ):  # fmt: skip
        use = tool_use(parse_tools(body["tools"]), choice, parallel=True)
        assert use is not None
        assert use.only
        assert all(name.startswith("agents__") for name in use.only)


async def test_built_in_tools_of_the_provider_are_dropped_and_logged(make_http, caplog):
    router = ToolModel("x")
    client = make_http(router)
    with caplog.at_level("DEBUG"):
        tools = [*HOSTED, {"type": "a_tool_of_tomorrow"}, TOOL]
        reply = await client.post(URL, json={**REQUEST, "tools": tools})
    assert reply.status_code == 200, reply.json()
    assert "tools: f<|im_start|>" in router.prompt(0)
    assert [tool["name"] for tool in reply.json()["tools"]] == ["f"]
    assert "left out and logged: tools 'a_tool_of_tomorrow', 'apply_patch'" in caplog.text
    for choice, member in TOOL_CHOICES.items():
        if member.handling is Handling.REFUSED:
            body = {**REQUEST, "tools": tools, "tool_choice": {"type": choice}}
            check(await client.post(URL, json=body), 400, "tool_choice.type")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_is_called_with_text(make_http, stream):
    text = '*** Begin\n+"é" \\ 😀\ttab\n'
    router = ToolModel(calls("patch", json.dumps({"input": text})), "done")
    client = make_http(router)
    body = {**REQUEST, "tools": [CUSTOM], "stream": stream}
    reply = await client.post(URL, json=body)
    if stream:
        sent = [json.loads(line[6:]) for line in reply.text.splitlines() if line[:5] == "data:"]
        answer = sent[-1]["response"]
        kind = "response.custom_tool_call_input"
        pieces = [event["delta"] for event in sent if event["type"] == f"{kind}.delta"]
        (done,) = [event["input"] for event in sent if event["type"] == f"{kind}.done"]
        assert "".join(pieces) == done == text
    else:
        answer = reply.json()
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", text)
    assert answer["tools"] == [CUSTOM]
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    second = await client.post(URL, json={**body, "stream": False, "input": [item, output]})
    assert second.status_code == 200, second.json()
    assert "*** Begin" in router.prompt(1)


def test_the_grammar_of_a_custom_tool_is_enforced_or_described() -> None:
    grammar = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    regex, lark = (
        parse_tools([{**CUSTOM, "format": {**grammar, "syntax": syntax}}]).tools["patch"].tool
        for syntax in ("regex", "lark")
    )
    assert regex.strict
    assert regex.parameters is not None
    assert regex.parameters["properties"]["input"] == {"type": "string", "pattern": "^(?:a|b)$"}
    assert not lark.strict
    assert lark.description.endswith("a|b")
    for form in ({"grammar": grammar}, {"syntax": "regex", "definition": "a|b"}):
        (offered,) = parse_tools([{**CUSTOM, "format": form}]).tools.values()
        assert offered.tool.parameters == regex.parameters


def test_the_pieces_of_an_input_add_up() -> None:
    rng = random.Random(7)
    for text in ("", "a", '\\"', "é😀\n\ud83d x".encode("utf-16", "replace").decode("utf-16")):
        for ascii_only in (False, True):
            raw = " { " + json.dumps({"input": text}, ensure_ascii=ascii_only)[1:]
            for _ in range(50):
                cuts = sorted(rng.choices(range(len(raw) + 1), k=rng.randrange(9)))
                ends = [*cuts, len(raw)]
                read = CustomInput()
                parts = [read.push(raw[a:b]) for a, b in zip([0, *cuts], ends, strict=True)]
                assert "".join(parts) + read.finish() == text
    for raw, text in (
        ('{"patch": "x"}', "x"),
        ('{"input": ["x"]}', '{"input": ["x"]}'),
        ("{}", ""),
        ("", ""),
        ("[", "["),
        ('{"input": "cut \\u00', "cut "),
        ('{"reason": "r", "input": "cut', "cut"),
        ('{"reason": "r", "inp', '{"reason": "r", "inp'),
        ('{"patch": "cut}', '{"patch": "cut}'),
    ):
        read = CustomInput()
        assert read.push(raw) + read.finish() == text
    endless = CustomInput()
    for _ in range(2000):
        endless.push(" ")
    assert endless.finish().strip() == ""


HISTORY = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "cats"}},
    {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "l", "output": "a.txt"},
    {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "b.txt"}]},
    {"type": "apply_patch_call", "call_id": "p", "operation": {"path": "c.txt", "diff": "+d"}},
    {"type": "computer_call_output", "call_id": "k", "output": {"image_url": "data:SECRET"}},
    {"type": "compaction", "encrypted_content": "SECRET"},
    {"type": "reasoning", "summary": [], "encrypted_content": "SECRET"},
    {"type": "an_item_of_tomorrow", "id": "x", "content": "said", "encrypted_content": "SECRET"},
    {"type": "file_search_call", "id": "fs_1", "status": "completed"},
]


async def test_other_items_of_history_are_kept_as_text_or_dropped(make_http):
    router = ToolModel("x")
    client = make_http(router, responses=MemoryStore())
    answer = (await client.post(URL, json={**REQUEST, "input": [*HISTORY, HI]})).json()
    for text in ("cats", "ls", "a.txt", "b.txt", "c.txt", "+d", "said"):
        assert text in router.prompt(0)
    assert "SECRET" not in router.prompt(0)
    page = (await client.get(f"{URL}/{answer['id']}/input_items?order=asc")).json()["data"]
    assert page[0] == HISTORY[0]
    assert page[7:9] == [{"type": "an_item_of_tomorrow", "id": "x", "content": "said"}, HISTORY[9]]
    more = {**REQUEST, "previous_response_id": answer["id"]}
    assert (await client.post(URL, json=more)).status_code == 200
    assert "cats" in router.prompt(1)


def test_messages_between_a_call_and_its_result_are_moved() -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": "r"}
    made = conversation(None, parse_input([CALL, HISTORY[0], HISTORY[2], output, HISTORY[3]]))
    assert [turn["role"] for turn in made] == ["assistant", "tool", "user"]
    assert "cats" in made[0]["content"]
    assert len(made[2]["content"]) == 2


def test_turns_of_answered_calls_stay_whole(subtests) -> None:
    """Text of the assistant before the results joins its turn; messages of others follow the
    results."""
    call_d, output_c, output_d = (
        {**CALL, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"type": "function_call_output", "call_id": "d", "output": "r"},
    )
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "so"}
    rule = {"role": "developer", "content": "rule"}
    for items, turns in (
        ([CALL, thought, call_d, output_c, output_d], "assistant:hm:cd tool tool"),
        ([CALL, said, output_c], "assistant:so:c tool"),
        ([CALL, rule, HI, output_c, said], "assistant:c tool developer user assistant:so"),
        ([CALL, call_d, output_c, thought, HI, output_d], "assistant:hm:cd tool tool user"),
        ([CALL, rule, HISTORY[2], output_c, HI], "assistant:c tool developer user"),
        ([CALL, HI, said, HI], "assistant:c user assistant:so user"),  # without an answer
        ([CALL, output_c, HI, CALL, HI], "assistant:c tool user assistant:c user"),
        ([CALL, HI, CALL, output_c, said], "assistant:c user assistant:c tool assistant:so"),
        (
            [{"type": "local_shell_call", "call_id": "c", "action": {}}, CALL, HI, output_c, HI],
            "assistant:[local_shell_call]:c tool user user",
        ),
    ):
        with subtests.test(turns):
            made = []
            for turn in conversation(None, parse_input(items)):
                ids = "".join(call["id"] for call in turn.get("tool_calls", ()))
                said_here = turn["content"] if turn["role"] == "assistant" else ""
                words = (turn["role"], turn.get("reasoning_content"), said_here, ids)
                made.append(":".join(filter(None, words)))
            assert " ".join(made) == turns


def test_a_call_kept_as_text_may_have_an_output() -> None:
    for kind, output in (
        ("function_call_output", "a.txt"),
        ("custom_tool_call_output", [{"type": "input_text", "text": "a.txt"}]),
    ):
        items = [HISTORY[1], {"type": kind, "call_id": "l", "output": output}]
        called, printed = conversation(None, parse_input(items))
        assert (called["role"], printed["role"]) == ("assistant", "user")
        assert printed["content"] == f"[{kind}]\na.txt"
    unhashable = {**HISTORY[1], "call_id": [1]}
    assert len(conversation(None, parse_input([unhashable, HI]))) == 2


def test_items_kept_as_text_do_not_change_turns(subtests) -> None:
    said = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    output = {"type": "function_call_output", "call_id": "c", "output": "r"}
    search, printed = HISTORY[0], HISTORY[2]
    another = [{**item, "call_id": "d"} for item in (CALL, output)]
    for items, roles in (
        ([HI, search, said, HI], "user assistant user"),
        ([HI, search, thought, search, said, CALL, output, search, said, HI],
         "user assistant tool assistant user"),
        ([said, printed, HI, said], "assistant user assistant"),
        ([CALL, another[0], output, search, printed, another[1], HI],
         "assistant tool tool assistant user"),
    ):  # fmt: skip
        with subtests.test(roles):
            made = conversation(None, parse_input(items))
            assert " ".join(turn["role"] for turn in made) == roles
            assert str(made).count("cats") == items.count(search)
            assert str(made).count("'a'") == items.count(said)


def test_non_object_arguments_reach_the_template_unchanged() -> None:
    for given, taken in (("[", "["), ("null", "null"), ({"a": 1}, '{"a":1}'), (None, "")):
        (turn,) = conversation(None, parse_input([{**CALL, "arguments": given}]))
        assert turn["tool_calls"][0]["function"]["arguments"] == taken
        custom = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": given}
        (turn,) = conversation(None, parse_input([custom]))
        assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"input": taken}


async def test_tools_and_effort_in_items_apply(make_http):
    router = ToolModel("x", template="{{ reasoning_effort }} " + TEMPLATE)
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [SPAWN, TOOL]},
        {"type": "tool_search_output", "call_id": "s", "tools": [{**TOOL, "name": "g"}]},
        {"type": "configuration_update", "reasoning": {"effort": "high"}},
        {"role": "user", "content": "hi"},
    ]
    client = make_http(router, responses=MemoryStore())
    body = {**REQUEST, "tools": [TOOL], "reasoning": {"effort": "low", "summary": "detailed"}}
    first = (await client.post(URL, json={**body, "input": items})).json()
    await client.post(URL, json={**body, "previous_response_id": first["id"]})
    for number in range(2):
        assert router.prompt(number).startswith("high")
        tools = re.search(r"tools:([ \w]*)<", router.prompt(number))
        assert tools is not None
        assert tools[1].split() == ["f", "spawn", "g"]


async def test_tools_in_items_are_validated_once(make_http, monkeypatch, caplog):
    """Tools whose names are already offered are not validated again."""
    names: list[str] = []
    validate = FunctionTool.model_validate

    def count(value: Any) -> FunctionTool:
        names.append(value["name"])
        return validate(value)

    monkeypatch.setattr(FunctionTool, "model_validate", count)
    many = [{**TOOL, "name": f"f{number}"} for number in range(40)]
    found = {"type": "tool_search_output", "tools": [*HOSTED, *many, namespace(SPAWN)]}
    again = {**found, "tools": [{**TOOL, "parameters": "wrong"}, *found["tools"]]}
    client = make_http(ToolModel("x"), bounds=LARGE)
    with caplog.at_level("DEBUG"):
        body = {**REQUEST, "tools": [TOOL], "input": [found, *[again] * 59, HI]}
        reply = await client.post(URL, json=body)
    assert reply.status_code == 200, reply.json()
    assert sorted(names) == sorted(["f", *(tool["name"] for tool in many), "spawn"])
    assert caplog.text.count("left out and logged") == 1


async def test_items_of_stored_responses_may_be_referenced(make_http):
    """Resolve references to items; the AI SDK sends its history as references."""
    router = ToolModel(calls("f", '{"a": 1}'), "done")
    store = MemoryStore()
    client = make_http(router, responses=store, keys=("one", "two"))
    client.headers["authorization"] = "Bearer one"
    body = {**REQUEST, "tools": [TOOL]}
    first = (await client.post(URL, json=body)).json()
    (call,) = first["output"]
    question = (await client.get(f"{URL}/{first['id']}/input_items")).json()["data"][0]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "r"}
    prompts = []
    for reference in (
        {"type": "item_reference", "id": call["id"]},
        {"id": call["id"]},
        {"type": "function_call", "id": call["id"]},
        call,
    ):
        items = [{"id": question["id"]}, reference, output]
        reply = await client.post(URL, json={**body, "input": items})
        assert reply.status_code == 200, reply.json()
        prompts.append(router.prompt(-1))
        kept = (await client.get(f"{URL}/{reply.json()['id']}/input_items?order=asc")).json()
        assert [item["type"] for item in kept["data"]] == [
            "message", "function_call", "function_call_output",
        ]  # fmt: skip
    assert len(set(prompts)) == 1
    assert '{"a": 1}' in prompts[0]
    missing = {**body, "input": [{"id": call["id"].replace("_0", "_7")}]}
    check(await client.post(URL, json=missing), 400, "input[0].id")
    client.headers["authorization"] = "Bearer two"
    check(await client.post(URL, json={**body, "input": [{"id": call["id"]}]}), 400, "input[0].id")


async def test_hints_are_accepted(make_http, subtests):
    client = make_http(FakeRouter(saying("x")))
    for fields in (
        {"reasoning": {"summary": "detailed"}},
        {"reasoning": {"summary": "concise", "generate_summary": "auto"}},
        {"reasoning": {"effort": "auto"}},
        {"reasoning": {"effort": "default", "summary": "none"}},
        {"truncation": "auto"},
        {"include": ["web_search_call.results", "an_item_of_tomorrow.results"]},
        {"tools": [{**GROUP, "tools": [{"type": "web_search"}, {"type": "mcp"}, TOOL]}]},
        {"metadata": {"a": 1, "b": None, "c": ["x"]}},
        {"top_p": 0, "max_output_tokens": 16.0},
        {"text": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"tools": [TOOL], "tool_choice": {"type": "auto"}},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"input": [{"role": "assistant", "content": None}, {"role": "user", "content": "x"}]},
    ):
        with subtests.test(fields=fields):
            reply = await client.post(URL, json={**REQUEST, **fields})
            assert reply.status_code == 200, reply.json()
