"""/v1/chat/completions with tools and thoughts, against a scripted router.

Over 400 lines: calls of every kind from one scripted model, which all tests share.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from builders.tool_answers import TOOL_ANSWERS
from fakes.router import FakeRouter, Play, saying, served, tokenizer_json
from fakes.tool_model import ToolModel
from fakes.tool_model import calls as calling
from oracles.grammar_walks import Walk
from oracles.http_errors import LARGE
from oracles.sse import events

from pdserve.gateway.http.validation import MAX_SCHEMA_CHARS, check_tools
from pdserve.gateway.openai.request_models import FunctionBody
from pdserve.services.common.errors import ServiceError
from pdserve.text import ParserChoice, Tool

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, CLOCK]
HERMES = TOOL_ANSWERS["hermes"]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.role + ':' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}{{ '\n' }}{% endfor %}assistant:"
)


def router(play: Play, template: str = TEMPLATE) -> FakeRouter:
    card, blobs = served(context_len=2048)
    blobs[card.template_digest] = template.encode()
    return FakeRouter(play, [card], blobs)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HI, "tools": TOOLS, **more}


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream as a client assembles them: text, thought, calls, finish."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = made.setdefault(
                choice["index"], {"text": "", "thought": "", "calls": [], "finish": None}
            )
            delta = choice["delta"]
            whole["text"] += delta.get("content") or ""
            whole["thought"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(whole["calls"]):
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    whole["calls"].append([call["id"], call["function"]["name"], ""])
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    whole["calls"][call["index"]][2] += call["function"]["arguments"]
            whole["finish"] = choice["finish_reason"] or whole["finish"]
    return made


async def test_call(make_http: Callable[..., Any]) -> None:
    upstream = router(saying(HERMES.call))
    reply = await make_http(upstream).post(URL, json=body())
    assert reply.status_code == 200, reply.json()
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert reply.json()["usage"]["completion_tokens"] == len(upstream.encode(HERMES.call)) + 1
    prompt = bytes_of(upstream, upstream.starts[0].prompt_ids)
    assert '"name": "get_weather"' in prompt
    assert '"name": "get_time"' in prompt


def bytes_of(upstream: FakeRouter, ids: Any) -> str:
    return upstream.words.decode(list(ids), skip_special_tokens=False)


async def test_streamed_calls_of_two_choices(make_http: Callable[..., Any]) -> None:
    upstream = router(saying("Look: " + HERMES.calls, "no call"))
    request = body(stream=True, n=2, stream_options={"include_usage": True})
    chunks = events((await make_http(upstream).post(URL, json=request)).text)
    choices = joined(chunks)
    first = choices[0]
    assert first["text"] == "Look:"
    assert first["finish"] == "tool_calls"
    assert [(name, json.loads(text)) for _, name, text in first["calls"]] == [
        ("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"}),
    ]  # fmt: skip
    assert len({call_id for call_id, _, _ in first["calls"]}) == 2
    assert choices[1] == {"text": "no call", "thought": "", "calls": [], "finish": "stop"}
    generated = sum(len(upstream.encode(t)) + 1 for t in ("Look: " + HERMES.calls, "no call"))
    assert chunks[-1]["usage"]["completion_tokens"] == generated
    assert all(
        len(choice["delta"].get("tool_calls", [])) <= 1 for c in chunks for choice in c["choices"]
    )


async def test_gpt_oss(make_http: Callable[..., Any]) -> None:
    template = "{{ tools | tojson }}<|channel|><|message|><|start|>assistant"
    answer = (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant" + TOOL_ANSWERS["gpt_oss"].call
    )
    client = make_http(router(saying(answer), template))
    choice = (await client.post(URL, json=body())).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "so"
    assert choice["message"]["content"] == "I look."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert choice["finish_reason"] == "tool_calls"
    odd = '<|channel|>commentary to=functions.f<|message|>{"a": 1e999}'
    client = make_http(router(saying(odd), template))
    message = (await client.post(URL, json=body())).json()["choices"][0]["message"]
    assert message["content"] == '{"a": 1e999}'


async def test_parallel_calls_can_be_disabled(make_http: Callable[..., Any]) -> None:
    request = body(parallel_tool_calls=False)
    reply = await make_http(router(saying(HERMES.calls))).post(URL, json=request)
    assert len(reply.json()["choices"][0]["message"]["tool_calls"]) == 1


async def test_logprobs_and_ids_are_complete(make_http: Callable[..., Any]) -> None:
    answer = "Hi" + HERMES.calls
    upstream = router(saying(answer))
    request = body(logprobs=True, return_token_ids=True)
    whole = (await make_http(upstream).post(URL, json=request)).json()["choices"][0]
    ids = upstream.encode(answer)
    assert whole["token_ids"][: len(ids)] == ids
    assert len(whole["logprobs"]["content"]) == len(whole["token_ids"])
    chunks = events((await make_http(upstream).post(URL, json={**request, "stream": True})).text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    streamed = [token for choice in choices for token in choice.get("token_ids", [])]
    assert streamed == whole["token_ids"]
    scored = [t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
    assert [t["token"] for t in scored] == [t["token"] for t in whole["logprobs"]["content"]]


@pytest.mark.parametrize(
    ("more", "calls"),
    [({"tool_choice": "none"}, False), ({"tools": None}, False), ({"tool_choice": "auto"}, True)],
)
async def test_without_tools_an_answer_is_text(
    make_http: Callable[..., Any], more: dict[str, Any], calls: bool
) -> None:
    reply = await make_http(router(saying(HERMES.call))).post(URL, json={**body(), **more})
    choice = reply.json()["choices"][0]
    assert ("tool_calls" in choice["message"]) is calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    if not calls:
        assert choice["message"]["content"] == HERMES.call


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_call_is_partial(
    make_http: Callable[..., Any], stream: bool, subtests: pytest.Subtests
) -> None:
    """Cut a call by max_tokens or a stop string; an answer cut before the tool's name has no
    call."""
    num_tokens = len(router(saying("")).encode(HERMES.call[: HERMES.call.index("is")]))
    for more, arguments in (
        ({"max_tokens": 20}, None),
        ({"max_tokens": num_tokens}, '{"city": "Par'),
        ({"stop": "is"}, '{"city": "Par'),
        ({"stop": "Paris"}, '{"city": "'),
    ):
        with subtests.test(more=more):
            upstream = router(saying(HERMES.call))
            reply = await make_http(upstream).post(URL, json=body(stream=stream, **more))
            if stream:
                answer = joined(events(reply.text))[0]
                text, finish = answer["text"], answer["finish"]
                calls = [(name, given) for _, name, given in answer["calls"]]
            else:
                (choice,) = reply.json()["choices"]
                text, finish = choice["message"]["content"] or "", choice["finish_reason"]
                calls = [
                    (call["function"]["name"], call["function"]["arguments"])
                    for call in choice["message"].get("tool_calls", [])
                ]
            assert calls == ([("get_weather", arguments)] if arguments else [])
            assert (text, finish) == ("", "length")


@pytest.mark.parametrize("stop", [False, True])
async def test_messages_have_the_complete_arguments_of_a_cut_call(
    make_http: Callable[..., Any], stop: bool
) -> None:
    call = HERMES.call.replace('"Paris"', '"Paris", "days": [1, 2], "note": "so"')
    upstream = router(saying(call))
    limit = len(upstream.encode(call[: call.index('o"}')]))
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    request = {"model": "tiny", "messages": HI, "tools": [tool], "max_tokens": 500}
    request |= {"stop_sequences": ['o"}']} if stop else {"max_tokens": limit}
    whole = (await make_http(upstream).post("/v1/messages", json=request)).json()
    assert whole["stop_reason"] == ("stop_sequence" if stop else "max_tokens")
    (block,) = whole["content"]
    assert (block["type"], block["name"]) == ("tool_use", "get_weather")
    assert block["input"] == {"city": "Paris", "days": [1, 2]}
    reply = await make_http(upstream).post("/v1/messages", json={**request, "stream": True})
    data = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in data]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert data[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    deltas = [e["delta"] for e in data if e["type"] == "content_block_delta"]
    assert len(deltas) > 3
    assert "".join(delta["partial_json"] for delta in deltas) == (
        '{"city": "Paris", "days": [1, 2], "note": "s'
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_mark_a_cut_call_as_incomplete(
    make_http: Callable[..., Any], stream: bool
) -> None:
    upstream = router(saying(HERMES.call))
    limit = len(upstream.encode(HERMES.call[: HERMES.call.index("is")]))
    request = {
        "model": "tiny", "input": "hi", "tools": [{"type": "function", **WEATHER["function"]}],
        "max_output_tokens": limit, "stream": stream,
    }  # fmt: skip
    reply = await make_http(upstream).post("/v1/responses", json=request)
    if stream:
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        data = [json.loads(line) for line in lines if line != "[DONE]"]
        pieces = [e["delta"] for e in data if e["type"].endswith("arguments.delta")]
        assert len(pieces) > 1
        assert "".join(pieces) == '{"city": "Par'
        assert data[-1]["type"] == "response.incomplete"
        response = data[-1]["response"]
    else:
        response = reply.json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = response["output"]
    assert (item["type"], item["name"], item["status"]) == (
        "function_call", "get_weather", "incomplete",
    )  # fmt: skip
    assert item["arguments"] == '{"city": "Par'


async def test_a_call_with_a_malformed_value_is_incomplete_in_every_api(
    make_http: Callable[..., Any],
) -> None:
    """Mark the call as incomplete although text follows and the answer ends normally."""
    upstream = router(saying(HERMES.call.replace('"Paris"', '"print("hi")"')))
    function = WEATHER["function"]
    answer = (await make_http(upstream).post(URL, json=body())).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["arguments"], answer["finish_reason"]) == (
        '{"city": "print("',
        "length",
    )
    request = {"model": "tiny", "input": "hi", "tools": [{"type": "function", **function}]}
    response = (await make_http(upstream).post("/v1/responses", json=request)).json()
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["arguments"] == '{"city": "print("'
    tool = {"name": "get_weather", "input_schema": function["parameters"]}
    request = {"model": "tiny", "messages": HI, "tools": [tool], "max_tokens": 500}
    message = (await make_http(upstream).post("/v1/messages", json=request)).json()
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {"city": "print("}


async def test_a_long_call_is_streamed(make_http: Callable[..., Any]) -> None:
    call = HERMES.call.replace("Paris", "a long name " * 60)
    reply = await make_http(router(saying(call))).post(URL, json=body(stream=True, max_tokens=1700))
    chunks = events(reply.text)
    (answer,) = joined(chunks).values()
    (only,) = answer["calls"]
    assert json.loads(only[2]) == {"city": "a long name " * 60}
    assert sum("tool_calls" in choice["delta"] for c in chunks for choice in c["choices"]) > 60


async def test_a_template_of_an_unknown_family_is_logged(
    make_http: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    request = {"model": "tiny", "messages": HI}
    for template, num_warnings in ((TEMPLATE, 0), (TEMPLATE.replace("<tool_call>", ""), 1)):
        caplog.clear()
        await make_http(router(saying("x"), template)).post(URL, json=request)
        assert caplog.text.count("--tool-parser") == num_warnings


async def test_a_stop_string_after_the_arguments_keeps_a_call_whole(
    make_http: Callable[..., Any],
) -> None:
    reply = await make_http(router(saying(HERMES.call))).post(URL, json=body(stop="</tool_call>"))
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_structured_answer_beside_tools_is_text_or_calls(
    make_http: Callable[..., Any], stream: bool
) -> None:
    schema = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
    request = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema, "strict": True},
    }
    text = '{"note": "<tool_call>"}'
    for said, calls in ((text, 0), (HERMES.call, 1)):
        upstream = router(saying(said))
        given = body(response_format=request, stream=stream)
        reply = await make_http(upstream).post(URL, json=given)
        assert reply.status_code == 200, reply.text
        if stream:
            (answer,) = joined(events(reply.text)).values()
            found, content, finish = answer["calls"], answer["text"], answer["finish"]
        else:
            choice = reply.json()["choices"][0]
            found = choice["message"].get("tool_calls", [])
            content, finish = choice["message"]["content"] or "", choice["finish_reason"]
        assert (len(found), content) == (calls, "" if calls else text)
        assert finish == ("tool_calls" if calls else "stop")
        bound = Walk(upstream.starts[0].params.grammar.source)
        assert bound.take(said)
        assert bound.may_end
        assert not Walk(upstream.starts[0].params.grammar.source).take("hello")


async def test_a_template_without_tools_renders_them_as_text(make_http: Callable[..., Any]) -> None:
    upstream = router(saying(HERMES.call), PLAIN_TEMPLATE)
    client = make_http(upstream)
    message = (await client.post(URL, json=body(max_tokens=100))).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees"}
    await client.post(URL, json=body(messages=[*HI, message, result]))
    prompts = [upstream.words.decode(list(start.prompt_ids)) for start in upstream.starts]
    for prompt in prompts:
        assert prompt.startswith("system:You can call these functions.")
        assert json.dumps(WEATHER["function"]) in prompt
    assert '"arguments": {"city": "Paris"}' in prompts[1]
    assert prompts[1].endswith("user:Result of get_weather:\n18 degrees\n")


async def test_required_calls_of_a_template_without_tools(make_http: Callable[..., Any]) -> None:
    """Drop any text after the calls."""
    upstream = router(saying(HERMES.call + " And so"), PLAIN_TEMPLATE)
    reply = await make_http(upstream).post(URL, json=body(tool_choice="required", max_tokens=100))
    choice = reply.json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert upstream.starts[0].params.grammar


async def test_tools_are_refused_without_parser_and_template(
    make_http: Callable[..., Any],
) -> None:
    client = make_http(router(saying("x"), PLAIN_TEMPLATE), parsers=ParserChoice("none"))
    reply = await client.post(URL, json=body())
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools"
    assert "tool_parser" in reply.json()["error"]["message"]
    reply = await client.post(URL, json={**body(), "tools": None})
    assert reply.status_code == 200
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert not model["capabilities"]["tools"]


def named(**more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **more}}]


DEEP: dict[str, Any] = {}
for _ in range(50):
    DEEP = {"properties": {"a": DEEP}}


WRONG_TOOLS = [
    ({"tools": named(name="a b")}, "tools[0].function.name"),
    ({"tools": named(name="x" * 129)}, "tools[0].function.name"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
    (
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
        "tools[0].custom.format.syntax",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": named(parameters={"type": "array"})}, "tools[0].function.parameters"),
    ({"tools": named(parameters=DEEP)}, "tools[0].function.parameters"),
    ({"tools": named() * 2}, "tools[1].function.name"),
    ({"tools": [named(name=f"f{n}")[0] for n in range(1025)]}, "tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": []}},
        "tool_choice.allowed_tools",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
        "tool_choice.allowed_tools.mode",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
        "tool_choice.allowed_tools.tools",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"name": "g"}]}}},
        "tool_choice.allowed_tools.tools[0].function.name",
    ),
    ({"functions": [{}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
]


async def test_invalid_tools_are_refused_by_name(
    make_http: Callable[..., Any], subtests: pytest.Subtests
) -> None:
    upstream = router(saying("x"))
    client = make_http(upstream, bounds=LARGE)
    for more, param in WRONG_TOOLS:
        with subtests.test(more=more):
            upstream.starts.clear()
            reply = await client.post(URL, json={**body(), **more})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == param
            assert not upstream.starts


@pytest.mark.parametrize(
    ("schema", "what"),
    [({"enum": ["x"] * 5000}, "values"), ({"x" * 70_000: 1}, "characters"), (DEEP, "levels")],
)
def test_large_schemas_are_refused(schema: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        FunctionBody(name="f", parameters=schema)


@pytest.mark.parametrize("field", ["functions", "function_call"])
async def test_legacy_fields_name_their_replacement(
    make_http: Callable[..., Any], field: str
) -> None:
    reply = await make_http(router(saying("x"))).post(URL, json=body(**{field: [{"name": "f"}]}))
    assert "use tool" in reply.json()["error"]["message"]


async def test_a_call_and_its_answer_reach_the_template(make_http: Callable[..., Any]) -> None:
    upstream = router(saying("It is sunny."))
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather"}}
    call["function"] = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "name": "get_weather",
            "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "shine"}],
        },
    ]
    reply = await make_http(upstream).post(URL, json=body(messages=messages))
    assert reply.json()["choices"][0]["message"]["content"] == "It is sunny."
    prompt = bytes_of(upstream, upstream.starts[0].prompt_ids)
    assert 'assistant:get_weather({"city": "Paris"})\ntool:sun\nshine\nassistant:' in prompt


async def test_tools_are_counted_by_tokenize(make_http: Callable[..., Any]) -> None:
    upstream = router(saying("x"))
    client = make_http(upstream)
    await client.post(URL, json=body())
    request = {"model": "tiny", "messages": HI, "tools": TOOLS}
    counted = (await client.post("/tokenize", json=request)).json()
    assert counted["tokens"] == list(upstream.starts[0].prompt_ids)


THINKS = TEMPLATE + "{# </think> #}"
OPENS = TEMPLATE + "<think>\n{# </think> #}"
CLOSES = TEMPLATE + "<think>\n\n</think>\n\n"


THOUGHTS = [
    (THINKS, "<think>\nso\n</think>\n\nHi", "so", "Hi"),
    (THINKS, "Hi", None, "Hi"),
    (OPENS, "so\n</think>\n\nHi", "so", "Hi"),
    (OPENS, "so", "so", None),
    (CLOSES, "Hi", None, "Hi"),
    (TEMPLATE, "<think>so</think>Hi", None, "<think>so</think>Hi"),
]


async def test_thoughts(make_http: Callable[..., Any], subtests: pytest.Subtests) -> None:
    for template, answer, thought, text in THOUGHTS:
        with subtests.test(template=template, answer=answer):
            client = make_http(router(saying(answer), template))
            request = {"model": "tiny", "messages": HI}
            message = (await client.post(URL, json=request)).json()["choices"][0]["message"]
            assert message.get("reasoning_content") == thought
            assert message["content"] == text
            chunks = events((await client.post(URL, json={**request, "stream": True})).text)
            whole = joined(chunks)[0]
            assert (whole["thought"] or None, whole["text"] or None) == (thought, text)


@pytest.mark.parametrize(
    ("answer", "thought"),
    [("<think>so it is</think>Hi all", "<think>so it is"), ("Hi", ""), ("<think>so", "<think>so")],
)
async def test_tokens_of_thoughts_are_counted(
    make_http: Callable[..., Any], answer: str, thought: str
) -> None:
    upstream = router(saying(answer), THINKS)
    client = make_http(upstream)
    request = {"model": "tiny", "messages": HI, "n": 2, "stream_options": {"include_usage": True}}
    usage = (await client.post(URL, json={**request, "stream_options": None})).json()["usage"]
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    least = 2 * len(upstream.encode(thought))
    # The beginning of the tag may be held back, and returned as thought with the next token.
    assert least <= counted <= least + 2 * 10 * bool(thought)
    assert counted <= usage["completion_tokens"]
    streamed = events((await client.post(URL, json={**request, "stream": True})).text)[-1]["usage"]
    assert streamed == usage


async def test_a_named_tool_ends_with_stop(make_http: Callable[..., Any]) -> None:
    """Finish with `stop` as OpenAI and vLLM do, unlike a call that is merely required."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice, want in ((named, "stop"), ("required", "tool_calls"), (allowed, "tool_calls")):
        client = make_http(router(saying(HERMES.call)))
        request = body(tool_choice=choice)
        (whole,) = (await client.post(URL, json=request)).json()["choices"]
        assert whole["message"]["tool_calls"]
        assert whole["finish_reason"] == want
        streamed = events((await client.post(URL, json={**request, "stream": True})).text)
        assert joined(streamed)[0]["finish"] == want


