"""/tokenize, /detokenize, /health, /ready and /metrics."""

import asyncio
from importlib.metadata import version
from typing import Any

import pytest
from fakes.router import FakeRouter, saying, served
from fakes.tool_model import THINKING
from oracles.http_errors import check
from prometheus_client.parser import text_string_to_metric_families

from pdserve.gateway import model_texts
from pdserve.gateway.openai import capabilities
from pdserve.text import ParserChoice

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]


async def test_tokenize_and_back(make_http):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    request = {"model": "tiny", "prompt": "hello world", "return_token_strs": True}
    body = (await client.post("/tokenize", json=request)).json()
    assert body["tokens"] == router.encode("hello world")
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 512
    assert "".join(body["token_strs"]) == "hello\u0120world"  # as the vocabulary writes them
    reply = await client.post("/detokenize", json={"model": "tiny", "tokens": body["tokens"]})
    assert reply.json() == {"prompt": "hello world"}


async def test_tokenize_messages_as_chat_does(make_http):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    await client.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
    body = (await client.post("/tokenize", json={"messages": HI})).json()
    assert body["tokens"] == list(router.starts[0].prompt_ids)
    assert router.starts[0].tokenizer == router.cards[0].kv_identity.tokenizer != ""
    closed = {"model": "tiny", "messages": HI, "add_generation_prompt": False}
    assert (await client.post("/tokenize", json=closed)).json()["count"] < body["count"]


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
async def test_invalid_bodies_are_refused(make_http, url, body, param):
    reply = await make_http(saying("x")).post(url, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_the_version(make_http):
    about = (await make_http(saying("x")).get("/version")).json()
    assert about["version"] == version("pdserve")
    assert about["python"].startswith("3.")
    assert about["platform"].islower()


COMPLETES = {"completion": True, "embeddings": False, "score": False}
DEFAULTS = {"temperature": 0.2, "top_p": 0.9}
NO_CHAT = {"chat": False, "tools": False, "reasoning": False}


async def test_models_list_their_capabilities(make_http):
    (chat, blobs), text = served("chat", generation=DEFAULTS), served("text")[0]
    text.ClearField("template_digest")
    names = ("thinks", "embeds", "judges", "ranks")
    thinks, embeds, judges, ranks = (served(name)[0] for name in names)
    thinks.template_digest = "thinks"
    embeds.pooling = "last"
    judges.score_token_ids.extend((1, 2))
    ranks.scores_pairs = True
    both = served("both")[0]
    both.ClearField("template_digest")
    both.pool = "mean"
    router = FakeRouter(saying("x"), [chat, text, thinks, embeds, judges, ranks, both])
    router.blobs |= blobs
    router.blobs["thinks"] = THINKING.encode()
    client = make_http(router)

    async def listed() -> dict[str, Any]:
        data = (await client.get("/v1/models")).json()["data"]
        for model in data:
            assert (await client.get(f"/v1/models/{model['id']}")).json() == model
        return {model["id"]: model for model in data}

    unknown = {"tools": True, "reasoning": None, "structured_output": True}
    chat_model = (await listed())["chat"]
    assert chat_model["capabilities"] == {**COMPLETES, "chat": True, **unknown}
    assert chat_model["default_sampling_params"] is None
    for name in ("chat", "thinks"):
        await client.post("/tokenize", json={"model": name, "prompt": "x"})
    await client.post("/tokenize", json={"model": "text", "prompt": "x"})
    models = await listed()
    assert models["chat"]["default_sampling_params"] == DEFAULTS
    assert {name: model["capabilities"] for name, model in models.items()} == {
        "chat": {
            **COMPLETES, "chat": True, "tools": True, "reasoning": False,
            "structured_output": True,
        },
        "text": {**COMPLETES, **NO_CHAT, "structured_output": True},
        "both": {
            "completion": True, **NO_CHAT, "structured_output": True,
            "embeddings": True, "score": True,
        },
        "thinks": {
            **COMPLETES, "chat": True, "tools": True, "reasoning": True, "structured_output": True
        },
        **{
            name: {
                "completion": False, **NO_CHAT, "structured_output": False,
                "embeddings": name == "embeds", "score": True,
            }
            for name in names[1:]
        },
    }  # fmt: skip
    assert models["chat"]["max_model_len"] == chat.context_len


async def test_a_model_without_call_parser_has_no_tools(make_service):
    router = FakeRouter(saying("x"))
    router.blobs[router.cards[0].template_digest] = THINKING.encode()
    service = make_service(router, parsers=ParserChoice("none", "none"))
    await service.catalog.get("tiny")
    found = capabilities(service, router.cards[0])
    assert (found["chat"], found["tools"], found["reasoning"]) == (True, False, False)


async def test_ready_needs_a_live_decode_worker(make_http):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for path in ("/ready", "/health/ready"):
        assert (await client.get(path)).json() == {"status": "ready", "models": ["tiny"]}
    router.view.workers[0].state = "suspect"
    for path in ("/ready", "/health/ready"):
        assert (await client.get(path)).status_code == 503
    for path in ("/health", "/health/live"):
        assert (await client.get(path)).json() == {"status": "ok"}


async def test_metrics(make_http):
    router = FakeRouter(saying("hello world"))
    client = make_http(router)
    for stream in (False, True):
        await client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": HI, "stream": stream}
        )
    await client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": HI, "max_tokens": 1}
    )
    await client.post("/v1/chat/completions", json={"messages": HI, "model": "other"})
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families((await client.get("/metrics")).text)
        for sample in family.samples
    }
    said = len(router.encode("hello world")) + 1
    assert values["vllm:generation_tokens_total", "tiny"] == 2 * said + 1
    assert values["vllm:prompt_tokens_total", "tiny"] == 3 * len(router.starts[0].prompt_ids)
    assert values["vllm:time_to_first_token_seconds_count", "tiny"] == 3
    assert values["vllm:inter_token_latency_seconds_count", "tiny"] == 2 * (said - 1)
    assert values["vllm:e2e_request_latency_seconds_count", "tiny"] == 3
    assert values["vllm:request_decode_time_seconds_count", "tiny"] == 3
    assert (
        values["vllm:request_prompt_tokens_sum", "tiny"]
        == values["vllm:prompt_tokens_total", "tiny"]
    )
    assert values["vllm:request_generation_tokens_sum", "tiny"] == 2 * said + 1
    assert values["vllm:request_success_total", "stop", "tiny"] == 2
    assert values["vllm:request_success_total", "length", "tiny"] == 1
    assert values["pdserve_request_failures_total", "MODEL_NOT_FOUND"] == 1
    worker = ("127.0.0.1:1", "decode", "tiny")
    assert values["vllm:num_requests_running", *worker] == 3
    assert values["vllm:num_requests_waiting", *worker] == 2
    assert values["vllm:kv_cache_usage_perc", *worker] == 0.4
    assert values["vllm:cache_config_info", "10", *sorted((*worker, "16"))] == 1
    assert values["vllm:num_preemptions_total", *worker] == 5
    assert values["vllm:prefix_cache_queries_total", *worker] == 100
    assert values["vllm:prefix_cache_hits_total", *worker] == 60
    blocks = {
        state: values["pdserve_kv_blocks", "127.0.0.1:1", state]
        for state in ("free", "used", "cached", "reserved", "total")
    }
    assert blocks == {"free": 4, "used": 3, "cached": 2, "reserved": 1, "total": 10}
    assert values["pdserve_prefill_requests_total", "local"] == 11
    assert values["pdserve_prefill_requests_total", "remote"] == 4
    assert values["pdserve_transfer_bytes_total", "127.0.0.1:1", "tcp"] == 1000
    assert values["pdserve_transfer_seconds_total", "127.0.0.1:1", "tcp"] == 0.5
    assert values["pdserve_transfer_frames_total", "127.0.0.1:1", "tcp"] == 7
    assert values["pdserve_transfer_frames_refused_total", "127.0.0.1:1", "tcp"] == 1
    assert values["pdserve_gateway_requests", "open"] == 0


