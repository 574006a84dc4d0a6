"""Every client error is answered with an OpenAI error object that names the field."""

import json
import logging
import re
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import pytest
from fakes.router import FakeRouter, failed, saying, served
from fakes.tool_model import TEMPLATE, ToolModel
from oracles.http_errors import CHAT, HI, JSON, LARGE, PLAIN, check
from systems.tokenizer_pools import Pool

from pdserve.engine.api import context_exceeded
from pdserve.protos import common_pb2 as pb

pytestmark = pytest.mark.anyio


WRONG_VALUES = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", []),
    ("top_p", -0.1),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("min_p", -1),
    ("min_p", 1.01),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 11),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("n", 0),
    ("n", 129),
    ("n", "2"),
    ("n", True),
    ("n", 1.5),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", "a"),
    ("seed", 10**400),
    ("temperature", 10**400),
    ("n", 10**400),
    ("min_tokens", 10**400),
    ("stop_token_ids", [10**400]),
    ("logit_bias", {"1": 10**400}),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_completion_tokens", 0),
    ("min_tokens", -1),
    ("min_tokens", 10**6),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"99999": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {str(i): 0 for i in range(1025)}),
    ("stop", ["x"] * 17),
    ("stop", "x" * 257),
    ("stop", [1]),
    ("stop", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**7]),
    ("stop_token_ids", [0] * 129),
    ("top_logprobs", 3),  # without logprobs
    ("logprobs", 1),  # must be a boolean in chat
    ("stream", "yes"),
    ("messages", []),
    ("messages", "hi"),
    ("ignore_eos", 1),
    ("cache_salt", "x" * 257),
    ("cache_salt", ""),
    ("priority", 2**31),
    ("priority", -(2**31) - 1),
    ("priority", 1.5),
    ("priority", True),
    ("prompt_token_ids", [1, 2]),
    ("reasoning_effort", "much"),
    ("chat_template_kwargs", {"enable_thinking": [1]}),
    ("chat_template_kwargs", {str(i): 0 for i in range(33)}),
]


async def test_wrong_types_and_ranges(make_http, subtests):
    router = FakeRouter(saying("hello"))
    client = make_http(router)
    for field, value in WRONG_VALUES:
        with subtests.test(field=field, value=value):
            router.starts.clear()
            body = {"model": "tiny", "messages": HI, field: value}
            reply = await client.post(CHAT, json=body)
            param = reply.json()["error"]["param"]
            check(reply, 400, param)
            assert param.split(".")[0].split("[")[0] == field
            assert router.starts == []


WRONG_CHATS = [
    ({}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": HI, "response_format": {"type": "grammar"}}, "response_format.type"),
    ({"messages": HI, "functions": [{}]}, "functions"),
    ({"messages": HI, "modalities": ["audio"]}, "modalities"),
    ({"messages": HI, "chat_template": "x"}, "chat_template"),
    ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
]


async def test_invalid_chat_bodies(make_http, subtests):
    client = make_http(saying("x"))
    for body, param in WRONG_CHATS:
        with subtests.test(body=body):
            check(await client.post(CHAT, json={"model": "tiny", **body}), 400, param)


WRONG_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [10**400]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 128, "n": 5}, "n"),
    ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    ({"prompt": "a", "best_of": 129}, "best_of"),
    ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": None, "prompt_token_ids": None}, "prompt"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
    ({"prompt_token_ids": "a"}, "prompt_token_ids"),
    ({"prompt_token_ids": ["a"]}, "prompt_token_ids"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [[1], []]}, "prompt_token_ids"),
    ({"prompt_token_ids": [[1]] * 129}, "prompt_token_ids"),
    ({"prompt_token_ids": [10**6]}, "prompt_token_ids"),
    ({"prompt_token_ids": [[1], [-1]]}, "prompt_token_ids"),
    ({"prompt_token_ids": [10**6], "echo": True}, "prompt_token_ids"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "echo": "yes"}, "echo"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream_options": {}, "stream": False}, "stream_options"),
    ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
]