async def test_a_quoted_tag_opens_no_thought(make_http: Callable[..., Any]) -> None:
    request = {"model": "tiny", "messages": [{"role": "user", "content": "what is <think>"}]}
    reply = await make_http(router(saying("A tag."), THINKS)).post(URL, json=request)
    assert reply.json()["choices"][0]["message"]["content"] == "A tag."


async def test_a_thought_is_continued(make_http: Callable[..., Any]) -> None:
    messages = [*HI, {"role": "assistant", "content": "<think>I wonder"}]
    request = {"model": "tiny", "messages": messages, "continue_final_message": True}
    reply = await make_http(router(saying(" so.</think>Hi"), THINKS)).post(URL, json=request)
    message = reply.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so.", "Hi")


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_may_be_dropped_or_kept_in_the_text(
    make_http: Callable[..., Any], stream: bool
) -> None:
    client = make_http(router(saying("<think>so</think>" + HERMES.call), THINKS))

    async def answer_to(**more: Any) -> tuple[str, str, int]:
        reply = await client.post(URL, json=body(stream=stream, **more))
        if stream:
            whole = joined(events(reply.text))[0]
            return whole["thought"], whole["text"], len(whole["calls"])
        message = reply.json()["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        return message.get("reasoning_content", ""), message["content"] or "", len(calls)

    assert await answer_to() == ("so", "", 1)
    assert await answer_to(include_reasoning=False) == ("", "", 1)
    if stream:
        reply = await client.post(URL, json=body(stream=True, include_reasoning=False))
        assert {"content": ""} not in [c["choices"][0]["delta"] for c in events(reply.text)]
    assert await answer_to(separate_reasoning=False) == ("", "<think>\nso\n</think>\n\n", 1)
    for form in ("none", "raw"):
        assert await answer_to(reasoning_format=form) == ("", "<think>\nso\n</think>\n\n", 1)
    for form in ("", "auto", "deepseek", "parsed"):
        assert await answer_to(reasoning_format=form) == await answer_to()
    assert await answer_to(reasoning_format="hidden") == await answer_to(include_reasoning=False)


async def test_special_tokens_for_a_parser_do_not_leak(
    make_http: Callable[..., Any],
) -> None:
    """Parse tags that are special tokens; skip all others, also within calls."""
    words = tokenizers.Tokenizer.from_buffer(tokenizer_json())
    words.add_special_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<|odd|>"])
    data = words.to_str().encode()
    upstream = router(saying("<think>s<|odd|>o</think>Look: <|odd|>" + HERMES.call), THINKS)
    upstream.words = words
    card = upstream.cards[0]
    card.tokenizer_digest = hashlib.sha256(data).hexdigest()
    card.vocab_size = words.get_vocab_size()
    upstream.blobs[card.tokenizer_digest] = data
    client = make_http(upstream)
    message = (await client.post(URL, json=body())).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "so"
    assert message["content"] == "Look:"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    request = {"model": "tiny", "messages": HI}
    message = (await client.post(URL, json=request)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "so"
    assert message["content"].startswith('Look: \n{"name"')  # as without a parser


@pytest.mark.parametrize(("strict", "status"), [(False, 200), (True, 400)])
async def test_only_strict_functions_refuse_unenforceable_schemas(
    make_http: Callable[..., Any], strict: bool, status: int
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    request = body(tools=named(parameters=parameters, strict=strict), tool_choice="required")
    reply = await make_http(router(saying("x"))).post(URL, json=request)
    assert reply.status_code == status
    if status == 400:
        assert "uniqueItems" in reply.json()["error"]["message"]


async def test_a_custom_tool_is_called_with_text(make_http: Callable[..., Any]) -> None:
    text = 'a "patch"\n+é'
    patch = {"type": "custom", "custom": {"name": "patch", "description": "of files"}}
    request = {**body(tools=[patch, {"type": "web_search", "function": {"name": "$x"}}, CLOCK])}
    arguments = json.dumps({"input": text})
    model = ToolModel(calling("patch", arguments))
    client = make_http(model)
    whole = (await client.post(URL, json=request)).json()["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert call["type"] == "custom"
    assert call["custom"] == {"name": "patch", "input": text}
    assert whole["finish_reason"] == "tool_calls"
    assert "tools: patch get_time<" in model.prompt(0)
    reply = await client.post(URL, json={**request, "stream": True})
    pieces = [
        piece
        for chunk in events(reply.text)
        for choice in chunk["choices"]
        for piece in choice["delta"].get("tool_calls", [])
    ]
    assert pieces[0]["custom"]["name"] == "patch"
    assert "".join(piece["custom"]["input"] for piece in pieces) == text
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "ok"},
    ]
    reply = await client.post(URL, json={**request, "messages": history})
    assert reply.status_code == 200, reply.json()
    assert '"patch' in model.prompt(-1)
    only = {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "patch"}},
                                      {"type": "web_search"}]}  # fmt: skip
    both = {**CLOCK, "custom": {"name": "get_time"}}
    clock = make_http(ToolModel(calling("get_time", "{}")))
    reply = await clock.post(URL, json=body(tools=[both]))
    assert reply.json()["choices"][0]["message"]["tool_calls"][0]["type"] == "function"
    choices: tuple[Any, ...] = (
        {"type": "auto"},
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "allowed_tools", "allowed_tools": only},
    )
    for choice in choices:
        reply = await client.post(URL, json={**request, "tool_choice": choice})
        assert reply.status_code == 200, reply.json()


