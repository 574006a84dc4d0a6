"""HTTP responses that take time: a complete JSON body, a file, or a stream of events.

Each response watches its connection while it is generated: when the client disconnects, the
generation is cancelled at once. A client that reads nothing loses its connection
(serving/protocol.py). An error before the first byte is sent becomes an ordinary error response; a
later one becomes the stream's last event. The status and headers of a stream are sent HEAD_S
seconds after its prompt is accepted, or with the first event if that comes before, so that a
refusal by the gateway, a router or a worker has its own status code.

The bytes that clients have not read yet are limited for all connections together. Beyond the limit,
the key with the most unread bytes loses its oldest response and that connection is closed; the
response that needs the memory is exempt. So a new response can always be sent, and slow clients of
one key lose their own responses before those of other keys. Every kind of response counts its bytes
this way, so all are in one file.
"""

import asyncio
import logging
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.gateway.http.api import (
    PIECE_BYTES,
    ErrorFormat,
    Event,
    HttpError,
    HttpLimits,
    JsonPieces,
    error_response,
)
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import Backpressure, SlowReaderError, deliver

MAX_HELD_BYTES = 512 << 20


@dataclass(eq=False, slots=True)
class HeldResponse:
    """A response whose bytes the client has not read yet. `dropped` is resolved when the connection
    must be closed to free the memory."""

    owner: bytes
    dropped: asyncio.Future[None]
    num_bytes: int = 0


