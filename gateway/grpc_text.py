"""The gRPC Text service: what the REST API does, for gRPC clients."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import grpc

from pdserve.gateway.choice import text_of
from pdserve.gateway.completion import Usage
from pdserve.gateway.keys import ApiKeys
from pdserve.gateway.sampling import RequestedSampling, refuse
from pdserve.gateway.service import ChatCompletionRequest, Service, TextCompletionRequest
from pdserve.protos.common_pb2 import UNAUTHENTICATED
from pdserve.protos.text_pb2 import ChatRequest, CompleteRequest, TextChunk, TextOptions, TextUsage
from pdserve.protos.text_pb2_grpc import TextServicer as TextBase
from pdserve.services.host.backpressure import Backpressure, deliver
from pdserve.services.host.errors import ServiceError, abort

SERVICE = "pdserve.v1.Text"
TEXT_METHODS = (f"/{SERVICE}/Chat", f"/{SERVICE}/Complete")

Context = grpc.aio.ServicerContext[Any, Any]


class TextServicer(TextBase):
    def __init__(self, service: Service, keys: ApiKeys, backpressure: Backpressure) -> None:
        self._service = service
        self._keys = keys
        self._backpressure = backpressure

    async def Chat(self, request: ChatRequest, context: Context) -> None:
        try:
            self._check_key(context)
            messages = [{"role": m.role, "content": m.content} for m in request.messages]
            asked = ChatCompletionRequest(request.model, messages, _sampling(request.options))
            await deliver(self._run(asked), context.write, self._backpressure)
        except ServiceError as error:
            await abort(context, error)

    async def Complete(self, request: CompleteRequest, context: Context) -> None:
        try:
            self._check_key(context)
            sampling = _sampling(request.options)
            asked = TextCompletionRequest(request.model, [request.prompt], sampling)
            await deliver(self._run(asked), context.write, self._backpressure)
        except ServiceError as error:
            await abort(context, error)

    def _check_key(self, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        given = metadata.get("authorization", "")
        if not self._keys.admits(given if isinstance(given, str) else ""):
            raise ServiceError(UNAUTHENTICATED, "missing or wrong API key in 'authorization'")

    async def _run(
        self, asked: ChatCompletionRequest | TextCompletionRequest
    ) -> AsyncGenerator[TextChunk, None]:
        async with (
            self._service.prepare(asked, f"text-{uuid4().hex}") as completion,
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
