"""State of one request in the router (Routing), what a step of the state machine changed in it
(Transition), and the timing of the request's first token; pure. The state is frozen, and only
machine.py constructs its successors.

The time to the first token spans all attempts. Its phases are those of the attempt that produced
the first token; the time before that attempt's Admit (in the router's queue or with lost attempts)
counts as queueing.
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
    """Times of one request up to its first token: its arrival, the beginning of the attempt that
    produced the token, and the token's arrival."""

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._attempt = b""  # the one that gave the first token
        self._began = 0.0  # when its Admit was sent
        self._received = 0.0

    def record(self, attempt: bytes, began: float, now: float) -> bool:
        """Record that tokens of an attempt arrived; only the first call has an effect. Returns
        whether these tokens are the request's first. `began`: when the attempt's Admit was sent."""
        if self._attempt:
            return False
        self._attempt, self._began, self._received = attempt, began, now
        return True

    def complete(self, phases: pb.Phases, attempt: bytes) -> None:
        """Turn the phases that the finished attempt reported into those of the whole request, whose
        sum (without `route_s`, a part of `queue_s`) is the time to its first token. No effect if
        another router began the attempt that produced the first token."""
        if not self._attempt:
            return
        if self._attempt != attempt:
            phases.CopyFrom(pb.Phases(prefill_s=self._received - self._began))
        phases.route_s = self._began - self._arrived
        phases.queue_s += phases.route_s


@dataclass(slots=True)
class Beginning:
    """What the router knows of a request up to its first token: its times, how many prompt tokens
    were cached, and the report of the attempt that the request migrated from."""

    token: FirstToken
    hit: int | None = None  # tokens cached before decode verified the first block
    expected: int | None = None  # the same, as the router knew it at the first attempt
    first: pb.Finished | None = None  # report of the attempt that the request migrated from

    def migrated(self, so_far: pb.Finished, num_attempts: int, attempt: bytes) -> None:
        """Record that the request migrates away from `attempt`. `so_far`: the report of the source
        on the request's beginning."""
        self.complete(so_far, num_attempts, attempt)
        self.first = so_far

    def complete(self, finished: pb.Finished, num_attempts: int, attempt: bytes) -> None:
        """Add to the report `finished` what the worker of the last attempt (`attempt`) cannot know
        of the request's beginning: times, cached tokens, and data from before a migration."""
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
    """Stage of a request in the router (diagram in machine.py)."""

    QUEUED = "queued"
    SEEKING = "seeking"
    RESUMING = "resuming"
    ADMITTING = "admitting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"


class MigrationStep(Enum):
    """Step that a migration under way has reached (diagram in migration_machine.py)."""

    HOLDING = "holding"
    ADMITTING = "admitting"
    SENDING = "sending"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to run a request on a decode worker and perhaps a prefill worker, as far as the
    router knows."""

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
        """Whether the prefill worker may lack the attempt's PrefillStart, or its messages may have
        been lost, so that PrefillStart must be sent again."""
        return not self.prefill_over and (not self.prefill or self.unheard)

    @property
    def sending_prefill(self) -> bytes:
        """Incarnation of the prefill worker that computes and sends the attempt's KV; empty if none
        does."""
        return self.prefill or self.awaited_prefill

    @property
    def filled(self) -> bool:
        """Whether decode is known to have all KV of the attempt's prompt."""
        return self.produced or self.prefill_sent

    @property
    def computing(self) -> bool:
        """Whether decode may be computing the attempt: it has all KV of the prompt, or computes the
        prompt itself."""
        return self.filled or not (self.prefill or self.ticket or self.follows)


@dataclass(frozen=True, slots=True)
class Migration:
    """State of the move of a running request from its decode worker to another one, the target."""

    target: bytes
    began: float
    step: MigrationStep = MigrationStep.HOLDING
    attempt: Attempt | None = None  # at the target
    target_lost: bool = False  # the session with it broke, but it keeps the attempt

    def is_target(self, attempt: bytes) -> bool:
        """Return whether `attempt` is the id of the migration's attempt at the target."""
        return self.attempt is not None and self.attempt.id == attempt


