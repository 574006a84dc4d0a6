"""State of one request in the router, what a step changed in it, and the timing of its first token;
pure. The state is frozen, and only machine.py steps it.

The time to the first token spans all attempts. The phases are those of the attempt that produced
the first token; the time before its Admit (the queue here, lost attempts) counts as queueing.
"""

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from pdserve.protos import common_pb2 as pb

MAX_CANDIDATES = 3  # decode workers tried in a row before the request queues
MAX_SESSIONS = 256  # of the attempts of one Start; each further loss of a session fails an attempt
MAX_FAILED_MIGRATIONS = 3  # failed migrations in a row; then the request stays where it is
MIGRATION_PAUSE_S = 0.5  # pause after a failed migration


class FirstToken:
    """Clock readings of one request up to its first token."""

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._attempt = b""  # the one that gave the first token
        self._began = 0.0  # when its Admit was sent
        self._received = 0.0

    def record(self, attempt: bytes, began: float, now: float) -> bool:
        """Record that tokens of an attempt arrived. Returns whether they are the request's first;
        only the first call counts."""
        if self._attempt:
            return False
        self._attempt, self._began, self._received = attempt, began, now
        return True

    def complete(self, phases: pb.Phases, attempt: bytes) -> None:
        """Turn the phases of the attempt that finished into those of the request, whose sum is the
        time to its first token. Phases of an attempt that another router began are not changed."""
        if not self._attempt:
            return
        if self._attempt != attempt:
            phases.CopyFrom(pb.Phases(prefill_s=self._received - self._began))
        phases.route_s = self._began - self._arrived
        phases.queue_s += phases.route_s


@dataclass(slots=True)
class Beginning:
    """What the router knows of a request until its first token."""

    token: FirstToken
    hit: int | None = None  # tokens cached before decode verified the first block
    expected: int | None = None  # the same, as the router knew it at the first attempt
    first: pb.Finished | None = None  # report of the attempt that the request migrated from

    def migrated(self, so_far: pb.Finished, num_attempts: int, attempt: bytes) -> None:
        """The request leaves `attempt`; `so_far` describes its beginning."""
        self.complete(so_far, num_attempts, attempt)
        self.first = so_far

    def complete(self, finished: pb.Finished, num_attempts: int, attempt: bytes) -> None:
        """Add to `finished` what the worker of `attempt`, the last one, cannot know."""
        first = self.first
        if first is not None:
            finished.cached_tokens = first.cached_tokens
            finished.remote, finished.transport = first.remote, first.transport
            finished.phases.CopyFrom(first.phases)
            finished.inexact |= first.inexact
            return
        self.token.complete(finished.phases, attempt)
        cached = self.expected if self.hit is None else self.hit
        if num_attempts > 1 and cached is not None:
            # Blocks that an earlier attempt left in a cache were computed for this request.
            finished.cached_tokens = min(finished.cached_tokens, cached)


class Stage(Enum):
    """The stage of a request (machine.py has the diagram)."""

    QUEUED = "queued"
    SEEKING = "seeking"
    RESUMING = "resuming"
    ADMITTING = "admitting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"


class MigrationStep(Enum):
    """The step that a migration has reached."""

    HOLDING = "holding"
    ADMITTING = "admitting"
    SENDING = "sending"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try on one pair of workers, as far as the router knows it."""

    id: bytes
    decode: bytes  # incarnation, like `prefill`
    prefill: bytes = b""  # empty: decode computes the prompt, or the worker is not known yet
    command_sent: float = 0.0  # when the last command that waits for an answer was sent
    answered: bool = False  # decode has answered the Admit
    decode_over: bool = False  # decode has ended it, so there is nothing to cancel there
    prefill_over: bool = False
    prefill_started: bool = False
    prefill_sent: bool = False
    follows: bool = False  # decode waits, or may wait, for the KV of another prompt
    produced: bool = False  # ids or prompt log-probabilities came
    migrates: bool = False  # another decode worker sends its KV
    sender_died: float | None = None  # when that worker died
    adopted: bool = False  # another router, or an earlier issue of the request, began it
    ticket: bool = False  # its KV is, or was, awaited from a prefill worker
    awaited_prefill: bytes = b""  # of an adopted attempt: the sender that decode awaits
    unheard: bool = False  # the session with prefill was lost: send PrefillStart again

    @property
    def prefill_unaware(self) -> bool:
        """Whether prefill may not have the attempt's PrefillStart, or its messages may be lost."""
        return not self.prefill_over and (not self.prefill or self.unheard)

    @property
    def sending_prefill(self) -> bytes:
        """The worker that is to compute and send the attempt's KV; empty if there is none."""
        return self.prefill or self.awaited_prefill

    @property
    def filled(self) -> bool:
        """Whether the attempt's KV is known to be complete at decode."""
        return self.produced or self.prefill_sent

    @property
    def computing(self) -> bool:
        """Whether decode may be computing the attempt: its KV is complete, or decode computes the
        prompt."""
        return self.filled or not (self.prefill or self.ticket or self.follows)


@dataclass(frozen=True, slots=True)
class Migration:
    """The move of a running request from the decode worker of its attempt to another."""

    target: bytes
    began: float
    step: MigrationStep = MigrationStep.HOLDING
    attempt: Attempt | None = None  # at the target
    target_lost: bool = False  # the session with it broke, but it keeps the attempt

    def is_target(self, attempt: bytes) -> bool:
        """Return whether `attempt` is the one at the target."""
        return self.attempt is not None and self.attempt.id == attempt