async def test_the_grammar_of_a_custom_tool_is_bounded_and_checked(
    make_http: Callable[..., Any], subtests: pytest.Subtests
) -> None:
    client = make_http(router(saying("x")), bounds=LARGE)

    def tool(definition: str) -> dict[str, Any]:
        form = {"type": "grammar", "syntax": "regex", "definition": definition}
        return {"name": "c", "format": form}

    def chat(definition: str) -> dict[str, Any]:
        return body(tools=[{"type": "custom", "custom": tool(definition)}])

    def responses(definition: str) -> dict[str, Any]:
        return {"input": "hi", "tools": [{"type": "custom", **tool(definition)}]}

    long = "a" * 65535
    for url, request, field in (
        (URL, chat(long), "tools[0].custom.format.definition"),
        (URL, chat("a("), "tools[0].custom.format.definition"),
        ("/v1/responses", responses(long), "tools[0].format.definition"),
        ("/v1/responses", responses("a(?=b)"), "tools[0].format.definition"),
    ):
        with subtests.test(field):
            reply = await client.post(url, json=request)
            assert reply.status_code == 400, reply.text
            error = reply.json()["error"]
            assert error["param"] == field
            assert error["message"].startswith((f"{field}: ", f"{field} "))
    reply = await client.post(URL, json=chat("a" * (1 << 15)))
    assert reply.json()["error"]["code"] == "context_length_exceeded", reply.text