async def test_invalid_completion_bodies(make_http, subtests):
    client = make_http(saying("x"))
    for body, param in WRONG_COMPLETIONS:
        with subtests.test(body=body):
            check(await client.post(PLAIN, json={"model": "tiny", **body}), 400, param)


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"model": "tiny",}',
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b"\xff\xfe",
    b'{"a": "\\ud800"}',
    b"[" * 3000,
    b'{"a":' * 1000 + b"1" + b"}" * 1000,
]


async def test_malformed_json(make_http, subtests):
    client = make_http(saying("x"))
    for data in MALFORMED:
        with subtests.test(data=data):
            check(await client.post(CHAT, content=data, headers=JSON), 400)


async def test_a_number_too_large_for_a_float(make_http):
    data = json.dumps({"model": "tiny", "messages": HI, "temperature": 0}).replace(" 0", " 1e999")
    reply = await make_http(saying("x")).post(CHAT, content=data, headers=JSON)
    check(reply, 400, "temperature")


async def test_a_body_must_be_declared_as_json(make_http):
    """Refuse other content types: a web page of any origin may have its browser send those."""
    data = json.dumps({"model": "tiny", "messages": HI}).encode()
    client = make_http(saying("x"))
    for good in ("application/json; charset=latin-1", "Application/JSON", "application/x+json"):
        reply = await client.post(CHAT, content=data, headers={"content-type": good})
        assert reply.status_code == 200
    form = "application/x-www-form-urlencoded"
    for bad in ("text/plain", form, "multipart/form-data; boundary=x", "text/json", ""):
        check(await client.post(CHAT, content=data, headers={"content-type": bad}), 415)
    check(await client.post(CHAT, content=data), 415)


async def test_unknown_model(make_http):
    reply = await make_http(saying("x")).post(CHAT, json={"model": "other", "messages": HI})
    error = check(reply, 404, "model", "model_not_found")
    assert "'other'" in error["message"]


async def test_a_long_model_name_is_cut(make_http, caplog):
    """Cut a long model name in the answer and in the log."""
    caplog.set_level(logging.INFO)
    body = {"model": "m" * 60_000, "messages": HI}
    reply = await make_http(saying("x")).post(CHAT, json=body)
    error = check(reply, 404, "model", "model_not_found")
    assert "m" * 100 in error["message"]
    assert len(reply.content) < 1000
    (line,) = (r.getMessage() for r in caplog.records if r.name == "pdserve.gateway.request")
    assert line.startswith(f"POST {CHAT} 404 model=- prompt=0 completion=0 total=")
    assert line.endswith(" finish=MODEL_NOT_FOUND")


async def test_a_request_without_a_model_uses_the_only_one(make_http, subtests):
    two = FakeRouter(saying("x"), [served(name)[0] for name in ("one", "two")])
    client, of_two = make_http(saying("x")), make_http(two)
    unnamed: tuple[dict[str, str | None], ...] = {}, {"model": ""}, {"model": None}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": HI},
        PLAIN: {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": HI, "max_tokens": 5},
    }
    for (url, body), more in product(bodies.items(), unnamed):
        with subtests.test(url=url, more=more):
            reply = await client.post(url, json=body | more)
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == "tiny"
            refused = await of_two.post(url, json=body | more)
            assert refused.status_code == 400
            assert "one, two" in refused.json()["error"]["message"]
    assert two.starts == []


@pytest.mark.parametrize(
    ("url", "body"),
    [(CHAT, {"model": "tiny", "messages": HI}), ("/tokenize", {"prompt": "a"})],
)
async def test_no_model_is_served_yet(make_http, url, body):
    client = make_http(FakeRouter(saying("x"), cards=[]))
    reply = await client.post(url, json=body)
    check(reply, 503, code="unavailable")
    assert reply.headers["retry-after"]
    assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
    assert (await client.get("/ready")).status_code == 503


async def test_a_model_once_served_is_left_to_the_router(make_http):
    router = FakeRouter(saying("hello"))
    client = make_http(router)
    await client.get("/v1/models")
    router.cards = []
    reply = await client.post(CHAT, json={"model": "tiny", "messages": HI})
    assert reply.status_code == 200


