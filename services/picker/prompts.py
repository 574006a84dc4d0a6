"""Finds the prompt in a request's body with a gateway's own APIs, template and tokenizer, over a
Service that ends each request once its prompt is known."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from pdserve.gateway.anthropic import AnthropicApi
from pdserve.gateway.caller import Caller
from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.http.api import HttpApi, HttpError, HttpLimits, api_of
from pdserve.gateway.http.app import create_routes, post
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.ollama import OllamaApi
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.pooling import PreparedInputs
from pdserve.gateway.prepared_completion import PreparedCompletion
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.rerank import RerankApi
from pdserve.gateway.service import Service
from pdserve.protos.common_pb2 import CANCELLED
from pdserve.services.common.capabilities import pooling_of
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.tenants import Tenant
from pdserve.text import ChatCompletionRequest, TextCompletionRequest


@dataclass(frozen=True, slots=True)
class RequestPrompt:
    """The first prompt of a request, which a router places."""

    model: str
    ids: Sequence[int]
    cache_salt: bytes
    tokenizer: str
    pooling: str  # as in Start


_recorded_prompts: ContextVar[list[RequestPrompt]] = ContextVar("recorded_prompts")


class PromptService(Service):
    """A Service that runs no request: each ends with an error once its first prompt is known."""

    @asynccontextmanager
    async def prepare(
        self, request: ChatCompletionRequest | TextCompletionRequest, caller: Caller
    ) -> AsyncIterator[PreparedCompletion]:
        model = await self.catalog.get(request.model)
        self.check_request(request, model)
        if isinstance(request, TextCompletionRequest):
            request = replace(request, prompts=request.prompts[:1])
        (prompt,) = await self.prompt_tokens(request, model, caller.tenant.id)
        raise _end(model, prompt.ids, request.cache_salt, "", caller)
        yield

    @asynccontextmanager
    async def prepare_inputs(
        self,
        operation: str,
        model_name: str,
        tokenized: Callable[[ServedModel], Awaitable[Sequence[Collection[int]]]],
        cache_salt: bytes,
        priority: int,
        caller: Caller,
    ) -> AsyncIterator[PreparedInputs]:
        model = await self.catalog.get(model_name)
        inputs = await tokenized(model)
        raise _end(model, list(inputs[0]), cache_salt, pooling_of(model.card), caller)
        yield

    async def count_prompt(self, request: ChatCompletionRequest, caller: Caller) -> int:
        """Raise ServiceError: counting runs no model, so no cache matters."""
        raise ServiceError(CANCELLED, "the request only counts tokens, so it needs no worker")


def _end(
    model: ServedModel, ids: Sequence[int], client_salt: bytes, pooling: str, caller: Caller
) -> ServiceError:
    """Record the prompt. Returns the error that ends its request."""
    salt = caller.tenant.cache_salt(client_salt)
    _recorded_prompts.get().append(
        RequestPrompt(model.card.name, ids, salt, model.card.kv_identity.tokenizer, pooling)
    )
    return ServiceError(CANCELLED, "the prompt is known; the request is not run")


class PromptReader:
    """Finds the prompt in a request of any API of a gateway."""

    def __init__(self, service: PromptService, limits: HttpLimits) -> None:
        bodies = BodyReader(limits)
        self._apis: list[HttpApi] = [
            AnthropicApi(service, limits, bodies),
            RerankApi(service, bodies),
            OllamaApi(service, limits, bodies),
            OpenAiApi(service, limits, bodies),
        ]
        self.readiness = Readiness(service.upstream, service.catalog)
        self._routes = create_routes(self._apis, service, self.readiness)

    async def read(self, path: str, body: bytes, tenant: Tenant) -> RequestPrompt | None:
        """Return the prompt; None if the request has none or is invalid, which its gateway will
        report."""
        prompts: list[RequestPrompt] = []
        token = _recorded_prompts.set(prompts)
        try:
            await post(self._routes, path, body, tenant, "")
        finally:
            _recorded_prompts.reset(token)
        return prompts[0] if prompts and prompts[0].ids else None

    def error(self, path: str, error: ServiceError) -> tuple[HttpError, dict[str, object]]:
        """Return an error as the API of the path writes it."""
        http_error = HttpError.of(error)
        return http_error, api_of(self._apis, path).error_object(http_error)
