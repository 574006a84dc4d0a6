"""The Ollama API: bodies as Ollama documents them, over a scripted router."""

import json
import time
from datetime import datetime
from itertools import pairwise
from typing import Any

import httpx
import pytest
from builders.encoder_tokenizers import encoder_tokenizer
from fakes.pooled_answers import embedder
from fakes.router import FakeRouter, failed, placed, saying, served, with_tokenizer
from fakes.scripted_parts import CALLS, ScriptedParts, deltas
from fakes.tool_model import THINKING, ToolModel, calls
from oracles.http_errors import LARGE
from systems.served_gateway import every_kind

from pdserve.gateway.ollama.request_models import OllamaMessage, conversation
from pdserve.protos import common_pb2 as pb
from pdserve.text import TextPart, ToolCallPart

pytestmark = pytest.mark.anyio
HI: list[Any] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": HI}
WHOLE = {"stream": False}
DISABLED = {"type": "disabled"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def lines(reply: httpx.Response) -> list[Any]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text.splitlines()]


async def test_a_chat_is_streamed_as_lines_by_default(make_http):
    router = FakeRouter(saying("hello world", cached=2))
    http = make_http(router)
    found = lines(await http.post("/api/chat", json=BODY))
    assert "".join(one["message"]["content"] for one in found) == "hello world"
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 2
    whole = (await http.post("/api/chat", json={**BODY, **WHOLE})).json()
    assert whole["message"] == {"role": "assistant", "content": "hello world"}
    assert whole.keys() == found[-1].keys()
    prompt = len(router.starts[0].prompt_ids)
    for one in (whole, found[-1]):
        assert (one["model"], one["done"], one["done_reason"]) == ("tiny", True, "stop")
        assert one["prompt_eval_count"] == prompt
        assert one["eval_count"] == len(router.encode("hello world")) + 1
        parts = ("load_duration", "prompt_eval_duration", "eval_duration")
        assert all(isinstance(one[name], int) and one[name] >= 0 for name in parts)
        assert sum(one[name] for name in parts) == pytest.approx(one["total_duration"], abs=3)
        assert 0 < one["total_duration"] < 60e9
        datetime.fromisoformat(one["created_at"])
    stamps = [datetime.fromisoformat(one["created_at"]) for one in found]
    assert all(a <= b for a, b in pairwise(stamps))


async def test_generate_is_a_chat_of_one_message(make_http):
    router = FakeRouter(saying("hello world"))
    http = make_http(router)
    body = {"model": "tiny", "prompt": "hi", "system": "be short"}
    found = lines(await http.post("/api/generate", json=body))
    assert "".join(one["response"] for one in found) == "hello world"
    whole = (await http.post("/api/generate", json={**body, **WHOLE})).json()
    assert (whole["response"], whole["done_reason"]) == ("hello world", "stop")
    assert "message" not in whole
    chat = [{"role": "system", "content": "be short"}, *HI]
    await http.post("/api/chat", json={"model": "tiny", "messages": chat})
    assert len({tuple(start.prompt_ids) for start in router.starts}) == 1


async def test_a_raw_prompt_is_continued_as_text(make_http):
    """Apply no template, and return the text of the answer unparsed."""
    text = "<think>hm</think>" + calls("weather", '{"place": "Rome"}')
    model = ToolModel(text, template=THINKING)
    http = make_http(model)
    raw = {"model": "tiny", "prompt": "hello world", "raw": True, "think": False}
    found = lines(await http.post("/api/generate", json=raw))
    assert "".join(one["response"] for one in found) == text
    whole = (await http.post("/api/generate", json={**raw, **WHOLE, "logprobs": True})).json()
    assert (whole["response"], whole["done_reason"]) == (text, "stop")
    assert "thinking" not in whole
    assert len(whole["logprobs"]) == whole["eval_count"]
    assert whole["prompt_eval_count"] == len(model.starts[0].prompt_ids)
    more = {"options": {"num_predict": 1}, "format": "json"}
    assert (await http.post("/api/generate", json={**raw, **more})).status_code == 200
    assert model.starts[-1].params.max_tokens == 1
    assert model.starts[-1].params.grammar.source
    plain = {"model": "tiny", "prompt": "hello world"}
    await http.post("/v1/completions", json=plain)
    assert len({tuple(start.prompt_ids) for start in model.starts}) == 1
    await http.post("/api/generate", json=plain)
    assert len(model.starts[-1].prompt_ids) > len(model.starts[0].prompt_ids)
    loaded = await http.post("/api/generate", json={"model": "tiny", "raw": True, **WHOLE})
    assert loaded.json()["done_reason"] == "load"