async def test_tokenize_needs_a_model_if_there_are_several(make_http):
    cards = [served(name)[0] for name in ("one", "two")]
    client = make_http(FakeRouter(saying("x"), cards))
    check(await client.post("/tokenize", json={"prompt": "a"}), 400, "model")
    reply = await client.post("/tokenize", json={"model": "two", "prompt": "a"})
    assert reply.status_code == 200


async def test_a_model_without_template_serves_completions(make_http):
    card, blobs = served()
    card.ClearField("template_digest")
    router = FakeRouter(saying("x"), [card], blobs)
    error = check(
        await make_http(router).post(CHAT, json={"model": "tiny", "messages": HI}), 400, "messages"
    )
    assert "base model" in error["message"]
    assert "/v1/completions" in error["message"]
    assert (
        await make_http(router).post(PLAIN, json={"model": "tiny", "prompt": "a"})
    ).status_code == 200


TOO_LONG = [
    (CHAT, {"messages": [{"role": "user", "content": "a b " * 400}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": " " * 40_000}]}, "messages"),
    (PLAIN, {"prompt": "a b " * 400}, "prompt"),
    (PLAIN, {"prompt": [1] * 512}, "prompt"),
]
BEYOND: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": HI, "max_tokens": 512}, "max_tokens", "messages"),
    (CHAT, {"messages": HI, "max_completion_tokens": 32_000}, "max_completion_tokens", "messages"),
    (CHAT, {"messages": HI, "max_tokens": 10**400}, "max_tokens", "messages"),
    (PLAIN, {"prompt": [1] * 500, "max_tokens": 13}, "max_tokens", "prompt"),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 600}, "max_output_tokens", "input"),
    ("/v1/messages", {"messages": HI, "max_tokens": 65_535}, "max_tokens", "messages"),
]


async def test_too_long_for_the_context(make_http, subtests):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for url, body, param in TOO_LONG:
        with subtests.test(url=url, body=body):
            router.starts.clear()
            reply = await client.post(url, json={"model": "tiny", **body})
            error = check(reply, 400, param, "context_length_exceeded")
            words = "This model's maximum context length is 512 tokens. However, you requested "
            assert error["message"].startswith(words)
            assert re.search(rf" \d+ tokens \(\d+ in the {param}, \d+ in the", error["message"])
            # LangChain searches for it
            assert error["message"].count("context_length_exceeded") == 1
            assert router.starts == []


@pytest.fixture
async def pool(anyio_backend: str) -> AsyncIterator[Pool]:
    pool = Pool(workers=1)
    yield pool
    await pool.close()


async def test_arguments_and_tools_that_are_too_long_for_the_context(make_http, pool, subtests):
    """Only the rendered text, longer than any prompt, shows the excess."""
    router = ToolModel("x", template="{{ tools | tojson }}" + TEMPLATE)
    client = make_http(router, bounds=LARGE, text_pool=pool)
    long = json.dumps({"a": "x" * 300_000})
    function = {"name": "f", "description": "x" * 60_000, "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": {**function, "name": f"f{n}"}} for n in range(5)]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": long}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": long}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": json.loads(long)}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    for url, body, param in (
        (CHAT, {"messages": [*HI, called, {"role": "tool", "tool_call_id": "c", "content": "r"}]},
         "messages"),
        (CHAT, {"messages": HI, "tools": tools}, "messages"),
        ("/v1/responses",
         {"input": [*HI, item, {"type": "function_call_output", "call_id": "c", "output": "r"}]},
         "input"),
    ):  # fmt: skip
        with subtests.test(url=url, fields=list(body)):
            error = check(await client.post(url, json=body), 400, param, "context_length_exceeded")
            words = "This model's maximum context length is 4096 tokens. However, you requested "
            assert error["message"].startswith(words)
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = {"messages": [*HI, *turns], "max_tokens": 5}
    for url in ("/v1/messages", "/v1/messages/count_tokens"):
        error = (await client.post(url, json=body)).json()["error"]
        assert re.fullmatch(r"prompt is too long: 4\d{3} tokens > 4095 maximum", error["message"])