def test_an_oversized_tool_is_refused_by_its_field() -> None:
    large = {"type": "object", "title": "a" * MAX_SCHEMA_CHARS}
    for param in ("tools[0].custom.format", ""):
        with pytest.raises(ServiceError, match="must have at most") as refused:
            check_tools([Tool("f", parameters=large, param=param)])
        assert refused.value.param == (param or "tools")


async def test_parts_and_messages_of_history(
    make_http: Callable[..., Any], subtests: pytest.Subtests
) -> None:
    model = ToolModel("x")
    client = make_http(model)
    refusal = {"type": "refusal", "refusal": "I won't"}
    called = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    for messages, shown in (
        ([{"role": "assistant", "content": None}], "assistant"),
        ([{"role": "assistant", "content": None, "refusal": "I won't"}], "I won't"),
        ([{"role": "assistant", "content": [refusal, {"type": "tomorrow"}]}], "I won't"),
        ([{"role": "assistant", "content": [{"type": "output_text", "text": "so"}]}], "so"),
        ([called, {"role": "function", "name": "f", "content": "result"}], "result"),
        *(
            (
                [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "type": "custom", "custom": call}],
                    },
                    {"role": "tool", "tool_call_id": "c", "content": "result"},
                ],
                shown,
            )
            for call, shown in (
                ({"name": "f"}, '{"input": ""}'),
                ({"name": "f", "input": None}, '{"input": ""}'),
                ({"name": "f", "input": [1]}, '{"input": "[1]"}'),
            )
        ),
    ):
        with subtests.test(messages=messages):
            reply = await client.post(URL, json=body(messages=[*HI, *messages, *HI]))
            assert reply.status_code == 200, reply.json()
            assert shown in model.prompt(-1)
    for kind in ("image_url", "input_audio", "file", "tomorrow"):
        said = [{"role": "user", "content": [{"type": kind}]}]
        reply = await client.post(URL, json=body(messages=said))
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "messages[0].content[0].type"
