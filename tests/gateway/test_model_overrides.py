"""The operator's chat template, sampling defaults, maximum of max_tokens and thinking default."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.router import FakeRouter, saying, served

from pdserve.gateway.model_overrides import ModelOverrides, read_overrides
from pdserve.gateway.settings import GatewaySettings
from pdserve.protos import common_pb2 as pb
from pdserve.protos.text_pb2 import ChatMessage, ChatRequest, CompleteRequest, TextOptions
from pdserve.protos.text_pb2_grpc import TextStub
from pdserve.text.generation_config import GenerationDefaults

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
OVERRIDE = json.dumps({"temperature": 0.25, "max_new_tokens": 8})


def recommending(**generation: float) -> FakeRouter:
    """Return a router of a model that recommends these defaults."""
    card, blobs = served(generation=generation)
    return FakeRouter(saying("hello"), [card], blobs)


def overrides(**settings: Any) -> ModelOverrides:
    return read_overrides(GatewaySettings(**settings))


def test_the_sources_of_defaults(tmp_path: Path) -> None:
    recommended = GenerationDefaults(temperature=0.6, top_k=20)
    for name in ("auto", ""):
        assert overrides(generation_config=name).defaults(recommended) == recommended
    for name in ("none", "vllm"):
        assert overrides(generation_config=name).defaults(recommended) == GenerationDefaults()
    file = tmp_path / "generation_config.json"
    file.write_text('{"top_k": -1, "max_new_tokens": 64, "eos_token_id": 2, "do_sample": false}')
    for path in (file, tmp_path):
        of_file = overrides(generation_config=str(path))
        assert of_file.defaults(recommended) == GenerationDefaults(top_k=0)
        assert of_file.max_new_tokens == 64
    both = overrides(generation_config=str(file), override_generation_config=OVERRIDE)
    assert both.defaults(recommended) == GenerationDefaults(temperature=0.25, top_k=0)
    assert both.max_new_tokens == 8
    alone = overrides(override_generation_config=OVERRIDE)
    assert alone.defaults(recommended) == GenerationDefaults(temperature=0.25, top_k=20)
    short = overrides(override_generation_config='{"max_tokens": 32}')
    assert short.defaults(recommended) == replace(recommended, max_tokens=32)
    assert short.max_new_tokens is None


def test_settings_that_cannot_work(tmp_path: Path, subtests: pytest.Subtests) -> None:
    files = {
        "list.json": "[]",
        "broken.json": "{",
        "hot.json": '{"temperature": 5}',
        "broken.jinja": "{% if %}",
        "empty.jinja": " \n",
        "long.jinja": "x" * (1 << 20),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.jinja").write_bytes("é".encode("latin-1"))
    inline = "override_generation_config"
    for option, value, reason in (
        (inline, "{", "--override-generation-config: not valid JSON"),
        (inline, "[1]", "--override-generation-config: not a JSON object"),
        (inline, '{"heat": 1}', "unknown name 'heat'; known names: temperature, top_k"),
        (inline, '{"temperature": true}', "temperature must be a number from 0 to 2, not True"),
        (inline, '{"top_k": 0.5}', "top_k must be a whole number "),
        (inline, '{"max_new_tokens": 0}', "max_new_tokens must be a whole number "),
        ("generation_config", "list.json", "list.json: not a JSON object"),
        ("generation_config", "broken.json", "broken.json: not valid JSON"),
        ("generation_config", "hot.json", "temperature must be a number from 0 to 2, not 5"),
        ("generation_config", "absent", "absent: No such file or directory"),
        ("generation_config", ".", "generation_config.json: No such file or directory"),
        ("chat_template", "absent", "absent: No such file or directory"),
        ("chat_template", "broken.jinja", "broken.jinja: "),
        ("chat_template", "empty.jinja", "the chat template is empty"),
        ("chat_template", "long.jinja", "the limit is 262144"),
        ("chat_template", "latin.jinja", "not valid UTF-8"),
    ):
        with subtests.test(option=option, value=value):
            given = value if option == inline else str(tmp_path / value)
            with pytest.raises(ValueError) as caught:
                overrides(**{option: given})
            assert str(caught.value).startswith(f"--{option.replace('_', '-')}")
            assert reason in str(caught.value)


async def test_a_request_wins_over_defaults_but_not_over_the_maximum(make_http, make_channel):
    router = recommending(temperature=0.6, top_k=20)
    settings = overrides(override_generation_config=OVERRIDE)
    client = make_http(router, overrides=settings)
    for fields, temperature, max_tokens in (
        ({}, 0.25, 8),
        ({"temperature": 1.5, "max_tokens": 5}, 1.5, 5),
        ({"max_tokens": 9}, 0.25, 8),
        ({"max_completion_tokens": 400}, 0.25, 8),
    ):
        reply = await client.post(CHAT, json={"model": "tiny", "messages": HI, **fields})
        assert reply.status_code == 200
        params = router.starts[-1].params
        assert (params.temperature, params.top_k) == (temperature, 20)
        assert params.max_tokens == max_tokens
    reply = await client.post(CHAT, json={"model": "tiny", "messages": HI, "min_tokens": 9})
    error = reply.json()["error"]
    assert error["param"] == "min_tokens"
    assert error["message"] == "min_tokens must be at most 8, this server's maximum"
    body = {"model": "tiny", "messages": HI, "min_tokens": 9, "max_tokens": 5}
    reply = await client.post(CHAT, json=body)
    assert reply.json()["error"]["message"] == "min_tokens must be at most max_tokens (5)"
    wide = overrides(override_generation_config='{"max_new_tokens": 9999}')
    strict = make_http(router, overrides=wide, strict_max_tokens=True)
    for fields, status in (({}, 200), ({"max_tokens": 9}, 200), ({"max_tokens": 9000}, 400)):
        reply = await strict.post(CHAT, json={"model": "tiny", "messages": HI, **fields})
        assert reply.status_code == status
    assert "9000 in the completion" in reply.json()["error"]["message"]
    long = {"model": "tiny", "prompt": [1] * 600}
    reply = await strict.post("/v1/completions", json={**long, "max_tokens": 5})
    assert "5 in the completion" in reply.json()["error"]["message"]
    many = [{"role": "user", "content": "hi " * 600}]
    body = {"model": "tiny", "messages": many, "truncate_prompt_tokens": -1}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert len(router.starts[-1].prompt_ids) == 511, "the maximum must not shorten the prompt"
    model = (await client.get("/v1/models/tiny")).json()
    assert model["max_model_len"] == 512
    defaults = {"temperature": 0.25, "top_k": 20, "max_tokens": 8}
    assert model["default_sampling_params"] == defaults
    for one, max_tokens in ((client, 8), (strict, 512)):
        headers = {"anthropic-version": "2023-06-01"}
        info = (await one.get("/v1/models/tiny", headers=headers)).json()
        assert (info["max_input_tokens"], info["max_tokens"]) == (512, max_tokens)
    text = TextStub(await make_channel(router, overrides=settings))
    for given, expected in ((pb.SamplingParams(), 8), (pb.SamplingParams(max_tokens=99), 8)):
        options = TextOptions(params=given)
        messages = [ChatMessage(role="user", content="hi")]
        assert [chunk async for chunk in text.Chat(ChatRequest(messages=messages, options=options))]
        params = router.starts[-1].params
        assert (params.temperature, params.max_tokens) == (0.25, expected)


async def test_the_maximum_holds_for_every_api(make_http, make_channel):
    router = recommending()
    settings = overrides(override_generation_config=OVERRIDE)
    client = make_http(router, overrides=settings)
    completion, responses = {"prompt": "hi"}, {"input": "hi"}
    chat = {"messages": HI}
    for path, fields in (
        (CHAT, {**chat, "stream": True}),
        (CHAT, {**chat, "stream": True, "max_tokens": 99}),
        ("/v1/completions", completion),
        ("/v1/completions", {**completion, "max_tokens": 99, "stream": True}),
        ("/v1/responses", responses),
        ("/v1/responses", {**responses, "max_output_tokens": 99}),
        ("/v1/messages", {**chat, "max_tokens": 99}),
        ("/v1/messages", {**chat, "max_tokens": 99, "stream": True}),
        ("/api/chat", chat),
        ("/api/chat", {**chat, "options": {"num_predict": -1}}),
        ("/api/generate", completion),
        ("/api/generate", {**completion, "options": {"num_predict": -1}, "stream": False}),
    ):
        router.starts.clear()
        reply = await client.post(path, json={"model": "tiny", **fields})
        assert reply.status_code == 200, (path, fields, reply.text)
        assert [start.params.max_tokens for start in router.starts] == [8], (path, fields)
    text = TextStub(await make_channel(router, overrides=settings))
    for params in (pb.SamplingParams(), pb.SamplingParams(max_tokens=99)):
        request = CompleteRequest(prompt="hi", options=TextOptions(params=params))
        assert [chunk async for chunk in text.Complete(request)]
        assert router.starts[-1].params.max_tokens == 8


async def test_every_api_overrides_the_thinking_default(make_http):
    template = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"
    card, blobs = served(template=template)
    router = FakeRouter(saying("hello"), [card], blobs)
    anthropic, ollama = {"messages": HI, "max_tokens": 9}, {"messages": HI, "stream": False}
    for default, path, fields, expected in (
        (True, "/v1/messages", anthropic, "True True "),
        (True, "/v1/messages", {**anthropic, "thinking": {"type": "disabled"}}, "False False "),
        (False, "/v1/responses", {"input": "hi"}, "False False "),
        (
            True,
            "/v1/responses",
            {"input": "hi", "reasoning": {"effort": "none"}},
            "False False none",
        ),
        (False, "/v1/responses", {"input": "hi", "reasoning": {"effort": "high"}}, "  high"),
        (True, "/api/chat", ollama, "True True "),
        (True, "/api/chat", {**ollama, "think": False}, "False False "),
        (False, "/api/chat", {**ollama, "think": True}, "True True "),
    ):
        client = make_http(router, thinking=default)
        reply = await client.post(path, json={"model": "tiny", **fields})
        assert reply.status_code == 200, reply.text
        prompt = list(router.starts[-1].prompt_ids)
        assert prompt == router.encode(expected), (default, path, fields)


async def test_one_template_for_all_models(make_http, tmp_path):
    """Give it to a model without one, too; /props shows it."""
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    settings = overrides(chat_template=str(file))
    with_template, blobs = served("with")
    without = served("without")[0]
    without.ClearField("template_digest")
    router = FakeRouter(saying("hello"), [with_template, without], blobs)
    client = make_http(router, overrides=settings)
    for name in ("with", "without"):
        body = {"model": name, "messages": HI}
        assert (await client.post("/apply-template", json=body)).json() == {"prompt": "[hi]"}
        assert (await client.post(CHAT, json=body)).status_code == 200
        assert list(router.starts[-1].prompt_ids) == router.encode("[hi]")
        props = (await client.get("/props", params={"model": name})).json()
        assert props["chat_template"] == file.read_text()
        assert (await client.get(f"/v1/models/{name}")).json()["capabilities"]["chat"]


async def test_thinking_by_default(make_http):
    template = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"
    card, blobs = served(template=template)
    for default, fields, expected in (
        (None, {}, "  "),
        (True, {}, "True True "),
        (False, {}, "False False "),
        (False, {"enable_thinking": True}, "True True "),
        (True, {"think": False}, "False False "),
        (True, {"chat_template_kwargs": {"enable_thinking": False}}, "False  "),
        (False, {"reasoning_effort": "high"}, "  high"),
    ):
        client = make_http(FakeRouter(saying("hello"), [card], blobs), thinking=default)
        body = {"model": "tiny", "messages": HI, **fields}
        reply = (await client.post("/apply-template", json=body)).json()
        assert reply == {"prompt": expected}, (default, fields)
    closed = make_http(
        FakeRouter(saying("hello"), [card], blobs), thinking=True, template_kwargs=()
    )
    reply = (await closed.post("/apply-template", json={"messages": HI})).json()
    assert reply == {"prompt": "True True "}