async def test_max_tokens_is_capped_by_the_context(make_http, subtests):
    """Answer with as many tokens as the context has room for; a strict gateway refuses instead."""
    router = FakeRouter(saying("never ending " * 200))
    client, strict = make_http(router), make_http(router, strict_max_tokens=True)
    for url, body, param, prompt in BEYOND:
        with subtests.test(url=url, param=param):
            router.starts.clear()
            reply = await client.post(url, json={"model": "tiny", **body})
            assert reply.status_code == 200, reply.text
            answer, (start,) = reply.json(), router.starts
            usage = answer["usage"]
            left = 512 - len(start.prompt_ids)
            assert usage.get("completion_tokens", usage.get("output_tokens")) == left
            ended = (
                answer["choices"][0]["finish_reason"] if "choices" in answer
                else answer.get("stop_reason") or answer["incomplete_details"]["reason"]
            )  # fmt: skip
            assert ended in ("length", "max_tokens", "max_output_tokens")
            refused = await strict.post(url, json={"model": "tiny", **body})
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            if url == "/v1/messages":
                numbers = f"{512 - left} + 65535 > 512"
                assert f"input length and `max_tokens` exceed context limit: {numbers}" in message
            else:
                check(refused, 400, param, "context_length_exceeded")
                assert f"({512 - left} in the {prompt}, " in message


async def test_minus_one_means_no_token_limit(make_http):
    router = FakeRouter(saying("hello"))
    client = make_http(router)
    for url, body, names in (
        (CHAT, {"messages": HI}, ("max_tokens", "max_completion_tokens", "n_predict")),
        (PLAIN, {"prompt": "a", "max_tokens": None}, ("max_tokens", "n_predict", "num_predict")),
        ("/v1/responses", {"input": "a"}, ("max_output_tokens",)),
    ):
        for name in names:
            reply = await client.post(url, json={"model": "tiny", **body, name: -1})
            assert reply.status_code == 200, reply.text
            assert router.starts[-1].params.max_tokens == 0


async def test_overflow_in_the_wording_of_anthropic(make_http):
    client = make_http(saying("x"))
    for text in ("a b " * 400, " " * 40_000):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5}
        error = (await client.post("/v1/messages", json=body)).json()["error"]
        assert error["type"] == "invalid_request_error"
        found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert found is not None, error
        assert int(found[1]) > int(found[2]) == 511


async def test_an_overflow_reported_by_a_worker_has_the_same_wording(make_http):
    """Use the error as a worker or router makes and sends it."""

    async def play(router: FakeRouter, start: pb.Start) -> Any:
        text = context_exceeded(512, 500, 40, "prompt")
        yield failed(start, pb.CONTEXT_LENGTH_EXCEEDED, text)

    client = make_http(play)
    for stream in (False, True):
        body = {"messages": HI, "max_tokens": 40, "stream": stream}
        error = check(await client.post(CHAT, json=body), 400, code="context_length_exceeded")
        assert "maximum context length is 512 tokens" in error["message"]
        reply = await client.post("/v1/messages", json=body)
        assert reply.status_code == 400
        assert "exceed context limit: 500 + 40 > 512, decrease" in reply.json()["error"]["message"]


async def test_the_whole_context_can_be_used(make_http):
    router = FakeRouter(saying("x"))
    body = {"model": "tiny", "prompt": [1] * 500, "max_tokens": 12}
    assert (await make_http(router).post(PLAIN, json=body)).status_code == 200
    body = {"model": "tiny", "prompt": [1] * 511, "max_tokens": None}
    reply = await make_http(router).post(PLAIN, json=body)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 1


