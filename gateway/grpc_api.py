"""The gRPC Text service: the REST API's completions for gRPC clients."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import grpc

from pdserve.gateway.caller import Caller
from pdserve.gateway.prepared_completion import Usage
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service
from pdserve.protos.common_pb2 import UNAUTHENTICATED
from pdserve.protos.text_pb2 import ChatRequest, CompleteRequest, TextChunk, TextOptions, TextUsage
from pdserve.protos.text_pb2_grpc import TextServicer as TextBase
from pdserve.services.common.errors import ServiceError, abort
from pdserve.services.common.fairness import FairSemaphore, FairShare
from pdserve.services.common.rpc import AUTHORIZATION, Backpressure, deliver
from pdserve.services.common.tenants import ApiKeys
from pdserve.services.common.tracing import context_of
from pdserve.text import (
    ChatCompletionRequest,
    ClientRequest,
    RequestedSampling,
    TemplateInput,
    TextCompletionRequest,
    ToolUse,
    text_of,
)

SERVICE = "pdserve.v1.Text"
TEXT_METHODS = (f"/{SERVICE}/Chat", f"/{SERVICE}/Complete")

MAX_SALT_BYTES = 256
# Parameters of ids, compiled grammars and scores, which text requests cannot carry.
_NOT_TEXT = {
    "logprobs", "prompt_logprobs", "logprob_token_ids", "bad_words", "grammar", "thinking",
}  # fmt: skip

Context = grpc.aio.ServicerContext[Any, Any]


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that answers UNAUTHENTICATED before a byte of a Text message is read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys
        # A streaming handler: a unary one would first wait for the caller's message.
        self._denial: Any = grpc.stream_stream_rpc_method_handler(_deny)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        if (
            details.method in TEXT_METHODS
            and self._keys.tenant(_authorization_of(details.invocation_metadata)) is None
        ):
            return self._denial
        return await continuation(handler_call_details)


class TextServicer(TextBase):
    def __init__(
        self, service: Service, keys: ApiKeys, backpressure: Backpressure, max_bytes: int
    ) -> None:
        """`max_bytes`: bound on all messages that are being answered."""
        self._service = service
        self._keys = keys
        self._backpressure = backpressure
        self._held = FairShare(max_bytes)
        self._entering = FairSemaphore(1)

    async def Chat(self, request: ChatRequest, context: Context) -> None:
        def build() -> ChatCompletionRequest:
            messages = [{"role": m.role, "content": m.content} for m in request.messages]
            salt = _cache_salt(request.options)
            sampling = _sampling(request.options)
            return ChatCompletionRequest(
                request.model,
                TemplateInput(messages),
                sampling,
                salt,
                tool_use=ToolUse((), "none"),  # a text cannot carry calls
                separate_reasoning=False,
            )

        await self._answer("Text/Chat", build, request.ByteSize(), context)

    async def Complete(self, request: CompleteRequest, context: Context) -> None:
        def build() -> TextCompletionRequest:
            sampling = _sampling(request.options)
            salt = _cache_salt(request.options)
            return TextCompletionRequest(request.model, [request.prompt], sampling, cache_salt=salt)

        await self._answer("Text/Complete", build, request.ByteSize(), context)

    async def _answer(
        self, method: str, build: Callable[[], ClientRequest], num_bytes: int, context: Context
    ) -> None:
        """Run the request that `build` builds from a message of `num_bytes` bytes."""
        try:
            tenant = self._keys.tenant(_authorization_of(context.invocation_metadata()))
            if tenant is None:  # the key was revoked meanwhile
                raise _unauthenticated()
            request_id = f"text-{uuid4().hex}"
            trace = context_of(context.invocation_metadata())
            caller = Caller(
                request_id,
                tenant=tenant,
                received=time.monotonic(),
                trace=trace,
                route=f"gRPC {method}",
            )
            await self._deliver(build, caller, num_bytes, context)
        except ServiceError as error:
            await abort(context, error)

    async def _deliver(
        self, build: Callable[[], ClientRequest], caller: Caller, num_bytes: int, context: Context
    ) -> None:
        owner = caller.tenant.id
        try:
            with self._held.holding(owner, num_bytes, "requests"):
                # One request enters in each pass of the loop, as over HTTP (http/guard.py).
                async with self._entering.turn(owner):
                    await asyncio.sleep(0)
                await deliver(self._run(build(), caller), context.write, self._backpressure)
        finally:
            context.set_trailing_metadata(tuple(caller.headers.items()))

    async def _run(self, request: ClientRequest, caller: Caller) -> AsyncGenerator[TextChunk, None]:
        async with (
            self._service.prepare(request, caller) as completion,
            aclosing(self._service.completions.stream(completion)) as items,
        ):
            async for item in items:
                if isinstance(item, Usage):
                    usage = TextUsage(
                        prompt_tokens=item.prompt_tokens,
                        completion_tokens=item.completion_tokens,
                        cached_tokens=item.cached_tokens,
                        inexact=item.inexact,
                    )
                    yield TextChunk(usage=usage)
                else:
                    yield TextChunk(
                        choice=item.choice,
                        text=text_of(item.content),
                        finish_reason=item.finish or "",
                    )


def _authorization_of(metadata: Any) -> str:
    """Return the value of 'authorization', empty if there is none."""
    return str(dict(metadata or ()).get(AUTHORIZATION, ""))


def _unauthenticated() -> ServiceError:
    return ServiceError(UNAUTHENTICATED, "missing or wrong API key in 'authorization'")


async def _deny(_: Any, context: Context) -> None:
    await abort(context, _unauthenticated())


def _cache_salt(options: TextOptions) -> bytes:
    """Return the cache salt. Raises ServiceError if it is longer than MAX_SALT_BYTES."""
    if len(options.cache_salt) > MAX_SALT_BYTES:
        raise refuse("cache_salt", f"cache_salt may have at most {MAX_SALT_BYTES} bytes")
    return options.cache_salt


def _sampling(options: TextOptions) -> RequestedSampling:
    """Convert fields, whose names are equal on both sides; absent ones take the model's defaults.

    Raises ServiceError for parameters that text requests cannot carry.
    """
    values = {item.name: value for item, value in options.params.ListFields()}
    for name in _NOT_TEXT & values.keys():
        raise refuse(name, f"{name} is not supported in text requests; use Router.Generate")
    if options.HasField("seed"):
        values["seed"] = options.seed
    stop = tuple(filter(None, options.stop))  # an empty one stops nothing
    return RequestedSampling(stop=stop, **values)