@dataclass(frozen=True, slots=True)
class Routing:
    """State of one request in the router. RequestProgress holds its ids."""

    epoch: int = 0
    deadline: float | None = None
    queue_s: float = 0.0  # longest wait for the first step of an attempt; 0: unbounded
    queue_deadline: float | None = None
    crash_count: int = 0  # decode workers that died while it may have been running there
    begun: bool = False  # some choice has ids
    complete: bool = False  # every choice has ended
    placed_attempt: bytes = b""  # the attempt that it has or is to adopt ...
    placed_decode: bytes = b""  # ... and its decode worker
    stage: Stage = Stage.QUEUED
    attempt: Attempt | None = None
    migration: Migration | None = None
    num_attempts: int = 0
    num_sessions: int = 0  # session losses that its attempts survived
    num_resumed: int = 0  # times that an attempt continued where another session left it
    seek_start: float = 0.0  # when the search for its worker began
    refused: frozenset[bytes] = frozenset()  # decode workers that had no room in this round
    failed_prefills: frozenset[bytes] = frozenset()
    num_prefill_failures: int = 0
    orphan_since: float | None = None  # when its client's session ended
    num_failed_migrations: int = 0  # in a row
    next_migration: float = 0.0  # no migration begins before this time

    @property
    def session_epoch(self) -> int:
        """The request's epoch at decode, which rises each time it is issued and each time a session
        is lost."""
        return self.epoch * MAX_SESSIONS + self.num_sessions

    @property
    def unanswered(self) -> list[bytes]:
        """The decode workers that have yet to answer an Admit of the request."""
        migrating = None if self.migration is None else self.migration.attempt
        attempts = (self.attempt, migrating)
        return [a.decode for a in attempts if a is not None and not a.answered]

    @property
    def has_candidates_left(self) -> bool:
        """Whether another worker may be tried in this round, besides the `refused` ones."""
        return len(self.refused) < MAX_CANDIDATES

    def may_migrate(self, now: float) -> bool:
        """Return whether the request generates, and no migration is under way or has just
        failed."""
        return (
            self.stage is Stage.RUNNING
            and self.migration is None
            and self.begun
            and self.num_failed_migrations < MAX_FAILED_MIGRATIONS
            and now >= self.next_migration
        )

    @property
    def only_forwards(self) -> bool:
        """Whether tokens that end no choice change nothing in this state, so that they can be
        forwarded without a step."""
        return (
            self.attempt is not None
            and self.attempt.produced
            and self.stage is Stage.RUNNING
            and self.begun
            and self.migration is None
        )

    @property
    def quiet_until(self) -> float:
        """Time before which TimePassed changes nothing, if the request `only_forwards`."""
        settled = self.attempt is None or self.attempt.sender_died is None
        if self.orphan_since is not None or not settled:
            return 0.0
        return math.inf if self.deadline is None else self.deadline

    def takes_output(self, attempt: bytes) -> bool:
        """Return whether output of that attempt counts now. While the request resumes its current
        attempt, that attempt's output does not: decode repeats what it sent before."""
        is_current = self.attempt is not None and self.attempt.id == attempt
        is_target = self.migration is not None and self.migration.is_target(attempt)
        return is_target or (is_current and self.stage is not Stage.RESUMING)


@dataclass(frozen=True, slots=True)
class Transition:
    """The states before and after one step of the machine. Properties that return an attempt return
    its id, or an empty one."""

    before: Routing
    after: Routing

    @property
    def unanswered(self) -> Counter[bytes]:
        """Change of the number of unanswered Admits, by decode worker."""
        change = Counter(self.after.unanswered)
        change.subtract(self.before.unanswered)
        return change

    @property
    def resumed(self) -> bool:
        """Whether an attempt continues where another session left it."""
        return self.after.num_resumed > self.before.num_resumed

    @property
    def taken(self) -> bytes:
        """The attempt that a decode worker accepted in this step; the worker may have another KV
        identity than the one before."""
        attempt, stage = self.before.attempt, self.after.stage
        admitted = self.before.stage is Stage.ADMITTING and (
            stage is Stage.PREFILLING or stage is Stage.RUNNING
        )
        if attempt is not None and (admitted or self.resumed):
            return attempt.id
        return self.migrated

    @property
    def stopped_following(self) -> bytes:
        """The attempt whose prompt prefill computes, although it was to wait for another prompt."""
        attempt = self.before.attempt
        if attempt is None or not attempt.follows or self.before.stage is not Stage.ADMITTING:
            return b""
        return attempt.id if self.after.stage is Stage.PREFILLING else b""

    @property
    def migration_begun(self) -> bool:
        """Whether a migration began."""
        return self.before.migration is None and self.after.migration is not None

    @property
    def migration_over(self) -> bool:
        """Whether a migration ended, at the target or at the source."""
        return self.before.migration is not None and self.after.migration is None

    @property
    def migrated(self) -> bytes:
        """The attempt at a migration's target, if the request continues there."""
        migration, placed = self.before.migration, self.after.placed_attempt
        return placed if migration is not None and migration.is_target(placed) else b""

    @property
    def failed_step(self) -> str:
        """The step that a failed migration reached; empty if no migration failed."""
        failed = self.after.num_failed_migrations > self.before.num_failed_migrations
        migration = self.before.migration
        return migration.step.value if migration is not None and failed else ""