async def test_options_reach_the_engine(make_http):
    router = FakeRouter(saying("hello world hello"))
    http = make_http(router)
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.125, "seed": 3,
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "num_predict": 9, "stop": ["never", "wor"], "num_ctx": 8192, "num_thread": 4,
        "repeat_last_n": -1, "mirostat": 0, "something": "new",
    }  # fmt: skip
    body = {**BODY, "options": options, "keep_alive": "5m", **WHOLE}
    answer = (await http.post("/api/chat", json=body)).json()
    assert (answer["message"]["content"], answer["done_reason"]) == ("hello ", "stop")
    params = router.starts[0].params
    sent = (params.temperature, params.top_k, params.top_p, params.min_p, router.starts[0].seed)
    assert sent == (0.5, 7, 0.75, 0.125, 3)
    assert params.repetition_penalty == 1.5
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert params.max_tokens == 9
    seeds = set()
    for limit in (-1, -2, 0):
        more = {"options": {"num_predict": limit, "seed": -1}}
        await http.post("/api/chat", json={**BODY, **more})
        assert router.starts[-1].params.max_tokens == 0, "the limit must be the rest of the context"
        seeds.add(router.starts[-1].seed)
    assert len(seeds) == 3, "seeds must be random"
    neutral = {"repeat_last_n": 64, "repeat_penalty": 1.0, "presence_penalty": 0.0}
    reply = await http.post("/api/chat", json={**BODY, "options": neutral})
    assert reply.status_code == 200
    assert router.starts[-1].params.penalty_window == 0, "the window must be 0 without a penalty"
    for last, window in ((64, 64), (-1, 0)):
        some = {"repeat_last_n": last, "repeat_penalty": 1.25}
        await http.post("/api/chat", json={**BODY, "options": some})
        params = router.starts[-1].params
        assert (params.repetition_penalty, params.penalty_window) == (1.25, window)
    off = {"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 1.0}
    await http.post("/api/chat", json={**BODY, "options": off})
    params = router.starts[-1].params
    assert (params.repetition_penalty, params.presence_penalty) == (1.0, 0.0)
    cut = await http.post("/api/chat", json={**BODY, **WHOLE, "options": {"num_predict": 1}})
    assert cut.json()["done_reason"] == "length"


async def test_unsupported_fields_are_refused_by_name(make_http, subtests):
    http = make_http(saying("x"))
    chat = {"model": "tiny", "messages": HI}
    prompt = {"model": "tiny", "prompt": "hi"}
    image = {"role": "user", "content": "hi", "images": ["AAAA"]}
    for path, body, name in (
        ("/api/generate", {**prompt, "raw": True, "system": "be short"}, "system"),
        ("/api/generate", {**prompt, "raw": True, "think": True}, "think"),
        ("/api/generate", {**prompt, "suffix": "x"}, "suffix"),
        ("/api/generate", {**prompt, "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {**prompt, "images": ["AAAA"]}, "images"),
        ("/api/generate", {**prompt, "context": [1, 2]}, "context"),
        (
            "/api/chat",
            {**chat, "messages": [image]},
            "messages[0].images: images are not supported by this server",
        ),
        ("/api/generate", {**prompt, "prompt": "long " * 9999}, "prompt"),
        ("/api/chat", {**chat, "max_tokens": 5}, "use options"),
        ("/api/chat", {**chat, "temperature": 0}, "use options"),
        ("/api/chat", {**chat, "reasoning_effort": "none"}, "use think"),
        ("/api/chat", {**chat, "reasoning": {"enabled": False}}, "use think"),
        ("/api/chat", {**chat, "think": True, "thinking": False}, "thinking contradicts think"),
        ("/api/chat", {**chat, "tools": [WEATHER], "tool_choice": "none"}, "tool_choice"),
        ("/api/chat", {**chat, "options": {"xtc_probability": 0.5}}, "options.xtc_probability"),
        ("/api/chat", {**chat, "options": {"max_tokens": 5}}, "use num_predict"),
        ("/api/generate", {**prompt, "raw": True, "enable_thinking": True}, "enable_thinking"),
        ("/api/chat", {**chat, "options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {**chat, "options": {"temperature": "x"}}, "options.temperature"),
        ("/api/chat", {**chat, "options": {"temperature": 9}}, "temperature"),
        ("/api/chat", {**chat, "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ("/api/chat", {**chat, "options": 5}, "options"),
        ("/api/chat", {**chat, "options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ("/api/chat", {**chat, "format": "xml"}, "format"),
        ("/api/chat", {**chat, "think": "a lot"}, "think"),
        ("/api/chat", {**chat, "top_logprobs": 2}, "top_logprobs"),
        ("/api/chat", {**chat, "messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ):
        with subtests.test(f"{path} {name}"):
            reply = await http.post(path, json=body)
            assert reply.status_code == 400, reply.text
            assert reply.json().keys() == {"error"}
            assert name in reply.json()["error"]
    nothing = {
        "raw": False, "suffix": "", "images": [], "context": None, "template": "", "n": 1,
        "tool_choice": "auto", "options": {"dry_multiplier": 0.0, "max_tokens": None},
    }  # fmt: skip
    reply = await http.post("/api/generate", json={**prompt, **nothing, **WHOLE})
    assert reply.json()["response"] == "x"


async def test_format_and_thinking_reach_the_pipeline(make_http):
    parts = ScriptedParts(*[CALLS] * 13)
    http = make_http(parts)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form, found in (
        ("json", ("json_object", None, False)),
        (schema, ("json_schema", schema, True)),
        ("", None),
        (None, None),
    ):
        await http.post("/api/chat", json={**BODY, "format": form})
        structure = parts.requests[-1].sampling.structure
        assert found == (structure and (structure.kind, structure.value, structure.lenient))
    for think, variables in (
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("low", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        (None, {}),
    ):
        await http.post("/api/chat", json={**BODY, "think": think})
        assert parts.requests[-1].conversation.suggested == variables
    off = {"enable_thinking": False, "thinking": False}
    for fields in ({"enable_thinking": False}, {"thinking": False}, {"thinking": DISABLED}):
        await http.post("/api/chat", json={**BODY, **fields})
        assert parts.requests[-1].conversation.suggested == off
    await http.post("/api/chat", json={**BODY, "thinking": {"type": "enabled", "budget_tokens": 7}})
    assert parts.requests[-1].sampling.thinking_budget == 7
    await http.post("/api/chat", json={**BODY, "system": "be short"})
    roles = [turn["role"] for turn in parts.requests[-1].conversation.messages]
    assert roles == ["system", "user"]


async def test_thoughts_and_calls_streamed_and_whole_are_the_same(make_http):
    http = make_http(ScriptedParts(CALLS, CALLS))
    body = {**BODY, "tools": [WEATHER]}
    found = lines(await http.post("/api/chat", json=body))
    whole = (await http.post("/api/chat", json={**body, **WHOLE})).json()
    made = [
        {"id": id_, "function": {"index": n, "name": "weather", "arguments": {"place": place}}}
        for n, (id_, place) in enumerate((("call_a", "Rome"), ("call_b", "Oslo")))
    ]
    assert whole["message"] == {
        "role": "assistant", "content": "Let me see.", "thinking": "I look.", "tool_calls": made,
    }  # fmt: skip
    messages = [one["message"] for one in found]
    assert "".join(one["content"] for one in messages) == "Let me see."
    assert "".join(one.get("thinking", "") for one in messages) == "I look."
    assert [call for one in messages for call in one.get("tool_calls", ())] == made
    assert whole["done_reason"] == found[-1]["done_reason"] == "stop"
    assert whole["eval_count"] == 9


async def test_a_cut_call_has_the_complete_part_of_its_arguments(make_http):
    call = ToolCallPart(0, "call_a", "weather", '{"place": "Rome", "day": ')
    cut = deltas(call, ToolCallPart(0, cut=True), finish="length")
    http = make_http(ScriptedParts(cut))
    answer = (await http.post("/api/chat", json={**BODY, "tools": [WEATHER], **WHOLE})).json()
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == {"place": "Rome"}
    assert answer["done_reason"] == "length"


async def test_a_tool_loop(make_http):
    """Send the answer back unchanged, and without ids, as clients of Ollama do."""
    parts = ScriptedParts(CALLS, *[deltas(TextPart("Warm."))] * 2)
    http = make_http(parts)
    request = {**BODY, "tools": [WEATHER]}
    first = (await http.post("/api/chat", json={**request, **WHOLE})).json()["message"]
    results = [
        {"role": "tool", "tool_name": "weather", "content": "20"},
        {"role": "tool", "content": "no such place"},
    ]
    for named in (True, False):
        turn = json.loads(json.dumps(first))
        for call in turn["tool_calls"]:
            call |= {} if named else {"id": ""}
        body = {**request, "messages": [*HI, turn, *results], **WHOLE}
        answer = await http.post("/api/chat", json=body)
        assert answer.json()["message"]["content"] == "Warm."
        _, assistant, one, two = parts.messages()
        assert (assistant["content"], assistant["reasoning_content"]) == ("Let me see.", "I look.")
        ids = [call["id"] for call in assistant["tool_calls"]]
        assert ids == (["call_a", "call_b"] if named else ["call00000", "call00001"])
        places = [call["function"]["arguments"]["place"] for call in assistant["tool_calls"]]
        assert places == ["Rome", "Oslo"]
        assert (one["tool_call_id"], one["name"], one["content"]) == (ids[0], "weather", "20")
        assert (two["tool_call_id"], two["name"]) == (ids[1], "weather")
    assert [tool.name for tool in parts.requests[0].tool_use.tools] == ["weather"]


def test_results_of_many_calls_take_linear_time() -> None:
    """Every result names a tool without an open call."""
    function = {"function": {"name": "f"}}
    calls_ = {"role": "assistant", "tool_calls": [function] * 128}
    result = {"role": "tool", "tool_name": "g", "content": ""}
    messages = [OllamaMessage.model_validate(calls_)] * 1024
    messages += [OllamaMessage.model_validate(result)] * 2048
    began = time.process_time()
    turns = conversation(messages)
    assert time.process_time() - began < 2
    ids = [call["id"] for turn in turns[:1024] for call in turn["tool_calls"]]
    assert len(set(ids)) == 128 * 1024
    assert [turn["tool_call_id"] for turn in turns[1024:]] == ids[:2048]
    mixed = [
        {"role": "assistant", "tool_calls": [{"function": {"name": name}} for name in "fgf"]},
        *({"role": "tool", "tool_name": name, "content": ""} for name in "gff"),
        {"role": "tool", "content": ""},
    ]
    turns = conversation([OllamaMessage.model_validate(message) for message in mixed])
    ids = [call["id"] for call in turns[0]["tool_calls"]]
    assert [turn.get("tool_call_id") for turn in turns[1:]] == [ids[1], ids[0], ids[2], None]


async def test_a_real_template_and_parser(make_http):
    text = "<think>hm</think>Look: " + calls("weather", '{"place": "Rome"}')
    http = make_http(ToolModel(text, template=THINKING))
    answer = (await http.post("/api/chat", json={**BODY, "tools": [WEATHER], **WHOLE})).json()
    message = answer["message"]
    assert message["thinking"] == "hm"
    assert message["content"].startswith("Look:")
    function = message["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == ("weather", {"place": "Rome"})


async def test_a_last_message_of_the_assistant_is_continued(make_http):
    router = FakeRouter(saying(" world"))
    turns = [*HI, {"role": "assistant", "content": "hello"}]
    await make_http(router).post("/api/chat", json={"model": "tiny", "messages": turns})
    prompt = router.words.decode(router.starts[0].prompt_ids, skip_special_tokens=False)
    assert prompt.endswith("assistant\nhello")


async def test_log_probabilities(make_http):
    http = make_http(saying("hello world"))
    body = {**BODY, "logprobs": True, "top_logprobs": 2}
    found = lines(await http.post("/api/chat", json=body))
    whole = (await http.post("/api/chat", json={**body, **WHOLE})).json()
    streamed = [score for one in found for score in one.get("logprobs", ())]
    assert len(whole["logprobs"]) == whole["eval_count"]
    assert [s["token"] for s in streamed] == [s["token"] for s in whole["logprobs"]]
    assert streamed[0].keys() == {"token", "logprob", "bytes", "top_logprobs"}


async def test_model_names_may_have_a_tag(make_http):
    tagged, blobs = served("tiny:latest")
    plain, _ = served("other")
    router = FakeRouter(saying("x"), [tagged, plain], blobs)
    http = make_http(router)
    for name, model in (
        ("tiny:latest", "tiny:latest"), ("other:latest", "other"), ("other", "other"),
    ):  # fmt: skip
        reply = await http.post("/api/chat", json={"model": name, "messages": HI, **WHOLE})
        assert reply.json()["model"] == model
        assert router.starts[-1].model == model
        assert (await http.post("/api/show", json={"model": name})).status_code == 200
        assert (await http.post("/api/show", json={"name": name})).status_code == 200
    for path, body in (
        ("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "a"}), ("/api/show", {}),
        ("/api/chat", {"messages": HI, "stream": False}), ("/api/embed", {"input": "a"}),
        ("/api/embeddings", {"prompt": "a"}), ("/api/chat", {}), ("/api/embed", {"input": []}),
    ):  # fmt: skip
        reply = await http.post(path, json={"model": "none:latest", **body})
        assert reply.status_code == 404, (path, reply.text)
        assert "none" in reply.json()["error"]


async def test_aliases_with_a_tag(make_http):
    names = ("tiny", "two")
    router = FakeRouter(saying("x"), [served(name)[0] for name in names], served()[1])
    http = make_http(router, aliases=("a=tiny", "b:latest=two", "two:latest=tiny"))
    for name, model in (
        ("a", "tiny"), ("a:latest", "tiny"), ("b:latest", "two"), ("two:latest", "tiny"),
        ("tiny:latest", "tiny"),
    ):  # fmt: skip
        reply = await http.post("/api/chat", json={"model": name, "messages": HI, **WHOLE})
        assert reply.json()["model"] == model
        assert (await http.post("/api/show", json={"model": name})).status_code == 200
    assert (await http.post("/api/show", json={"model": "b"})).status_code == 404
    openai = await http.post("/v1/chat/completions", json={"model": "a:latest", "messages": HI})
    assert openai.status_code == 404


async def test_a_missing_name_means_the_only_model(make_http):
    http = make_http(saying("x"))
    for model in ({}, {"model": ""}, {"model": None}):
        for path, body in (
            ("/api/chat", {"messages": HI}), ("/api/chat", {}), ("/api/generate", {"prompt": "a"}),
            ("/api/show", {}),
        ):  # fmt: skip
            reply = await http.post(path, json={**model, **body, **WHOLE})
            assert reply.status_code == 200, reply.text
    several = make_http(every_kind())
    reply = await several.post("/api/chat", json={"messages": HI})
    assert (reply.status_code, "embedder" in reply.json()["error"]) == (400, True)


async def test_a_request_without_a_prompt_loads_the_model(make_http):
    router = FakeRouter(saying("x"))
    http = make_http(router)
    for path, body in (
        ("/api/chat", {}),
        ("/api/chat", {"messages": [], "keep_alive": 0}),
        ("/api/generate", {}),
        ("/api/generate", {"prompt": "", "keep_alive": "10m"}),
    ):
        answer = (await http.post(path, json={"model": "tiny", **body})).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert answer.get("response", answer.get("message", {}).get("content")) == ""
    assert router.starts == []


async def test_model_lists(make_http):
    router = every_kind()
    http = make_http(router)
    tags = (await http.get("/api/tags")).json()["models"]
    assert [one["name"] for one in tags] == ["embedder", "reranker", "tiny"]
    card = router.cards[0]
    (tiny,) = (one for one in tags if one["name"] == "tiny")
    assert (tiny["size"], tiny["digest"]) == (card.weights_bytes, card.kv_identity.weights)
    assert tiny["details"]["family"] == card.architecture
    assert tiny["details"]["quantization_level"] == card.kv_identity.quantization
    assert datetime.fromisoformat(tiny["modified_at"]).timestamp() == card.created
    running = (await http.get("/api/ps")).json()["models"]
    assert [one["context_length"] for one in running if one["name"] == "tiny"] == [card.context_len]
    shown = (await http.post("/api/show", json={"model": "tiny"})).json()
    assert shown["template"].encode() == router.blobs[card.template_digest]
    assert shown["capabilities"] == ["completion", "tools"]
    info = shown["model_info"]
    assert info["general.architecture"] == card.architecture
    assert info[f"{card.architecture}.context_length"] == card.context_len
    shown = (await http.post("/api/show", json={"model": "embedder"})).json()
    assert shown["capabilities"] == ["embedding"]
    version = (await http.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "editors require at least 0.6.4"


async def test_recommended_parameters_of_a_model(make_http):
    recommended = {"temperature": 0.5, "repetition_penalty": 1.25, "max_tokens": 9}
    card, blobs = served(generation=recommended)
    http = make_http(FakeRouter(saying("x"), [card], blobs))
    shown = (await http.post("/api/show", json={"model": "tiny"})).json()
    parameters = ["temperature 0.5", "repeat_penalty 1.25", "num_predict 9"]
    assert shown["parameters"].splitlines() == parameters
    settings = (await http.get("/props")).json()["default_generation_settings"]
    assert settings["params"] == {"temperature": 0.5, "repeat_penalty": 1.25, "n_predict": 9}


async def test_embeddings(make_http):
    http = make_http(every_kind(), bounds=LARGE)
    openai = {"model": "embedder", "input": ["a", "b"]}
    plain = (await http.post("/v1/embeddings", json=openai)).json()
    answer = (await http.post("/api/embed", json=openai)).json()
    vectors = [one["embedding"] for one in plain["data"]]
    assert answer["embeddings"] == [pytest.approx(vector, abs=1e-6) for vector in vectors]
    assert answer["prompt_eval_count"] == plain["usage"]["prompt_tokens"]
    assert answer["total_duration"] >= answer["load_duration"] >= 0
    short = (await http.post("/api/embed", json={**openai, "input": "a", "dimensions": 2})).json()
    (vector,) = short["embeddings"]
    assert sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-6)
    one = (await http.post("/api/embeddings", json={"model": "embedder", "prompt": "a"})).json()
    assert one == {"embedding": pytest.approx(vectors[0], abs=1e-6)}
    for more in ({"input": []}, {"input": ""}, {"input": None}, {}):
        empty = await http.post("/api/embed", json={"model": "embedder", **more})
        assert empty.json() == {"model": "embedder", "embeddings": []}
    empty = await http.post("/api/embeddings", json={"model": "embedder"})
    assert empty.json() == {"embedding": []}
    wrong = await http.post("/api/embed", json={"model": "tiny", "input": "a"})
    assert wrong.status_code == 400


async def test_a_long_text_is_truncated_unless_refused(make_http):
    router = every_kind()
    http = make_http(router, bounds=LARGE)
    context = router.cards[1].context_len
    text = "a b " * context
    body = {"model": "embedder", "input": text}
    assert (await http.post("/api/embed", json=body)).status_code == 200
    ids = list(router.starts[-1].prompt_ids)
    assert ids == router.encode(text)[:context]
    assert (await http.post("/api/embeddings", json={**body, "prompt": text})).status_code == 200
    assert list(router.starts[-1].prompt_ids) == ids
    refused = await http.post("/api/embed", json={**body, "truncate": False})
    assert refused.status_code == 400
    assert "context" in refused.json()["error"]


async def test_a_truncated_text_keeps_the_tokens_around_it(make_http, subtests):
    text = "what is it, " * 100
    for arch in ("bert", "xlm_roberta", "modernbert"):
        with subtests.test(arch):
            library = encoder_tokenizer(arch)
            library.no_padding()
            library.enable_truncation(200)
            router = embedder(context_len=200)
            with_tokenizer(router.cards[0], router.blobs, library.to_str().encode(), ())
            body = {"model": "embedder", "input": text}
            reply = await make_http(router).post("/api/embed", json=body)
            assert reply.status_code == 200, reply.text
            assert list(router.starts[0].prompt_ids) == library.encode(text).ids


async def test_errors(make_http):
    async def play(router: FakeRouter, start: pb.Start) -> Any:
        yield placed(start)
        yield failed(start, pb.OVERLOADED, "later")

    http = make_http(play)
    reply = await http.post("/api/chat", json=BODY)
    assert reply.json() == {"error": "later"}
    assert reply.status_code == 429
    http = make_http(saying("x"), keys=("right",))
    for method, path in (
        ("POST", "/api/chat"), ("POST", "/api/generate"), ("GET", "/api/tags"), ("GET", "/api/ps"),
        ("POST", "/api/show"), ("GET", "/api/version"), ("POST", "/api/embed"),
        ("POST", "/api/embeddings"),
    ):  # fmt: skip
        reply = await http.request(method, path, json=BODY)
        assert (reply.status_code, reply.json().keys()) == (401, {"error"})
    key = {"authorization": "Bearer right"}
    assert (await http.get("/api/tags", headers=key)).status_code == 200
    reply = await http.post("/api/pull", json={"model": "tiny"}, headers=key)
    assert (reply.status_code, reply.json().keys()) == (404, {"error"})
    assert "not offered" in reply.json()["error"]


async def test_a_stream_that_fails_ends_with_an_error_line(make_http):
    parts = ScriptedParts([*deltas(TextPart("hello"))[:1], RuntimeError("secret")])
    found = lines(await make_http(parts).post("/api/chat", json=BODY))
    assert found[0]["message"]["content"] == "hello"
    assert found[-1].keys() == {"error"}
    assert "secret" not in found[-1]["error"]


async def test_lenient_tool_fields(make_http, subtests):
    """Accept a tool without a type, and arguments that are text, null, absent or invalid JSON."""
    router = ToolModel("warm")
    http = make_http(router)
    tool = {"function": WEATHER["function"]}
    for given, shown in (
        ({"arguments": '{"place": "Rome"}'}, '{"place": "Rome"}'),
        ({"arguments": None}, "{}"),
        ({}, "{}"),
        ({"arguments": "{'place'"}, "\"{'place'\""),
    ):
        call = {"function": {"name": "weather", **given}}
        turns = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
        with subtests.test(given=given):
            reply = await http.post("/api/chat", json={**BODY, "messages": turns, "tools": [tool]})
            assert lines(reply)[-1]["done"]
            prompt = router.prompt(-1)
            assert prompt.startswith("tools: weather")
            assert f'"arguments": {shown}' in prompt
