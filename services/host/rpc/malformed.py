"""Bytes that are no message of their method: the caller is told INVALID_ARGUMENT.

gRPC itself would log a traceback and answer with the name of a Python class.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.host.errors import ServiceError, abort
from pdserve.services.host.rpc.handlers import behaviour_of

_MALFORMED: Any = object()

Context = grpc.aio.ServicerContext[Any, Any]


class MalformedInterceptor(grpc.aio.ServerInterceptor):
    """The innermost interceptor: it wraps the handlers themselves."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        wrapped = self._wrapped.get(details.method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None or handler.request_deserializer is None:
                return handler
            wrapped = self._wrapped[details.method] = _wrapped(handler)
        return wrapped


def _wrapped(handler: Any) -> Any:
    """The same RpcMethodHandler, whose behaviour never sees a malformed request."""
    deserialize = handler.request_deserializer

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _MALFORMED

    kind, behaviour = behaviour_of(handler)
    guard = _guard_stream if handler.request_streaming else _guard_one
    return handler._replace(request_deserializer=parse, **{kind: guard(behaviour)})


async def _refuse(context: Context) -> None:
    await abort(context, ServiceError(INVALID_ARGUMENT, "the request cannot be read"))


def _guard_one(behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            if request is _MALFORMED:
                await _refuse(context)
            async with aclosing(behaviour(request, context)) as answers:
                async for answer in answers:
                    yield answer

        return stream

    async def call(request: Any, context: Context) -> Any:
        if request is _MALFORMED:
            await _refuse(context)
        return await behaviour(request, context)

    return call


class _MalformedRequest(Exception):
    """Raised out of a stream of requests; its handler ends, and only then the call."""


async def _checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if request is _MALFORMED:
            raise _MalformedRequest
        yield request


def _guard_stream(behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    """A handler may read in a task of its own: gRPC does not let that one end the call while an
    answer is on its way."""
    if inspect.isasyncgenfunction(behaviour):

        async def stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            try:
                async with aclosing(behaviour(_checked(requests), context)) as answers:
                    async for answer in answers:
                        yield answer
            except _MalformedRequest:
                await _refuse(context)

        return stream

    async def call(requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            return await behaviour(_checked(requests), context)
        except _MalformedRequest:
            await _refuse(context)

    return call
