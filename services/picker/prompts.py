"""The prompt of a request's body, made as a gateway makes it: by a gateway's own APIs, template and
tokenizer, over a Service that ends each request once its prompt is known."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from pdserve.gateway.anthropic.dialect import AnthropicDialect
from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.http.app import create_routes
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.dialect import Dialect, HttpError, HttpLimits, dialect_of
from pdserve.gateway.http.inner import post
from pdserve.gateway.observability.readiness import Readiness
from pdserve.gateway.ollama.dialect import OllamaDialect
from pdserve.gateway.openai.dialect import OpenAiDialect
from pdserve.gateway.pooling.runs import PreparedInputs
from pdserve.gateway.prepared_completion import PreparedCompletion
from pdserve.gateway.requests.caller import Caller
from pdserve.gateway.requests.completions import ChatCompletionRequest, TextCompletionRequest
from pdserve.gateway.rerank.dialect import RerankDialect
from pdserve.gateway.service import Service
from pdserve.protos.common_pb2 import CANCELLED
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.tenants.keys import Tenant


@dataclass(frozen=True, slots=True)
class RequestPrompt:
    """The prompt that a router places; the first of several."""

    model: str
    ids: Sequence[int]
    cache_salt: bytes
    tokenizer: str


_found: ContextVar[list[RequestPrompt]] = ContextVar("found")


class PromptService(Service):
    """A Service that runs nothing: a request ends when its prompt is known."""

    @asynccontextmanager
    async def prepare(
        self, asked: ChatCompletionRequest | TextCompletionRequest, caller: Caller
    ) -> AsyncIterator[PreparedCompletion]:
        model = await self.catalog.get(asked.model)
        owner = caller.tenant.id
        if isinstance(asked, ChatCompletionRequest):
            prompt = await self._chat_prompt(asked, model, owner)
        else:
            prompt = (await self._prompts(asked, model, owner))[0]
        raise _end(model, prompt.ids, asked.cache_salt, caller)
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
        raise _end(model, list(inputs[0]), cache_salt, caller)
        yield

    async def count_prompt(self, asked: ChatCompletionRequest, caller: Caller) -> int:
        """Raise ServiceError: counting runs no model, so no cache matters."""
        raise ServiceError(CANCELLED, "it has no prompt to place")


def _end(model: ServedModel, ids: Sequence[int], own_salt: bytes, caller: Caller) -> ServiceError:
    """Record the prompt. Returns the error that ends its request."""
    salt = caller.tenant.cache_salt(own_salt)
    _found.get().append(RequestPrompt(model.card.name, ids, salt, model.card.kv_identity.tokenizer))
    return ServiceError(CANCELLED, "its prompt is known")


class PromptReader:
    """All APIs of a gateway that have prompts."""

    def __init__(self, service: PromptService, limits: HttpLimits) -> None:
        bodies = BodyReader(limits)
        self._dialects: list[Dialect] = [
            AnthropicDialect(service, limits, bodies),
            RerankDialect(service, bodies),
            OllamaDialect(service, limits, bodies),
            OpenAiDialect(service, limits, bodies),
        ]
        self.readiness = Readiness(service.upstream, service.catalog)
        self._routes = create_routes(self._dialects, service, self.readiness)

    async def read(self, path: str, body: bytes, tenant: Tenant) -> RequestPrompt | None:
        """Return the prompt; None if it has none or is invalid, which its gateway will report."""
        found: list[RequestPrompt] = []
        token = _found.set(found)
        try:
            await post(self._routes, path, body, tenant, "")
        finally:
            _found.reset(token)
        return found[0] if found and found[0].ids else None

    def error(self, path: str, error: ServiceError) -> tuple[HttpError, dict[str, object]]:
        """Return an error as the API of the path writes it."""
        told = HttpError.of(error)
        return told, dialect_of(self._dialects, path).error_object(told)
