"""The automaton of one request in the router; synchronous, time is an argument.

    QUEUED ----place----> ADMITTING --Admitted--> PREFILLING (remote) --first ids--> RUNNING
      ^  ^                  |   |                     |                               |
      |  +----- Busy -------+   +--Admitted (local)---|----------------> RUNNING      |
      +-- a lost attempt (PrefillFailed, HandoffLost, Gone, a dead worker), PlaceAgain --+
      |                                   +--Resumed with a ticket--> PREFILLING
      |   SEEKING --its worker is here--> RESUMING --Resumed--> RUNNING
      +-- not in time -+------ Gone, no answer, a dead worker -+
    PREFILLING, RUNNING, RESUMING --a lost session with decode, which lives--> SEEKING
    any --Finished | Failed | Cancel | deadline--> ENDED

SEEKING and RESUMING are adoption.py's. Messages of another attempt never reach this object.
Invariant: exactly one terminal event, and on the way into QUEUED or ENDED the attempt is
cancelled on every worker that may still run it. `Effects` is all it knows of the world.
"""

import logging
import os

from pdserve.engine.kv.identity import KvIdentity
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.router_pb2 import Placed, RequestEvent
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.request_progress import RequestProgress
from pdserve.services.router.fleet.fleet import Worker
from pdserve.services.router.placement.policy import PromptFacts
from pdserve.services.router.requests import adoption, commands, single_flight
from pdserve.services.router.requests.beginning import Beginning
from pdserve.services.router.requests.effects import ASKING, Attempt, Client, Effects, Stage
from pdserve.services.router.requests.migration import Migration
from pdserve.services.router.requests.single_flight import SharedKv
from pdserve.services.router.requests.times import FirstToken

log = logging.getLogger(__name__)

MAX_CANDIDATES = 3  # decode workers asked in a row before the request queues
MAX_ATTEMPTS = 12  # Busy answers aside; a request that ends sessions must not do so for ever
MAX_CRASHES = 2
ANSWER_S = 10.0  # for Admitted, Busy or PrefillAccepted
ORPHAN_S = 5.0  # a lost gateway may come back and issue again
OVERDUE_S = 2.0  # workers end a request at its deadline; past it by this, the router does


