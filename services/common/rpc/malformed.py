"""Makes a gRPC server answer a request that cannot be parsed with INVALID_ARGUMENT.

gRPC itself would log a traceback and return the name of a Python class.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.common.errors import ServiceError, abort

_BEHAVIOURS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
Context = grpc.aio.ServicerContext[Any, Any]
# Entered around each call with its request (or stream of them); yields the behaviour's input.
Guard = Callable[[Any, Context], AbstractAsyncContextManager[Any]]
_MALFORMED: Any = object()


def guarded(handler: Any, guard: Guard, **changed: Any) -> Any:
    """Return a copy of a gRPC method handler that runs its behaviour (an async generator or a
    coroutine) within the context `guard`. `changed`: other fields of the handler to replace."""
    (kind,) = (name for name in _BEHAVIOURS if getattr(handler, name) is not None)
    behaviour = getattr(handler, kind)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        async with (
            guard(request, context) as checked,
            aclosing(behaviour(checked, context)) as responses,
        ):
            async for response in responses:
                yield response

    async def call(request: Any, context: Context) -> Any:
        async with guard(request, context) as checked:
            return await behaviour(checked, context)

    streams = inspect.isasyncgenfunction(behaviour)
    return handler._replace(**{kind: stream if streams else call}, **changed)


class MalformedInterceptor(grpc.aio.ServerInterceptor):
    """A server interceptor that answers a request that cannot be parsed with INVALID_ARGUMENT. Must
    be the innermost interceptor."""

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
    """Return a copy of a gRPC method handler that refuses malformed requests before its behaviour
    sees them."""
    deserialize = handler.request_deserializer

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _MALFORMED

    guard = _check_stream if handler.request_streaming else _check_request
    return guarded(handler, guard, request_deserializer=parse)


async def _refuse(context: Context) -> None:
    await abort(context, ServiceError(INVALID_ARGUMENT, "the request cannot be parsed"))


@asynccontextmanager
async def _check_request(request: Any, context: Context) -> AsyncIterator[Any]:
    if request is _MALFORMED:
        await _refuse(context)
    yield request


class _MalformedRequest(Exception):
    """Raised to a handler that reads a stream of requests when one of them cannot be parsed. It
    ends the handler; then the call ends with INVALID_ARGUMENT."""


async def _checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if request is _MALFORMED:
            raise _MalformedRequest
        yield request


@asynccontextmanager
async def _check_stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    """A guard for methods that receive a stream of requests: ends the call with INVALID_ARGUMENT if
    one cannot be parsed. The call ends only after the handler, because a handler may read in a
    separate task, in which gRPC cannot end the call while a response is being sent."""
    try:
        yield _checked(requests)
    except _MalformedRequest:
        await _refuse(context)
