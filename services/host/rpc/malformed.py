"""Refuses bytes that are not a message of their method with INVALID_ARGUMENT.

gRPC itself would log a traceback and return the name of a Python class.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.host.errors import ServiceError, abort
from pdserve.services.host.rpc.handlers import Context, guarded

_MALFORMED: Any = object()


class MalformedInterceptor(grpc.aio.ServerInterceptor):
    """The innermost interceptor; it wraps the handlers themselves."""

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
    """A copy of the RpcMethodHandler whose behaviour never sees a malformed request."""
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
    """Raised from a stream of requests; ends the handler first, and then the call."""


async def _checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if request is _MALFORMED:
            raise _MalformedRequest
        yield request


@asynccontextmanager
async def _check_stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    """A guard for streams of requests. A handler may read in a separate task, where gRPC does not
    let it end the call while a response is being sent."""
    try:
        yield _checked(requests)
    except _MalformedRequest:
        await _refuse(context)
