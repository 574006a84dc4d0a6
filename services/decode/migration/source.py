"""Handles routers' requests to migrate attempts to other decode workers; runs on the loop.

The engine thread's OutgoingMigrations decides what may be sent and whether a request continues
here.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol import ID_BYTES, SECRET_BYTES, Ticket
from pdserve.protos import worker_pb2 as wire
from pdserve.services.decode.attempt import DecodeSession, ServedAttempt
from pdserve.services.decode.runtime import DecodeRuntime
from pdserve.services.worker import when_done

log = logging.getLogger(__name__)


class MigrationSource:
    """The sending side of migrations. `served` holds the live attempts by id; `moved` is called for
    each attempt that continues at another worker."""

    def __init__(
        self, served: Mapping[bytes, ServedAttempt], moved: Callable[[ServedAttempt], None]
    ) -> None:
        self._served = served
        self._moved = moved
        self._runtime: DecodeRuntime | None = None

    def attach(self, runtime: DecodeRuntime) -> None:
        self._runtime = runtime

    def hold(self, session: DecodeSession, attempt: bytes) -> None:
        """Stop an attempt; sends Held after the events of all tokens that it has generated, or
        Stayed."""
        served = self._of(session, attempt)
        if served is None or self._runtime is None:
            session.outbox.put(_stayed(attempt, "the attempt does not run on this worker"))
            return

        def answered(future: "Future[Any]") -> None:
            held = None if future.cancelled() else future.result()
            if self._served.get(attempt) is not served:
                return  # it has ended meanwhile
            if held is None:
                session.outbox.put(_stayed(attempt, "the request cannot move now"))
                return
            so_far = served.finished(held.cached_tokens)
            held_event = wire.Held(attempt=attempt, tokens=held.num_tokens, so_far=so_far)
            session.outbox.put(wire.DecodeEvent(held=held_event))

        when_done(self._runtime.hold(attempt), answered)

    def move(self, session: DecodeSession, move: wire.Move) -> None:
        """Send an attempt's KV; sends Moved or Stayed when the hand-off is over."""
        runtime, wire_ticket = self._runtime, move.ticket
        sizes = (
            len(move.to),
            len(wire_ticket.id),
            len(wire_ticket.decode_boot),
            len(wire_ticket.secret),
        )
        if sizes != (ID_BYTES, ID_BYTES, ID_BYTES, SECRET_BYTES):
            session.outbox.put(_stayed(move.attempt, "the ticket is malformed"))
            return
        if runtime is None or self._of(session, move.attempt) is None:
            session.outbox.put(_stayed(move.attempt, "the attempt does not run on this worker"))
            return

        def answered(future: "Future[Any]") -> None:
            if not future.cancelled() and not future.result():
                session.outbox.put(_stayed(move.attempt, "the request is not held"))

        ticket = Ticket(
            wire_ticket.id, wire_ticket.secret, move.to, runtime.boot, wire_ticket.decode_boot
        )
        address, receiver = wire_ticket.data_address, move.kv_identity.digest
        when_done(runtime.move(move.attempt, ticket, address, receiver), answered)

    def stay(self, session: DecodeSession, attempt: bytes) -> None:
        """Let the request continue here; sends no event."""
        if self._of(session, attempt) is not None and self._runtime is not None:
            self._runtime.stay(attempt)

    def on_ended(self, attempt: bytes, sent: Sent) -> None:
        """Handle the end of a migration's hand-off: the request continues here or there."""
        served = self._served.get(attempt)
        if served is None:
            return
        if sent.reason:
            log.info("the migration failed: %s", sent.reason, extra={"request": served.name})
            served.session.outbox.put(_stayed(attempt, sent.reason))
            return
        self._moved(served)
        text = "the request moved to another decode worker with %.1f MB of KV"
        log.info(text, sent.num_bytes / 1e6, extra={"request": served.name})
        moved = wire.Moved(attempt=attempt, to=sent.attempt, sent_bytes=sent.num_bytes)
        served.session.outbox.put(wire.DecodeEvent(moved=moved))

    def _of(self, session: DecodeSession, attempt: bytes) -> ServedAttempt | None:
        served = self._served.get(attempt)
        return served if served is not None and served.session is session else None


def _stayed(attempt: bytes, reason: str) -> wire.DecodeEvent:
    return wire.DecodeEvent(stayed=wire.Stayed(attempt=attempt, reason=reason))