class HeldResponses:
    """The responses of one server that clients have not fully read, and the limit on the sum of
    their bytes."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._answers: dict[HeldResponse, None] = {}  # the oldest first
        self.total = 0

    @contextmanager
    def answer(self, owner: bytes) -> Iterator[HeldResponse]:
        """Register a response of the key `owner` while the `with` block runs. It starts with 0
        bytes, and its bytes are released at the end."""
        answer = HeldResponse(owner, asyncio.get_running_loop().create_future())
        self._answers[answer] = None
        try:
            yield answer
        finally:
            self.release(answer, answer.num_bytes)
            del self._answers[answer]

    def hold(self, answer: HeldResponse, num_bytes: int) -> None:
        """Count `num_bytes` more of the response as generated and not yet read. Beyond the limit,
        drops the oldest responses of the key with the most unread bytes, but not this response."""
        answer.num_bytes += num_bytes
        self.total += num_bytes
        while self.total > self._max_bytes:
            others = [other for other in self._answers if other.num_bytes and other is not answer]
            if not others:
                return
            bytes_by_owner: Counter[bytes] = Counter()
            for other in others:
                bytes_by_owner[other.owner] += other.num_bytes
            ((largest_owner, _),) = bytes_by_owner.most_common(1)
            oldest = next(other for other in others if other.owner == largest_owner)
            self.release(oldest, oldest.num_bytes)
            if not oldest.dropped.done():
                oldest.dropped.set_result(None)

    def release(self, answer: HeldResponse, num_bytes: int) -> None:
        """Count `num_bytes` of the response as read by the client."""
        freed = min(num_bytes, answer.num_bytes)  # nothing, once it is dropped
        answer.num_bytes -= freed
        self.total -= freed


log = logging.getLogger("pdserve.gateway.http")
NO_ROOM = "the memory for unread responses is full"
EVENTS = "text/event-stream; charset=utf-8"
HEAD_S = 0.25
SILENCE_S = 10.0  # after which a stream sends a ping
STREAM = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# ASGI extensions of this server
DROP = "pdserve.drop"  # drops the connection
KEEPS_UP = "pdserve.keeps_up"  # whether the client takes what is written
WRITE = "pdserve.write"  # writes a short piece of the body at once, unless the client lags
HELD = "pdserve.held"  # the HeldResponses of all its connections


class DirectWrite:
    """Lets the generator of a stream send an event directly to the connection instead of yielding
    it. The EventStream opens it and closes it."""

    def __init__(self) -> None:
        self._write: Callable[[bytes], bool] | None = None
        self.last_write = 0.0  # a reading of time.monotonic

    def open(self, write: Callable[[bytes], bool] | None) -> None:
        """Set the function that sends a piece of the body at once and returns whether it did. None
        disables direct writes."""
        self._write = write

    def close(self) -> None:
        self._write = None

    def write(self, event: bytes) -> bool:
        """Send a short event directly. Returns False if it was not sent; then the caller must yield
        it.

        Call it only after all earlier events have been sent.
        """
        if self._write is None or not self._write(event):
            return False
        self.last_write = monotonic()
        return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _public(error: Exception, scope: Scope) -> HttpError:
    """Return the error that the client receives for an exception. Logs an exception that is not a
    ServiceError."""
    caller = scope.get("state", {}).get("caller")
    if not isinstance(error, ServiceError):
        request = {"request": caller.request_id if caller else ""}
        log.error("a request failed with an unexpected exception", exc_info=error, extra=request)
    return replace(HttpError.of(error), request_id=caller.shown_id if caller else "")


class Reply(Response):
    """Response whose body is the JSON object, or its text as JsonPieces, that the awaitable `work`
    returns. Cancels `work` and sends nothing if the client disconnects before it is done."""

    def __init__(self, work: Awaitable[dict[str, Any] | JsonPieces], errors: ErrorFormat) -> None:
        self._work = work
        self._errors = errors
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._work)
        watching = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((working, watching), return_when=FIRST_COMPLETED)
            if not working.done():
                return
            try:
                result = working.result()
            except Exception as error:
                await error_response(self._errors, _public(error, scope))(scope, receive, send)
            else:
                pieces = (
                    result if isinstance(result, JsonPieces) else JsonPieces((to_json(result),))
                )
                if pieces.num_bytes > PIECE_BYTES:
                    await _send_held(pieces, scope, send)
                else:
                    await _send_json(pieces, send)
        finally:
            await _cancel(working, watching)


async def _send_json(pieces: JsonPieces, send: Send) -> None:
    """Send status, headers and the JSON body. The server accepts each part of the body only after
    the client has read most of the parts before."""
    remaining = pieces.num_bytes
    headers = [(b"content-type", b"application/json"), (b"content-length", str(remaining).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in pieces.parts():
        remaining -= len(part)
        await send({"type": "http.response.body", "body": part, "more_body": remaining > 0})


async def _send_held(pieces: JsonPieces, scope: Scope, send: Send) -> None:
    """Send a long JSON body and count it as unread until it is sent. Closes the connection if
    unread responses exceed their limit and this one is chosen to be dropped."""
    held_responses = _held_responses(scope)
    with held_responses.answer(_owner(scope)) as answer:
        held_responses.hold(answer, pieces.num_bytes)
        sending = asyncio.create_task(_send_json(pieces, send))
        try:
            await asyncio.wait((sending, answer.dropped), return_when=FIRST_COMPLETED)
            if sending.done():
                sending.result()
                return
        finally:
            await _cancel(sending)
    log.warning("closing the connection of a slow client: %s", NO_ROOM)
    await _drop_connection(scope)


def _held_responses(scope: Scope) -> HeldResponses:
    held_responses = scope.get("extensions", {}).get(HELD)
    return held_responses if isinstance(held_responses, HeldResponses) else HeldResponses()


def _owner(scope: Scope) -> bytes:
    caller = scope.get("state", {}).get("caller")
    return caller.tenant.id if caller else b""


class PieceStream(Response):
    """Response that sends a body of known length, such as a file, as a generator yields its pieces.
    Closes the connection if the generator fails."""

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
        watching = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sending, watching), return_when=FIRST_COMPLETED)
            if sending.done():
                sending.result()
                return
        except ServiceError as error:
            log.warning(
                "closing the connection of a download: cannot read the rest of the file: %s",
                error.message,
            )
        finally:
            await _cancel(watching, sending)
        await _drop_connection(scope)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._head})
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                for offset in range(0, len(piece), PIECE_BYTES):
                    part = piece[offset : offset + PIECE_BYTES]
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class EventStream(Response):
    """Response that sends the events of a generator as they are made.

    Events that the client does not read are buffered, up to `max_buffer_bytes` and for `stall_s`
    without progress; beyond either limit the generator is closed, which cancels its requests, and
    the connection is closed. Events over PIECE_BYTES count against the limit of HeldResponses
    instead. After the first event, and until the client lags, `direct` is open: the generator may
    write events through it instead of yielding them. `ping` returns an event that is sent after
    SILENCE_S without another event.
    """

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        errors: ErrorFormat,
        limits: HttpLimits,
        direct: DirectWrite | None = None,
        ping: Callable[[], bytes] | None = None,
        media_type: str = EVENTS,
    ) -> None:
        self._events = events
        self._head = [(b"content-type", media_type.encode()), *STREAM]
        self._direct = direct or DirectWrite()
        self._ping = ping
        self._errors = errors
        self._backpressure = Backpressure(limits.max_buffer_bytes, limits.stall_s)
        self._begun = False  # a head is sent, or is being sent
        self._sending_head = asyncio.Lock()
        self._complete = False  # the whole response is sent
        self._num_writing = 0
        self._last_event = 0.0  # when one was made, or the head was sent; by time.monotonic
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held_responses = _held_responses(scope)
        with held_responses.answer(_owner(scope)) as answer:
            long_events = _LongEvents(held_responses, answer)
            sending = asyncio.create_task(self._send(scope, receive, send, long_events))
            watching = asyncio.create_task(_disconnected(receive))
            ends = (sending, watching, answer.dropped)
            try:
                wait_s = HEAD_S
                while True:
                    finished, _ = await asyncio.wait(
                        ends, timeout=wait_s, return_when=FIRST_COMPLETED
                    )
                    if finished:
                        break
                    wait_s = await self._keep_alive(scope, send)
                if sending.done():
                    sending.result()
                elif answer.dropped.done():
                    log.warning("closing the connection of a slow client: %s", NO_ROOM)
            except SlowReaderError as error:
                log.warning("closing the connection of a slow client: %s", error)
            finally:
                await _cancel(watching, sending)
                if not self._complete:
                    await _drop_connection(scope)

    async def _keep_alive(self, scope: Scope, send: Send) -> float:
        """Send the response's status and headers, or a ping event, if one is due. Returns the
        seconds until the next check.

        Another task writes the events; no ping is sent while that task waits for the client to
        read.
        """
        if not self._begun:
            caller = scope.get("state", {}).get("caller")
            accepted = caller.acceptance.at if caller else None
            waited_s = 0.0 if accepted is None else monotonic() - accepted
            if waited_s < HEAD_S:
                return HEAD_S - waited_s
            await self._begin(send)
            return SILENCE_S
        last = max(self._last_event, self._direct.last_write)
        silent_s = monotonic() - last
        if silent_s < SILENCE_S:
            return SILENCE_S - silent_s
        keeps_up = scope.get("extensions", {}).get(KEEPS_UP, lambda: True)
        if self._ping is not None and not self._num_writing and keeps_up():
            self._last_event = monotonic()
            await self._write(send, self._ping())
        return SILENCE_S

    async def _begin(self, send: Send) -> None:
        """Send the response's status and headers once; if another task is sending them, wait for
        it."""
        if self._begun and not self._sending_head.locked():
            return
        async with self._sending_head:
            if not self._begun:
                self._begun = True
                self._last_event = monotonic()
                await send({"type": "http.response.start", "status": 200, "headers": self._head})

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        self._num_writing += 1
        try:
            await self._begin(send)
            await send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._num_writing -= 1

    async def _send(
        self, scope: Scope, receive: Receive, send: Send, long_events: "_LongEvents"
    ) -> None:
        begin, write = partial(self._begin, send), partial(self._write, send)
        try:
            async with aclosing(self._with_error_event(scope, long_events)) as events:
                try:
                    remaining = await self._write_through(events, begin, write, scope)
                finally:
                    self._direct.close()
                if remaining is not None:
                    await deliver(
                        remaining,
                        write,
                        self._backpressure,
                        size=lambda event: len(event) if isinstance(event, bytes) else 0,
                        join=_joined,
                        parts=long_events.parts,
                        interruptible=True,
                    )
            await write(b"", more=False)
        except SlowReaderError:
            raise
        except Exception as error:  # before the first event
            if self._begun:
                raise
            self._begun = True  # no other head follows
            self._num_writing += 1  # and no ping
            await error_response(self._errors, _public(error, scope))(scope, receive, send)
        self._complete = True

    async def _write_through(
        self,
        events: AsyncGenerator[Event, None],
        begin: Callable[[], Awaitable[None]],
        write: Callable[[bytes], Awaitable[None]],
        scope: Scope,
    ) -> AsyncGenerator[Event, None] | None:
        """Write short events directly as they are made while the client keeps up, without a switch
        to another task. Returns the generator of the remaining events when the client lags or an
        event is long; None at the end of the stream. On a server without the KEEPS_UP extension,
        assumes that the client lags."""
        extensions = scope.get("extensions", {})
        keeps_up: Callable[[], bool] = extensions.get(KEEPS_UP, lambda: False)
        async for event in events:
            if keeps_up():
                await begin()  # the head alone may be more than the client takes
            if not isinstance(event, bytes) or not keeps_up():
                return _with_first(event, events)
            await write(event)
            self._direct.open(extensions.get(WRITE))
        return None

    async def _with_error_event(
        self, scope: Scope, long_events: "_LongEvents"
    ) -> AsyncGenerator[Event, None]:
        """Yield the stream's events. An exception after the first event, or after the status is
        sent, becomes the last event; an earlier exception is raised."""
        has_begun = False
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    has_begun = True
                    self._last_event = monotonic()
                    long_events.add(event)
                    yield event
        except Exception as error:
            if not (has_begun or self._begun):
                raise
            last = self._errors.error_event(_public(error, scope))
            long_events.add(last)
            yield last


async def _with_first(
    first: Event, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[Event, None]:
    yield first
    async for event in events:
        yield event


class _LongEvents:
    """Counts the unread bytes of one stream's long events in HeldResponses. A byte string that
    several events share counts once."""

    def __init__(self, held: HeldResponses, answer: HeldResponse) -> None:
        self._held = held
        self._answer = answer
        self._num_uses: Counter[int] = Counter()  # uses of a held piece, by its id()

    def add(self, event: Event) -> None:
        if isinstance(event, JsonPieces):
            new = {id(piece): len(piece) for piece in event if id(piece) not in self._num_uses}
            self._num_uses.update(map(id, event))
            self._held.hold(self._answer, sum(new.values()))

    def parts(self, event: Event) -> Iterator[bytes]:
        """Yield the parts of an event in which it is written. After the last part is read by the
        client, releases the byte strings that no other waiting event shares."""
        if isinstance(event, bytes):
            yield event
            return
        yield from event.parts()
        for piece in event.long if isinstance(event, _Joined) else event:
            self._num_uses[id(piece)] -= 1
            if not self._num_uses[id(piece)]:
                del self._num_uses[id(piece)]
                self._held.release(self._answer, len(piece))


class _Joined(JsonPieces):
    """Several waiting events that are written together in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.long: list[bytes | bytearray] = []  # the pieces of its long events


def _joined(events: Sequence[Event]) -> Event:
    if all(isinstance(event, bytes) for event in events):
        return b"".join(events)  # type: ignore[arg-type]
    joined = _Joined()
    for event in events:
        if isinstance(event, bytes):
            joined.append(event)
        else:
            joined += event
            joined.long += event
    return joined


async def _drop_connection(scope: Scope) -> None:
    """Close the connection of a response that was not completed, and discard its unsent data."""
    drop = scope.get("extensions", {}).get(DROP)
    if drop is not None:
        drop()
        await asyncio.sleep(0)  # the server notes the loss before this response returns


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