async def test_metrics_of_several_gateways_leave_the_fleet_out(make_http):
    client = make_http(saying("x"))
    whole = (await client.get("/metrics", params={"fleet": "true"})).text
    own = (await client.get("/metrics", params={"fleet": "false"})).text
    assert (await client.get("/metrics")).text == whole
    assert whole.startswith(own)
    assert 'pdserve_gateway_requests{state="open"}' in own
    assert "worker=" not in own
    assert "vllm:num_requests_running" not in own
    check(await client.get("/metrics", params={"fleet": "no"}), 400, "fleet")
    scraped = make_http(saying("x"), fleet_metrics=False)
    assert "worker=" not in (await scraped.get("/metrics")).text
    request = (await scraped.get("/metrics", params={"fleet": "true"})).text
    assert "vllm:num_requests_running" in request


async def test_metrics_without_a_router(make_http):
    router = FakeRouter(saying("x"))
    router.view = None
    assert (await make_http(router).get("/metrics")).status_code == 200


async def test_long_id_lists_do_not_block_the_loop(make_service, monkeypatch):
    """Owners take turns, and other work runs between two parts of one list."""
    monkeypatch.setattr(model_texts, "IDS_AT_ONCE", 4)
    router = FakeRouter(saying("x"))
    service = make_service(router)
    model = await service.catalog.get("tiny")
    ids = router.encode("hello world " * 40)
    passes, ended = 0, []

    async def others():
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    async def decode(owner: bytes):
        text = await service.texts.decode(model, ids, "tokens", owner, skip_special=True)
        ended.append(owner)
        return text

    async with asyncio.TaskGroup() as group:
        other_work = group.create_task(others())
        decoding = [group.create_task(decode(owner)) for owner in (b"a", b"a", b"a", b"b")]
        texts = await asyncio.gather(*decoding)
        other_work.cancel()
    assert texts == [model.text.vocabulary.decode(ids)] * 4
    assert ended == [b"a", b"a", b"b", b"a"], "the last list of a must wait for b"
    assert passes >= 4 * len(ids) // 4