class RoutedRequest:
    """One request of one client."""

    def __init__(
        self,
        board: Effects,
        answer: RequestProgress,
        owner: Client,
        ordinal: int,
        now: float,
    ) -> None:
        start = answer.start
        self.board = board
        self.answer = answer
        self.owner = owner
        self.ordinal = ordinal  # of arrival, kept over retries
        self.request = start.request
        self.model = start.model
        self.epoch = start.epoch
        self.turn, self.sought = 0, now  # sessions outlived; since when its worker is sought
        self.crash_count = start.crash_count
        self.arrived = now
        self.deadline = now + start.remaining_ms / 1000 if start.remaining_ms else None
        queue_ms = start.queue_remaining_ms
        self._queue_s = queue_ms / 1000
        self.queue_deadline = now + self._queue_s if queue_ms else None
        self.stage = Stage.QUEUED
        self.attempt: Attempt | None = None
        self.num_attempts = 0
        self.refused: set[bytes] = set()  # boots of decode workers that said Busy in this round
        self.failed_prefills: set[bytes] = set()
        self.num_prefill_failures = 0
        self.verified: dict[bytes, int] = {}  # by boot of decode workers: tokens that they keep
        self.beginning = Beginning(FirstToken(now))
        self.move: Migration | None = None
        self.num_stuck = 0  # moves that failed in a row
        self.stays_until = 0.0  # before it the next one does not begin
        self.orphan_since: float | None = None
        self.counted = False  # its prompt was counted as local or remote
        self.origin: KvIdentity | None = None  # who computed what it has passed on; binds it
        if self.answer.begun and start.placement.HasField("identity"):
            self.origin = KvIdentity.of(start.placement.identity)
        self.inexact = False  # it was resumed on another identity
        self.placement = pb.Placement()  # of the attempt that it has, or is to adopt
        self.placement.CopyFrom(start.placement)

    def facts(self) -> PromptFacts:
        """What the policy is told of it."""
        return PromptFacts(
            num_tokens=len(self.answer.prefix_ids()) - 1,
            may_go_remote=self.answer.may_go_remote,
            prefill_failures=self.num_prefill_failures,
            failed_prefills=frozenset(self.failed_prefills),
        )

    # --- tries

    def begin(
        self, decode: Worker, prefill: Worker | None, shares: SharedKv, now: float
    ) -> Attempt:
        """Send Admit to the decode worker that the policy chose."""
        ids = self.answer.prefix_ids()[:-1]
        attempt = Attempt(os.urandom(16), decode, prefill, ids, now, now)
        attempt.follows = shares.expected
        self.attempt = attempt
        self.stage = Stage.ADMITTING
        self.num_attempts += 1
        self.board.opened(self, attempt, now)
        self.place_at(attempt)  # first: whatever a worker computes from here on can be found again
        self.admit(attempt, prefill, shares.min_tokens, now)
        return attempt

    def admit(self, attempt: Attempt, sender: Worker | None, min_shared: int, now: float) -> None:
        """Hand it over as it stands; `sender` will send its KV, if anybody does."""
        # A request that had its first step does not wait for one again.
        queue_ms = 0 if self.answer.begun else _left_ms(self.queue_deadline, now)
        left_ms = _left_ms(self.deadline, now)
        start = self.answer.to_start(adoption.claim(self), self.crash_count, left_ms, queue_ms)
        admit = wire.Admit(attempt=attempt.id, min_shared_tokens=min_shared)
        if sender is not None:
            admit.prefill_boot, admit.prefill_identity = sender.boot, sender.identity.digest
        for command in commands.admit(admit, start, self.answer.prompt_ids):
            self.board.to_decode(attempt.decode, command)

    def on_admitted(self, admitted: wire.Admitted, now: float) -> None:
        """The promise: start the remote prefill."""
        attempt = self.attempt
        if attempt is None or self.stage is not Stage.ADMITTING:
            return
        self.refused.clear()
        single_flight.settle(attempt, admitted, now)
        prefill = attempt.prefill
        if prefill is None:
            self.stage = Stage.RUNNING
            return
        self.stage, attempt.ticket = Stage.PREFILLING, admitted.ticket
        self.start_prefill(attempt, prefill, admitted.ticket, now)

    def place_at(self, attempt: Attempt) -> None:
        """The attempt runs there, or is to: say so."""
        self.placement = pb.Placement(
            attempt=attempt.id,
            decode_boot=attempt.decode.boot,
            decode_address=attempt.decode.hello.address,
            identity=pb.KvIdentity(**(self.origin or attempt.decode.identity).parts()),
        )
        self.emit_placed(attempt.prefill)

    def emit_placed(self, prefill: Worker | None) -> None:
        """Say where the attempt runs."""
        placed = Placed(
            request=self.request,
            epoch=self.epoch,
            placement=self.placement,
            prefill_address="" if prefill is None else prefill.hello.address,
            crash_count=self.crash_count,
        )
        self.board.emit(self, RequestEvent(placed=placed))

    def start_prefill(
        self, attempt: Attempt, prefill: Worker, ticket: wire.Ticket, now: float
    ) -> None:
        """Have its KV computed and sent."""
        attempt.prefill, attempt.asked, attempt.unheard = prefill, now, False
        start = wire.PrefillStart(
            attempt=attempt.id,
            ticket=ticket,
            cache_salt=self.answer.start.cache_salt,
            remaining_ms=_left_ms(self.deadline, now),
            kv_identity=pb.KvIdentity(**attempt.decode.identity.parts()),
        )
        for command in commands.start_prefill(start, attempt.ids):
            self.board.to_prefill(prefill, command)

    def on_busy(self, now: float) -> None:
        """Decode has no room: the next candidate, or the queue."""
        attempt = self.attempt
        if attempt is None or self.stage is not Stage.ADMITTING:
            return
        self.refused.add(attempt.decode.boot)
        self.not_tried("busy", now)

    def not_tried(self, reason: str, now: float) -> None:
        """The attempt is over on every worker before anything was tried."""
        self.num_attempts = max(0, self.num_attempts - 1)  # an adopted one was not counted
        self.close_attempt(reason)
        if self.answer.complete:  # its choices were cancelled meanwhile
            self._finish_here(now)
        else:
            self.board.place(self, now)

    def close_attempt(self, lost: str = "") -> None:
        if self.attempt is not None:
            self.attempt.lost = lost
            self.board.closed(self.attempt)
            self.attempt = None
        self.stage = Stage.QUEUED

    def cancel_attempt(self) -> None:
        """Cancel on the sides that may still have it."""
        attempt = self.attempt
        if attempt is None:
            return
        cancel = wire.CancelAttempt(attempt=attempt.id)
        if not attempt.decode_over:
            self.board.to_decode(attempt.decode, wire.DecodeCommand(cancel=cancel))
        started = self.stage is not Stage.ADMITTING
        if attempt.prefill is not None and started and not attempt.prefill_over:
            self.board.to_prefill(attempt.prefill, wire.PrefillCommand(cancel=cancel))

    def retry(self, reason: str, now: float) -> None:
        """The attempt is lost: cancel what is left of it and try again from what is known."""
        log.info("attempt lost: %s", reason, extra={"request": self.request})
        if self.queue_deadline is not None:
            self.queue_deadline = now + self._queue_s  # it had its turn; it waits anew
        self.cancel_attempt()
        self.close_attempt(reason)
        if self.answer.complete:  # only the worker's Finished was missing
            self._finish_here(now)
        elif self.crash_count >= MAX_CRASHES:
            self.fail(pb.POISON_REQUEST, "the request was running on two workers that died", now)
        elif self.num_attempts >= MAX_ATTEMPTS:
            self.fail(pb.INTERNAL, "the request failed on every try", now)
        else:
            self.board.place(self, now)

    def _finish_here(self, now: float) -> None:
        """Every choice has ended, and no worker is left to say so."""
        finished = pb.Finished(request=self.request, epoch=self.epoch, inexact=self.inexact)
        self.end(RequestEvent(finished=finished), now, None)

    def prefill_lost(self, reason: str, now: float, fault: bool = True) -> None:
        """The prefill side failed; without effect once the KV is known to be complete.
        `fault`: it counts among the failures after which decode does it itself."""
        attempt = self.attempt
        if attempt is None or attempt.prefill is None or attempt.filled:
            return
        self.failed_prefills.add(attempt.prefill.boot)
        self.num_prefill_failures += fault
        self.retry(f"prefill {attempt.prefill.hello.address}: {reason}", now)

    def worker_lost(self, worker: Worker, how: str, strike: bool, now: float) -> None:
        """A worker died or froze (a strike), or the session to it broke with its messages."""
        attempt = self.attempt
        if attempt is None or (not strike and adoption.outlives(self, attempt, worker, now)):
            return
        if attempt.decode is worker:
            unknown = self.stage in ASKING and (attempt.adopted or not attempt.answered)
            if strike and attempt.computing and not unknown:
                self.crash_count += 1
            self.retry(f"decode {worker.hello.address} {how}", now)
        elif attempt.prefill is worker:
            self.prefill_lost(how, now)

    # --- the client's side

    def cancel(self, choices: tuple[int, ...], now: float) -> None:
        """End the request (CANCELLED), or leave some choices and go on with the rest."""
        if not choices:
            self.fail(pb.CANCELLED, "cancelled", now)
            return
        self.answer.abort(choices)
        if self.attempt is not None:  # decode ends them, and says Finished after the last one
            cancel = wire.CancelAttempt(attempt=self.attempt.id, choices=choices)
            self.board.to_decode(self.attempt.decode, wire.DecodeCommand(cancel=cancel))
        elif self.answer.complete:
            self._finish_here(now)

    def tick(self, now: float) -> None:
        """Let time pass."""
        if self.stage is Stage.ENDED:
            return
        attempt = self.attempt
        if self.orphan_since is not None and now - self.orphan_since >= ORPHAN_S:
            self.fail(pb.CANCELLED, "its gateway is gone", now)
        elif self.deadline is not None and now >= self.deadline + (OVERDUE_S if attempt else 0):
            self.fail(pb.DEADLINE_EXCEEDED, "the request ran longer than its timeout", now)
        elif self.stage is Stage.SEEKING:
            adoption.seek(self, now)
        elif attempt is None:
            waited = self.queue_deadline is not None and now >= self.queue_deadline
            if waited and not self.answer.begun:
                self.fail(pb.QUEUE_TIMEOUT, "no worker took the request in time", now, "", 1.0)
        elif self.stage is Stage.PREFILLING and attempt.unsaid and attempt.ticket:
            adoption.seek_prefill(self, attempt, attempt.ticket, now)
        elif now - attempt.asked >= ANSWER_S:
            if self.stage is Stage.ADMITTING:
                self.cancel_attempt()
                self.on_busy(now)
            elif self.stage is Stage.RESUMING:
                self.retry("no answer", now)
            elif self.stage is Stage.PREFILLING and not attempt.prefill_accepted:
                self.prefill_lost("no answer", now)

    def fail(
        self,
        code: pb.ErrorCode,
        message: str,
        now: float,
        param: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        """End with an error."""
        if self.stage is Stage.ENDED:
            return
        error = ServiceError(code, message, param, retry_after_s)
        self.cancel_attempt()
        failed = pb.Failed(request=self.request, epoch=self.epoch, failure=error.to_failure())
        if self.attempt is not None:
            failed.attempt = self.attempt.id
        self.end(RequestEvent(failed=failed), now, error)

    def end(self, event: RequestEvent, now: float, error: ServiceError | None) -> None:
        """Pass on its terminal event; `error`: what that says."""
        attempt = self.attempt
        log.info(
            "%s model=%s prefill=%s decode=%s tries=%d seconds=%.3f",
            "done" if error is None else f"failed ({error.message})",
            self.model,
            attempt.prefill.hello.address if attempt and attempt.prefill else "local",
            attempt.decode.hello.address if attempt else "none",
            self.num_attempts,
            now - self.arrived,
            extra={"request": self.request},
        )
        self.board.emit(self, event)
        self.board.ended(self, now, error)
        self.close_attempt()
        self.stage = Stage.ENDED


def _left_ms(deadline: float | None, now: float) -> int:
    """Milliseconds left, at least 1, since 0 means that there is no bound."""
    return 0 if deadline is None else max(1, int((deadline - now) * 1000))
