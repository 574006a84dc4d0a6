"""The gRPC Text service: what the REST API does, for gRPC clients."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import grpc

from pdserve.gateway.caller import Caller
from pdserve.gateway.choice import text_of
from pdserve.gateway.completion import Usage
from pdserve.gateway.sampling import RequestedSampling, refuse
from pdserve.gateway.service import ChatCompletionRequest, Service, TextCompletionRequest
from pdserve.protos.common_pb2 import UNAUTHENTICATED
from pdserve.protos.text_pb2 import ChatRequest, CompleteRequest, TextChunk, TextOptions, TextUsage
from pdserve.protos.text_pb2_grpc import TextServicer as TextBase
from pdserve.services.host.errors import ServiceError, abort
from pdserve.services.host.rpc.backpressure import Backpressure, deliver
from pdserve.services.host.tenants.keys import ApiKeys, Tenant
from pdserve.services.host.tenants.turns import FairTurns

SERVICE = "pdserve.v1.Text"
TEXT_METHODS = (f"/{SERVICE}/Chat", f"/{SERVICE}/Complete")

MAX_SALT_BYTES = 256

Context = grpc.aio.ServicerContext[Any, Any]


class TextServicer(TextBase):
    def __init__(self, service: Service, keys: ApiKeys, backpressure: Backpressure) -> None:
        self._service = service
        self._keys = keys
        self._backpressure = backpressure
        self._entering = FairTurns(1)

    async def Chat(self, request: ChatRequest, context: Context) -> None:
        try:
            tenant = await self._enter(context)
            messages = [{"role": m.role, "content": m.content} for m in request.messages]
            salt = _cache_salt(request.options)
            asked = ChatCompletionRequest(request.model, messages, _sampling(request.options), salt)
            await deliver(self._run(asked, tenant), context.write, self._backpressure)
        except ServiceError as error:
            await abort(context, error)

    async def Complete(self, request: CompleteRequest, context: Context) -> None:
        try:
            tenant = await self._enter(context)
            sampling = _sampling(request.options)
            salt = _cache_salt(request.options)
            asked = TextCompletionRequest(
                request.model, [request.prompt], sampling, cache_salt=salt
            )
            await deliver(self._run(asked, tenant), context.write, self._backpressure)
        except ServiceError as error:
            await abort(context, error)

    def _tenant(self, context: Context) -> Tenant:
        metadata = dict(context.invocation_metadata() or ())
        given = metadata.get("authorization", "")
        tenant = self._keys.tenant(given if isinstance(given, str) else "")
        if tenant is None:
            raise ServiceError(UNAUTHENTICATED, "missing or wrong API key in 'authorization'")
        return tenant

    async def _enter(self, context: Context) -> Tenant:
        """Whose call it is; one enters in each pass of the loop, as over HTTP (http/guard.py)."""
        tenant = self._tenant(context)
        async with self._entering.turn(tenant.id):
            await asyncio.sleep(0)
        return tenant

    async def _run(
        self, asked: ChatCompletionRequest | TextCompletionRequest, tenant: Tenant
    ) -> AsyncGenerator[TextChunk, None]:
        caller = Caller(f"text-{uuid4().hex}", tenant=tenant)
        async with (
            self._service.prepare(asked, caller) as completion,
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


def _cache_salt(options: TextOptions) -> bytes:
    """Raises ServiceError for a long one."""
    if len(options.cache_salt) > MAX_SALT_BYTES:
        raise refuse("cache_salt", f"cache_salt: at most {MAX_SALT_BYTES} bytes")
    return options.cache_salt


def _sampling(options: TextOptions) -> RequestedSampling:
    """Fields have the same names on both sides; absent ones take the model's defaults.

    Raises ServiceError for parameters that text has no place for.
    """
    params = options.params
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            raise refuse(name, f"{name} is not part of text answers; use Router.Generate")
    given = {field.name: value for field, value in params.ListFields()}
    if params.logit_bias:
        given["logit_bias"] = dict(params.logit_bias)
    if params.stop_token_ids:
        given["stop_token_ids"] = tuple(params.stop_token_ids)
    if options.HasField("seed"):
        given["seed"] = options.seed
    return RequestedSampling(stop=tuple(options.stop), **given)
