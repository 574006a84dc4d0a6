"""Bodies of every POST route, and paths, of a gateway over a router with scripted answers."""

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import httpx
from fakes.router import FakeRouter, saying
from fakes.scripted_parts import MemoryStore
from fakes.scripted_service import scripted_service

from fuzz.mutate import change, mutate
from pdserve.gateway.anthropic import AnthropicApi
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.app import create_app
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.ollama import OllamaApi
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.readiness import Readiness
from pdserve.services.common.tenants import ApiKeys

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
]
MESSAGES = {"model": "tiny", "messages": TURNS, "system": [{"type": "text", "text": "a"}]}
OLLAMA = {
    "model": "tiny",
    "options": {"num_predict": 3, "temperature": 0.5},
    "format": {"type": "object"},
    "think": True,
    "stream": False,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 3},
    "/v1/responses": {
        "model": "tiny",
        "input": ITEMS,
        "tools": [FUNCTION],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]},
        "max_output_tokens": 3,
    },
    "/v1/messages": {
        **MESSAGES,
        "max_tokens": 3,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
    },
    "/v1/responses/input_tokens": {"model": "tiny", "input": ITEMS, "tools": [FUNCTION]},
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/chat/completions/batch": {**CHAT, "messages": [CHAT["messages"], CHAT["messages"]]},
    "/chat/completions": CHAT,
    "/api/chat": {
        **OLLAMA,
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "tool_name": "f", "content": "x"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    "/api/generate": {**OLLAMA, "prompt": "hello", "system": "a"},
    "/api/show": {"model": "tiny"},
    "/apply-template": {"model": "tiny", "messages": CHAT["messages"]},
    "/tokenize": {"model": "tiny", "prompt": "hello"},
    "/detokenize": {"model": "tiny", "tokens": [1, 2, 3]},
}
FIELDS = (
    "stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "echo", "stop", "seed",
    "logit_bias", "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "user", "cache_salt", "suffix",
    "ignore_eos", "min_tokens", "stop_token_ids", "add_special_tokens", "messages", "prompt",
    "tools", "response_format", "tokens", "model", "input", "instructions", "text", "reasoning",
    "include", "metadata", "previous_response_id", "tool_choice", "system", "thinking",
    "stop_sequences", "output_config", "options", "format", "think", "images",
)  # fmt: skip
LIMITS = HttpLimits(1 << 16, 1 << 18, 0.5, 1 << 16, 1.0)


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._open())

    async def _open(self) -> httpx.AsyncClient:
        router = FakeRouter(saying("hello world"))
        service = scripted_service(router)
        bodies = BodyReader(LIMITS)
        apis = [
            AnthropicApi(service, LIMITS, bodies),
            OllamaApi(service, LIMITS, bodies),
            OpenAiApi(service, LIMITS, bodies, MemoryStore()),
        ]
        app = create_app(apis, service, Readiness(router, service.catalog), ApiKeys())
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")

    def case(self, rng: Random) -> str:
        path = rng.choice(list(BODIES))
        body: Any = BODIES[path]
        for _ in range(rng.randint(1, 4)):
            body = change(rng, body, FIELDS)
        try:
            data = json.dumps(body).encode()
        except UnicodeEncodeError:
            data = b"\xff"
        if rng.random() < 0.2:
            data = mutate(rng, data)
        return self._runner.run(self._post(path, data))

    async def _post(self, path: str, data: bytes) -> str:
        headers = {"content-type": "application/json"}
        answer = await self._client.post(path, content=data, headers=headers)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error if path.startswith("/api/") else error["message"]
            assert len(answer.content) < 4096, "the error quotes too much of the input"
        return str(answer.status_code)
