"""Answers that take time: a whole one, a file, or a stream of events that their dialect has framed.

All watch the connection while they work: when the client leaves, the work is cancelled at once. The
server ends the connection of one that takes nothing (serving/protocol.py).
An error before the first byte is an ordinary error response; later it is the last event.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.gateway.http.dialect import ErrorShape, HttpError, HttpLimits, error_response
from pdserve.gateway.http.json_text import JsonPieces
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.rpc.backpressure import Backpressure, SlowReaderError, deliver

log = logging.getLogger("pdserve.gateway.http")

PIECE_BYTES = 1 << 16  # of a whole answer
STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DROP = "pdserve.drop"  # ASGI extension of our server: drops the connection


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _public(error: Exception, scope: Scope) -> HttpError:
    """The error as the client may see it; what nobody foresaw goes to the log."""
    caller = scope.get("state", {}).get("caller")
    if not isinstance(error, ServiceError):
        request = {"request": caller.request_id if caller else ""}
        log.error("a request failed", exc_info=error, extra=request)
    return replace(HttpError.of(error), request_id=caller.shown_id if caller else "")


class Reply(Response):
    """Sends a JSON object, or what is its text already, once it is there; nothing if the client has
    left before."""

    def __init__(self, work: Awaitable[dict[str, Any] | JsonPieces], errors: ErrorShape) -> None:
        self._work = work
        self._errors = errors
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._work)
        watching = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return
            try:
                found = working.result()
            except Exception as error:
                await error_response(self._errors, _public(error, scope))(scope, receive, send)
            else:
                pieces = found if isinstance(found, JsonPieces) else JsonPieces((to_json(found),))
                await _send_json(pieces, send)
        finally:
            await _end(working, watching)


async def _send_json(pieces: JsonPieces, send: Send) -> None:
    """The server waits before each part until the client has taken the ones before."""
    left = sum(map(len, pieces))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(left).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in _parts(pieces):
        left -= len(part)
        await send({"type": "http.response.body", "body": part, "more_body": left > 0})


def _parts(pieces: JsonPieces) -> Iterator[bytes]:
    """The same bytes, PIECE_BYTES at a time."""
    held = bytearray()
    for piece in pieces:
        for at in range(0, len(piece), PIECE_BYTES):
            held += piece[at : at + PIECE_BYTES]
            if len(held) >= PIECE_BYTES:
                yield bytes(held[:PIECE_BYTES])
                del held[:PIECE_BYTES]
    if held:
        yield bytes(held)


class PieceStream(Response):
    """Sends bytes of a known length as a generator yields them; a client whose bytes cannot be had
    loses its connection."""

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], num_bytes: int, media_type: str
    ) -> None:
        self._pieces = pieces
        self._head = [
            (b"content-type", media_type.encode()),
            (b"content-length", str(num_bytes).encode()),
        ]
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        watching = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                return
        except ServiceError as error:
            log.warning("a file could not be sent: %s", error.message)
        finally:
            await _end(watching, sending)
        await _drop_connection(scope)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._head})
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                for at in range(0, len(piece), PIECE_BYTES):
                    part = piece[at : at + PIECE_BYTES]
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class EventStream(Response):
    """Sends what a generator yields, as it comes.

    What the client does not take waits here, up to `max_buffer_bytes` and `stall_s` without
    progress; beyond either the generator is closed, which cancels its requests.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        errors: ErrorShape,
        limits: HttpLimits,
    ) -> None:
        self._events = events
        self._errors = errors
        self._backpressure = Backpressure(limits.max_buffer_bytes, limits.stall_s)
        self._complete = False  # the whole response is sent
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(scope, receive, send))
        watching = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except SlowReaderError as error:
            log.warning("a client is given up: %s", error)
        finally:
            await _end(watching, sending)
            if not self._complete:
                await _drop_connection(scope)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal begun
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": STREAM})
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            await deliver(
                self._with_error_event(scope),
                write,
                self._backpressure,
                size=len,
                join=b"".join,
                interruptible=True,
            )
            await write(b"", more=False)
        except SlowReaderError:
            raise
        except Exception as error:
            await error_response(self._errors, _public(error, scope))(scope, receive, send)
        self._complete = True

    async def _with_error_event(self, scope: Scope) -> AsyncGenerator[bytes, None]:
        """The events. An error after the first is the last event; one before it is raised."""
        begun = False
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    begun = True
                    yield event
        except Exception as error:
            if not begun:
                raise
            yield self._errors.error_event(_public(error, scope))


async def _drop_connection(scope: Scope) -> None:
    """Close a connection whose response was not completed, with what it has not taken."""
    drop = scope.get("extensions", {}).get(DROP)
    if drop is not None:
        drop()
        await asyncio.sleep(0)  # the server notes the loss before this response returns


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
