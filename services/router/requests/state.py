"""The state of one request in the router, as machine.py steps it; frozen, and pure.

Its ids and its messages are kept outside, in the shell (request.py).
"""

import math
from dataclasses import dataclass
from enum import Enum

MAX_CANDIDATES = 3  # decode workers asked in a row before the request queues
MAX_SESSIONS = 256  # that the tries of one Start may outlive; then each loss is a failed try
MAX_FAILED = 3  # migrations in a row that fail; then the request ends where it is
AGAIN_S = 0.5  # after a migration that failed


class Stage(Enum):
    """Where a request stands."""

    QUEUED = "queued"
    SEEKING = "seeking"
    RESUMING = "resuming"
    ADMITTING = "admitting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"


class MigrationStep(Enum):
    """How far a migration is."""

    HOLDING = "holding"
    ADMITTING = "admitting"
    SENDING = "sending"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try on one pair of workers, as far as it is known here."""

    id: bytes
    decode: bytes  # boot id, as all workers
    prefill: bytes = b""  # empty: decode computes the prompt, or the worker is not known yet
    asked: float = 0.0  # when the last command that waits for an answer was sent
    answered: bool = False  # decode has answered the Admit
    decode_over: bool = False  # that side has ended it, so there is nothing to cancel there
    prefill_over: bool = False
    prefill_started: bool = False
    prefill_sent: bool = False
    follows: bool = False  # it waits, or may wait, for the KV of another prompt
    produced: bool = False  # ids or prompt log-probabilities came
    migrates: bool = False  # another decode worker sends its KV
    sender_died: float | None = None  # when that worker did
    adopted: bool = False  # another router, or an earlier issue of the request, began it
    ticket: bool = False  # its KV is, or was, awaited from a prefill worker
    awaited_prefill: bytes = b""  # of an adopted attempt: the prefill worker that decode awaits
    unheard: bool = False  # the session with prefill was lost: PrefillStart is said again

    @property
    def prefill_unaware(self) -> bool:
        """Prefill may not know that its KV is wanted, or we may not hear of it."""
        return not self.prefill_over and (not self.prefill or self.unheard)

    @property
    def sending_prefill(self) -> bytes:
        """The worker that is to compute and send its KV; empty: none."""
        return self.prefill or self.awaited_prefill

    @property
    def filled(self) -> bool:
        """Its KV is known to be complete at decode."""
        return self.produced or self.prefill_sent

    @property
    def computing(self) -> bool:
        """Its KV is complete or computed at decode: a step there may be its own."""
        return self.filled or not (self.prefill or self.ticket or self.follows)


@dataclass(frozen=True, slots=True)
class Migration:
    """A running request on its way from the decode worker of its attempt to another."""

    target: bytes
    began: float
    step: MigrationStep = MigrationStep.HOLDING
    attempt: Attempt | None = None  # at the target
    target_lost: bool = False  # the session with it broke meanwhile: it keeps the attempt

    def is_target(self, attempt: bytes) -> bool:
        """Whether that is the attempt at the target."""
        return self.attempt is not None and self.attempt.id == attempt


@dataclass(frozen=True, slots=True)
class Routing:
    """The state of one request in the router. Its ids are kept outside (RequestProgress)."""

    epoch: int = 0
    deadline: float | None = None
    queue_s: float = 0.0  # longest wait for the first step of a try, 0: no bound
    queue_deadline: float | None = None
    crash_count: int = 0  # decode workers that died while it may have been running there
    begun: bool = False  # some choice has ids
    complete: bool = False  # every choice has ended
    placed_attempt: bytes = b""  # the attempt that it has, or is to adopt ...
    placed_decode: bytes = b""  # ... and where that is
    stage: Stage = Stage.QUEUED
    attempt: Attempt | None = None
    migration: Migration | None = None
    num_attempts: int = 0
    num_sessions: int = 0  # outlived
    sought: float = 0.0  # since when its worker is sought
    refused: frozenset[bytes] = frozenset()  # decode workers that had no room in this round
    failed_prefills: frozenset[bytes] = frozenset()
    num_prefill_failures: int = 0
    orphan_since: float | None = None  # when its client's session ended
    num_failed_migrations: int = 0  # in a row
    stays_until: float = 0.0  # before it the next one does not begin

    @property
    def session_epoch(self) -> int:
        """Its epoch towards decode: higher with each issue, and with each session in between."""
        return self.epoch * MAX_SESSIONS + self.num_sessions

    @property
    def may_ask_more(self) -> bool:
        """Whether an Admit may go to another worker than the `refused` ones in this round."""
        return len(self.refused) < MAX_CANDIDATES

    def may_migrate(self, now: float) -> bool:
        """Whether it generates, and no migration is under way or has just failed."""
        return (
            self.stage is Stage.RUNNING
            and self.migration is None
            and self.begun
            and self.num_failed_migrations < MAX_FAILED
            and now >= self.stays_until
        )

    @property
    def only_passes_on(self) -> bool:
        """Whether ids of the attempt that end no choice change nothing here."""
        return (
            self.attempt is not None
            and self.attempt.produced
            and self.stage is Stage.RUNNING
            and self.begun
            and self.migration is None
        )

    @property
    def quiet_until(self) -> float:
        """Before this time TimePassed changes nothing, if it `only_passes_on`."""
        settled = self.attempt is None or self.attempt.sender_died is None
        if self.orphan_since is not None or not settled:
            return 0.0
        return math.inf if self.deadline is None else self.deadline

    def takes_output(self, attempt: bytes) -> bool:
        """Whether ids of that attempt count now. While it is being resumed they do not: what was
        said before is said again."""
        own = self.attempt is not None and self.attempt.id == attempt
        target = self.migration is not None and self.migration.is_target(attempt)
        return target or (own and self.stage is not Stage.RESUMING)
