"""Migrates requests to other decode workers; runs on the engine thread.

    running --hold--> held --send--> sent --Complete of the other side--> gone: its blocks are free
       ^               |               |
       +-----stay------+---------------+   or any other end of the hand-off

Only this engine computes a request's next token until the other worker has verified every block;
from then on only that worker does. A held request has no steps, and it continues here only if the
hand-off ends without Complete. If only the Complete message is lost, both workers may compute the
same tokens, and the router takes those of one attempt.
"""

import time
from collections.abc import Callable

from pdserve.engine.engine import Engine, Frozen
from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol import Ticket
from pdserve.engine.handoff.sender import Sender

MOVE_S = 2.0  # longest pause of a stream by a hand-off; then the request continues here


class OutgoingMigrations:
    """Migrations to other decode workers. Calls `on_ended(attempt, sent)` for every hand-off that
    `stay` did not end."""

    def __init__(
        self, engine: Engine, sender: Sender, on_ended: Callable[[bytes, Sent], None]
    ) -> None:
        self.num_gone = 0
        self.num_stayed = 0
        self._engine = engine
        self._sender = sender
        self._on_ended = on_ended
        self._held: dict[bytes, Frozen] = {}
        self._sent: dict[bytes, bytes] = {}  # attempt here -> attempt at the other worker
        self._sources: dict[bytes, bytes] = {}  # attempt at the other worker -> attempt here

    def hold(self, attempt: bytes) -> Frozen | None:
        """Stop the request's steps; None if it cannot move now."""
        held = self._engine.freeze(attempt.hex())
        if held is not None:
            self._held[attempt] = held
        return held

    def send(self, attempt: bytes, ticket: Ticket, address: str, receiver: bytes) -> bool:
        """Hand a held request over under a ticket of the worker at `address`; False if it is not
        held.

        `receiver`: digest of that worker's KV identity.
        """
        held = self._held.get(attempt)
        if held is None or attempt in self._sent:
            return False
        self._sent[attempt], self._sources[ticket.attempt] = ticket.attempt, attempt
        key, deadline = attempt.hex(), time.monotonic() + MOVE_S
        self._sender.send_held(ticket, address, key, held.num_tokens, deadline, receiver)
        return True

    def stay(self, attempt: bytes) -> bool:
        """Let a held request continue here; False if it was not held."""
        if self._held.pop(attempt, None) is None:
            return False
        target_attempt = self._sent.pop(attempt, None)
        if target_attempt is not None:
            del self._sources[target_attempt]
            self._sender.cancel(target_attempt, "the request stays at the source")
        self.num_stayed += 1
        self._engine.resume(attempt.hex())
        return True

    def ended(self, sent: Sent) -> None:
        """Handle the end of one of the sender's hand-offs."""
        attempt = self._sources.pop(sent.attempt, None)
        if attempt is None:
            return
        del self._sent[attempt], self._held[attempt]
        if sent.reason:
            self.num_stayed += 1
            self._engine.resume(attempt.hex())
        else:
            self.num_gone += 1
        self._on_ended(attempt, sent)