async def test_unknown_routes_and_methods(make_http):
    client = make_http(saying("x"))
    for url in ("/", "/v1", "/v1/nothing", "/redoc", "/docs/other.js"):
        error = check(await client.get(url), 404, code="unknown_url")
        assert error["message"].startswith("unknown URL")
    for url in ("/v1/conversations", "/v1/images/generations", f"{CHAT}/id"):
        error = check(await client.post(url, json={}), 404, code="unknown_url")
        assert error["message"] == f"POST {url} is not offered by this server"
    for method, url in (("POST", "/v1/responses/compact"), ("DELETE", "/v1/models/tiny")):
        error = check(await client.request(method, url, json={}), 404, code="unknown_url")
        assert error["message"] == f"{method} {url} is not offered by this server"
    for url in ("/v1/files", "/v1/files/id", "/v1/batches", "/v1/usage"):
        error = check(await client.post(url, json={}), 400)
        assert "require --database-url" in error["message"]
    for url in (CHAT, f"{CHAT}/"):
        reply = await client.get(url)
        check(reply, 405, code="method_not_allowed")
    assert reply.headers["allow"] == "POST"
    check(await client.delete("/v1/models"), 405, code="method_not_allowed")


NOT_SUPPORTED = [
    ("chat_template", "{{ 1 }}"),
    ("guided_decoding_backend", "outlines"),
    ("guided_whitespace_pattern", " *"),
    ("stop_regex", "(a+)+b"),
]


async def test_unsupported_fields_are_refused(make_http, subtests):
    client = make_http(saying("x"))
    for field, value in NOT_SUPPORTED:
        with subtests.test(field):
            chat = {"model": "tiny", "messages": HI, field: value}
            check(await client.post(CHAT, json=chat), 400, field)
            plain = {"model": "tiny", "prompt": "a", field: value}
            check(await client.post(PLAIN, json=plain), 400, field)


async def test_a_long_field_name_is_cut(make_http):
    client = make_http(saying("x"))
    body = {"model": "tiny", "prompt": "a", "logit_bias": {"A" * 50_000: "x"}}
    reply = await client.post(PLAIN, json=body)
    assert reply.status_code == 400
    assert len(reply.content) < 1000


async def test_keys_are_required_except_for_probes(make_http):
    client = make_http(saying("x"), keys=("secret",), open_metrics=False)
    for method, url in (
        ("POST", CHAT), ("POST", PLAIN), ("GET", "/v1/models"), ("GET", "/v1/models/tiny"),
        ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/metrics"), ("GET", "/nothing"),
        ("GET", "//health"), ("GET", "/metrics/"), ("HEAD", "/v1/models"), ("OPTIONS", CHAT),
    ):  # fmt: skip
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            reply = await client.request(method, url, headers=headers)
            assert reply.status_code == 401
            if method != "HEAD":  # servers send no body for HEAD
                check(reply, 401, code="invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 200
    good = {"authorization": "bearer  secret "}
    assert (await client.get("/v1/models", headers=good)).status_code == 200
    assert (await make_http(saying("x"), keys=("a",)).get("/metrics")).status_code == 200


async def test_request_ids(make_http):
    client = make_http(saying("x"))
    given = {"x-request-id": "abc-123"}
    assert (await client.get("/health", headers=given)).headers["x-request-id"] == "abc-123"
    bad = ["", "a b", "x" * 129, "é", "<script>"]
    for value in bad:
        reply = await client.get("/nothing", headers=[(b"x-request-id", value.encode("latin-1"))])
        assert reply.headers["x-request-id"] not in ("", value)
    first, second = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
    assert first != second
    reply = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
    assert reply.json()["id"] == f"chatcmpl-{reply.headers['x-request-id']}"


async def test_internal_errors_are_not_shown(make_http):
    async def play(router, start):
        raise RuntimeError("secret detail")
        yield

    for stream in (False, True):
        reply = await make_http(play).post(
            CHAT, json={"model": "tiny", "messages": HI, "stream": stream}
        )
        error = check(reply, 500, code="internal")
        assert "secret" not in error["message"]


async def test_no_worker_is_503(make_http):
    router = FakeRouter(saying("x"))
    router.view = None
    reply = await make_http(router).get("/ready")
    check(reply, 503, code="unavailable")
    assert reply.headers["retry-after"]