async def test_head_and_trailing_slashes(make_http):
    client = make_http(saying("x"))
    for url in ("/health", "/ready", "/v1/models", "/v1/models/tiny", "/metrics"):
        reply = await client.get(url)
        assert reply.status_code == 200
        assert (await client.get(f"{url}/")).status_code == 200
        head = await client.head(url)
        assert head.status_code == 200
        assert head.headers["content-type"] == reply.headers["content-type"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    assert (await client.post("/v1/chat/completions/", json=body)).status_code == 200


async def test_a_compressed_body_is_refused(make_http):
    client = make_http(saying("x"))
    for coding, status in (("gzip", 415), ("br", 415), ("identity", 200)):
        headers = {"content-type": "application/json", "content-encoding": coding}
        reply = await client.post("/tokenize", content=b'{"prompt": "a"}', headers=headers)
        assert reply.status_code == status, reply.text


async def test_tokenize_accepts_the_body_of_a_chat(make_http):
    client = make_http(saying("x"))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    plain = (await client.post("/tokenize", json=body)).json()
    more = {
        "max_completion_tokens": 5,
        "top_logprobs": 1,
        "response_format": {"type": "json_object"},
    }
    assert (await client.post("/tokenize", json={**body, **more})).json() == plain
    for name, value, param in (
        ("tools", [{}], "tools[0].type"),
        ("add_special_tokens", True, "add_special_tokens"),
        ("chat_template", "x", "chat_template"),
    ):
        check(await client.post("/tokenize", json={**body, name: value}), 400, param)


@pytest.mark.parametrize("name", ["truncate_prompt_tokens", "truncate", "prompt_truncate_len"])
async def test_tokenize_refuses_truncation(make_http, name):
    client = make_http(saying("x"))
    for body in ({"prompt": "hello world"}, {"messages": HI}):
        request = {"model": "tiny", **body}
        error = check(await client.post("/tokenize", json={**request, name: 1}), 400, name)
        assert error["message"].startswith(f"{name} is not ")
        assert (await client.post("/tokenize", json={**request, name: None})).status_code == 200
