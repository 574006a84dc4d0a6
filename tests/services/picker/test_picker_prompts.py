"""A picker derives the same prompt from a body as the gateway that would send it to a router."""

import asyncio
import json
from itertools import product
from typing import Any

import pytest
from fakes.in_process_text import InProcessPool
from fakes.pooled_answers import embedder
from fakes.router import FakeRouter, saying, served
from fakes.scripted_service import scripted_service

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.anthropic import AnthropicApi
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.app import create_routes, post
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.gateway.model_overrides import ModelOverrides
from pdserve.gateway.ollama import OllamaApi
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.rerank import RerankApi
from pdserve.gateway.service import Records, ServiceOptions
from pdserve.gateway.settings import GatewaySettings
from pdserve.services.common.rate_limits import RateLimits, RateSettings
from pdserve.services.common.tenants import EVERYBODY, ApiKeys, Tenant
from pdserve.services.picker.prompts import PromptReader, PromptService

pytestmark = pytest.mark.anyio
LIMITS = HttpLimits(1 << 20, 1 << 24, 5.0, 1 << 20, 10.0)
TENANT = ApiKeys(["a key"]).tenant("Bearer a key")
assert TENANT is not None
MESSAGES = [{"role": "user", "content": "hello world"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
BODIES = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "n": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "cache_salt": "mine"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "truncate_prompt_tokens": 5}),
    (
        "/v1/chat/completions",
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "well"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            },
        },
    ),
    ("/v1/completions", {"prompt": "hello <|im_end|> world"}),
    ("/v1/completions", {"prompt": [5, 6, 7, 8], "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["hello world", "hello"], "max_tokens": 3}),
    ("/v1/completions", {"prompt": "hello", "add_special_tokens": False}),
    ("/v1/responses", {"input": "hello", "instructions": "be brief"}),
    (
        "/v1/messages",
        {"max_tokens": 9, "system": "be brief", "messages": MESSAGES},
    ),
    ("/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions/batch", {"messages": [MESSAGES]}),
    ("/api/chat", {"messages": MESSAGES, "stream": False}),
    ("/api/generate", {"prompt": "hello", "system": "be brief", "model": "tiny:latest"}),
]


def router() -> FakeRouter:
    card, blobs = served()
    return FakeRouter(saying("hello"), [card], blobs)


def reader(
    of: FakeRouter, kind: type[PromptService] = PromptService, **options: Any
) -> PromptReader:
    service = kind(
        of,
        InProcessPool(),  # type: ignore[arg-type]
        AdmissionLimits(1, 1),
        RateLimits(RateSettings()),
        Records(GatewayMetrics(), asyncio.get_running_loop().time),
        ServiceOptions(1.0, 1.0, GatewaySettings().template_kwargs, **options),
    )
    return PromptReader(service, LIMITS)


async def asked_of_a_router(path: str, body: bytes, tenant: Tenant, **options: Any) -> Any:
    """Return the Start of a gateway's request."""
    upstream = router()
    service = scripted_service(upstream, **options)
    bodies = BodyReader(LIMITS)
    apis = [
        AnthropicApi(service, LIMITS, bodies),
        RerankApi(service, bodies),
        OllamaApi(service, LIMITS, bodies),
        OpenAiApi(service, LIMITS, bodies),
    ]
    routes = create_routes(apis, service, Readiness(upstream, service.catalog))
    reply = await post(routes, path, body, tenant, "")
    assert reply.status == 200, reply.body
    return upstream.starts[0]


async def test_a_prompt_equals_the_gateway_s(subtests: pytest.Subtests) -> None:
    for tenant, (path, fields) in product((EVERYBODY, TENANT), BODIES):
        with subtests.test(tenant=tenant, path=path, fields=fields):
            body = json.dumps({"model": "tiny"} | fields).encode()
            start = await asked_of_a_router(path, body, tenant)
            upstream = router()
            prompt = await reader(upstream).read(path, body, tenant)
            assert prompt is not None
            assert list(prompt.ids) == list(start.prompt_ids)
            assert (prompt.model, prompt.cache_salt) == (start.model, start.cache_salt)
            assert prompt.pooling == start.pooling == ""
            assert upstream.starts == []


async def test_an_embedding_s_pooling() -> None:
    body = json.dumps({"model": "embedder", "input": "hello"}).encode()
    prompt = await reader(embedder()).read("/v1/embeddings", body, EVERYBODY)
    assert prompt is not None
    assert prompt.pooling == "last"


async def test_the_operators_template_and_thinking_count() -> None:
    template = b"[{{ messages[0].content }} {{ enable_thinking }}]"
    options = {"overrides": ModelOverrides(template=template), "thinking": False}
    body = json.dumps({"model": "tiny", "messages": MESSAGES[:1]}).encode()
    start = await asked_of_a_router("/v1/chat/completions", body, EVERYBODY, **options)
    prompt = await reader(router(), **options).read("/v1/chat/completions", body, EVERYBODY)
    assert prompt is not None
    assert list(prompt.ids) == list(start.prompt_ids)
    assert list(prompt.ids) == router().encode(f"[{MESSAGES[0]['content']} False]")


NO_PROMPTS = [
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b'{"model": "tiny", "messages": []}'),
    ("/v1/chat/completions", b'{"model": "none", "messages": [{"role": "user"}]}'),
    (
        "/v1/chat/completions",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": -1}',
    ),
    ("/v1/files", b"{}"),
    (
        "/v1/messages/count_tokens",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]}',
    ),
    ("/elsewhere", b'{"prompt": "x"}'),
    ("/v1/completions", b'{"model": "tiny", "prompt": [1, 2, 99999999]}'),
]


async def test_requests_without_a_prompt(subtests: pytest.Subtests) -> None:
    for path, body in NO_PROMPTS:
        with subtests.test(path=path, body=body):
            assert await reader(router()).read(path, body, EVERYBODY) is None


async def test_prompts_of_concurrent_requests_are_kept_apart() -> None:
    read = reader(router()).read
    bodies = [json.dumps({"model": "tiny", "prompt": "hello " * n}).encode() for n in range(1, 20)]
    found = await asyncio.gather(*(read("/v1/completions", body, EVERYBODY) for body in bodies))
    alone = [await read("/v1/completions", body, EVERYBODY) for body in bodies]
    assert [p.ids for p in found if p] == [p.ids for p in alone if p]
    assert len({len(p.ids) for p in found if p}) == len(bodies)