@dataclass(frozen=True, slots=True)
class Routing:
    """State of one request in the router, except its token ids, which RequestProgress holds."""

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
        """Epoch of the request at its decode worker, which gives the attempt to the highest one. It
        rises each time that the client issues the request, and each time that a session with the
        worker is lost."""
        return self.epoch * MAX_SESSIONS + self.num_sessions

    @property
    def unanswered(self) -> list[bytes]:
        """Incarnations of the decode workers that have yet to answer an Admit of the request."""
        migrating = None if self.migration is None else self.migration.attempt
        attempts = (self.attempt, migrating)
        return [a.decode for a in attempts if a is not None and not a.answered]

    @property
    def has_candidates_left(self) -> bool:
        """Whether the request may try another decode worker before it queues: fewer than
        MAX_CANDIDATES have refused it in this round."""
        return len(self.refused) < MAX_CANDIDATES

    def may_migrate(self, now: float) -> bool:
        """Return whether the request may begin to migrate now: it generates, no migration of it is
        under way, and none has just failed or too often."""
        return (
            self.stage is Stage.RUNNING
            and self.migration is None
            and self.begun
            and self.num_failed_migrations < MAX_FAILED_MIGRATIONS
            and now >= self.next_migration
        )

    @property
    def only_forwards(self) -> bool:
        """Whether a token that ends no choice changes nothing in this state, so that it can be
        forwarded to the client without a step of the state machine."""
        return (
            self.attempt is not None
            and self.attempt.produced
            and self.stage is Stage.RUNNING
            and self.begun
            and self.migration is None
        )

    @property
    def quiet_until(self) -> float:
        """Time before which the event TimePassed changes nothing in this state, provided that it is
        one that `only_forwards`."""
        settled = self.attempt is None or self.attempt.sender_died is None
        if self.orphan_since is not None or not settled:
            return 0.0
        return math.inf if self.deadline is None else self.deadline

    def takes_output(self, attempt: bytes) -> bool:
        """Return whether the output of that attempt counts now: it is the current attempt or the
        one at a migration's target. The current attempt's output does not count while the attempt
        is being resumed, because decode repeats it afterwards."""
        is_current = self.attempt is not None and self.attempt.id == attempt
        is_target = self.migration is not None and self.migration.is_target(attempt)
        return is_target or (is_current and self.stage is not Stage.RESUMING)


@dataclass(frozen=True, slots=True)
class Transition:
    """The states of a request before and after one step of its state machine, with properties that
    say what changed. A property that returns an attempt returns its id, or an empty id."""

    before: Routing
    after: Routing

    @property
    def unanswered(self) -> Counter[bytes]:
        """Change in the number of the request's unanswered Admits, by incarnation of the decode
        worker."""
        change = Counter(self.after.unanswered)
        change.subtract(self.before.unanswered)
        return change

    @property
    def resumed(self) -> bool:
        """Whether an attempt was resumed in this step: it continues where another session left
        it."""
        return self.after.num_resumed > self.before.num_resumed

    @property
    def taken(self) -> bytes:
        """Id of the attempt that a decode worker accepted in this step. The worker's KV identity
        may differ from that of the request's worker before."""
        attempt, stage = self.before.attempt, self.after.stage
        admitted = self.before.stage is Stage.ADMITTING and (
            stage is Stage.PREFILLING or stage is Stage.RUNNING
        )
        if attempt is not None and (admitted or self.resumed):
            return attempt.id
        return self.migrated

    @property
    def stopped_following(self) -> bytes:
        """Id of the attempt that was to wait for another prompt's KV, but whose prompt a prefill
        worker computes instead."""
        attempt = self.before.attempt
        if attempt is None or not attempt.follows or self.before.stage is not Stage.ADMITTING:
            return b""
        return attempt.id if self.after.stage is Stage.PREFILLING else b""

    @property
    def migration_begun(self) -> bool:
        """Whether a migration of the request began in this step."""
        return self.before.migration is None and self.after.migration is not None

    @property
    def migration_over(self) -> bool:
        """Whether the request's migration ended in this step, completed or not."""
        return self.before.migration is not None and self.after.migration is None

    @property
    def migrated(self) -> bytes:
        """Id of the attempt at the migration's target, if the request has moved to it in this
        step."""
        migration, placed = self.before.migration, self.after.placed_attempt
        return placed if migration is not None and migration.is_target(placed) else b""

    @property
    def failed_step(self) -> str:
        """Name of the step in which a migration failed; empty if no migration failed in this
        transition."""
        failed = self.after.num_failed_migrations > self.before.num_failed_migrations
        migration = self.before.migration
        return migration.step.value if migration is not None and failed else ""
