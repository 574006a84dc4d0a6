"""Moves to other decode workers as routers ask for them; on the loop.

What may be sent, and when the request goes on here after all, say the engine thread's Departures.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol.frames import ID_BYTES
from pdserve.engine.handoff.protocol.keys import SECRET_BYTES, Ticket
from pdserve.protos import worker_pb2 as wire
from pdserve.services.decode.runtime import DecodeRuntime
from pdserve.services.decode.served import DecodeSession, Served
from pdserve.services.worker.sessions import when_done

log = logging.getLogger(__name__)


class MigrationSource:
    """`served`: what runs here, by attempt; `moved` is told of each that went on elsewhere."""

    def __init__(self, served: Mapping[bytes, Served], moved: Callable[[Served], None]) -> None:
        self._served = served
        self._moved = moved
        self._part: DecodeRuntime | None = None

    def attach(self, part: DecodeRuntime) -> None:
        self._part = part

    def hold(self, session: DecodeSession, attempt: bytes) -> None:
        """Answered with Held after all that it has generated, or with Stayed."""
        served = self._of(session, attempt)
        if served is None or self._part is None:
            session.outbox.put(_stayed(attempt, "it does not run here"))
            return

        def answered(future: "Future[Any]") -> None:
            held = None if future.cancelled() else future.result()
            if self._served.get(attempt) is not served:
                return  # it has ended meanwhile
            if held is None:
                session.outbox.put(_stayed(attempt, "it cannot move now"))
                return
            so_far = served.finished(held.cached_tokens)
            said = wire.Held(attempt=attempt, tokens=held.num_tokens, so_far=so_far)
            session.outbox.put(wire.DecodeEvent(held=said))

        when_done(self._part.hold(attempt), answered)

    def move(self, session: DecodeSession, move: wire.Move) -> None:
        """Answered when the hand-off is over, with Moved or Stayed."""
        part, given = self._part, move.ticket
        sizes = (len(move.to), len(given.id), len(given.decode_boot), len(given.secret))
        if sizes != (ID_BYTES, ID_BYTES, ID_BYTES, SECRET_BYTES):
            session.outbox.put(_stayed(move.attempt, "not a ticket"))
            return
        if part is None or self._of(session, move.attempt) is None:
            session.outbox.put(_stayed(move.attempt, "it does not run here"))
            return

        def answered(future: "Future[Any]") -> None:
            if not future.cancelled() and not future.result():
                session.outbox.put(_stayed(move.attempt, "it is not held"))

        ticket = Ticket(given.id, given.secret, move.to, part.boot, given.decode_boot)
        address, receiver = given.data_address, move.kv_identity.digest
        when_done(part.move(move.attempt, ticket, address, receiver), answered)

    def stay(self, session: DecodeSession, attempt: bytes) -> None:
        """One-way; without effect on what has ended."""
        if self._of(session, attempt) is not None and self._part is not None:
            self._part.stay(attempt)

    def on_departed(self, attempt: bytes, sent: Sent) -> None:
        """A hand-off is over: the request goes on here, or there."""
        served = self._served.get(attempt)
        if served is None:
            return
        if sent.reason:
            log.info("its move failed: %s", sent.reason, extra={"request": served.name})
            served.session.outbox.put(_stayed(attempt, sent.reason))
            return
        self._moved(served)
        log.info("moved: %.1f MB", sent.num_bytes / 1e6, extra={"request": served.name})
        moved = wire.Moved(attempt=attempt, to=sent.attempt, sent_bytes=sent.num_bytes)
        served.session.outbox.put(wire.DecodeEvent(moved=moved))

    def _of(self, session: DecodeSession, attempt: bytes) -> Served | None:
        served = self._served.get(attempt)
        return served if served is not None and served.session is session else None


def _stayed(attempt: bytes, reason: str) -> wire.DecodeEvent:
    return wire.DecodeEvent(stayed=wire.Stayed(attempt=attempt, reason=reason))
