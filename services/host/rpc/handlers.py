"""Wraps a check around gRPC's method handlers, for interceptors."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import grpc.aio

_BEHAVIOURS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

Context = grpc.aio.ServicerContext[Any, Any]
# Entered around each call with its request (or stream of them); yields the behaviour's input.
Guard = Callable[[Any, Context], AbstractAsyncContextManager[Any]]


def guarded(handler: Any, guard: Guard, **changed: Any) -> Any:
    """A copy of the RpcMethodHandler whose behaviour, an async generator or a coroutine, runs
    within the guard; `changed` are other fields to replace."""
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
