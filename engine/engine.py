"""The engine: requests in, steps and their events out. Every method runs on one thread.

Owns the KV pool through its parts: the JobTable says whose each block is, the KvCache holds the
bytes. Every submitted request ends with exactly one Finished or RequestFailed event, but one that
is held and released: a prefill_only one, whose last event is Computed(done), or one that has moved.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdserve.engine.api.errors import InvalidRequest, QueueFull
from pdserve.engine.api.request import Event, Request, Step, prefix_ids
from pdserve.engine.execution.runner import Launched, Model, ModelRunner
from pdserve.engine.execution.sampler import Sampler
from pdserve.engine.kv.block_hash import cache_seed
from pdserve.engine.kv.block_pool import NULL_BLOCK
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.identity import UNKNOWN, KvIdentity
from pdserve.engine.scheduling import reservation as reservations
from pdserve.engine.scheduling.accounting import discrepancy
from pdserve.engine.scheduling.block_tables import BlockTables
from pdserve.engine.scheduling.job_table import JobTable
from pdserve.engine.scheduling.limits import EngineLimits
from pdserve.engine.scheduling.plan import Outcome, Plan
from pdserve.engine.scheduling.request_state import RequestState
from pdserve.engine.scheduling.reservation import Reservation, ReservationState
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.stats import EngineStats, StepMeter
from pdserve.engine.scheduling.step_progress import StepProgress
from pdserve.kernels.streams import SamplingOps

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pending:
    """A launched step. With an error the forward pass has failed."""

    plan: Plan
    launched: Launched | None
    started_s: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A request whose KV can move."""

    num_tokens: int  # leading ones whose KV is in its blocks: all but the last
    cached_tokens: int  # what its Finished would say


class Engine:
    """Continuous batching over one model and one KV pool."""

    def __init__(
        self,
        model: Model,
        kv: KvCache,
        limits: EngineLimits,
        ops: SamplingOps,
        kv_identity: KvIdentity = UNKNOWN,
        numerics_id: str = "",
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
        token_s: float = 0.0,
    ) -> None:
        """`token_s`: what a token of a chunk takes, as far as it is known."""
        self.kv = kv
        self.limits = limits
        self.kv_identity = kv_identity
        self.numerics_id = numerics_id
        self._clock = clock
        tables = BlockTables(kv.spec, kv.num_blocks, prefix_cache)
        # The group that stands for all in figures and prefix events.
        self._main_group = tables.windows.index(0) if 0 in tables.windows else 0
        self._main_pool = tables.pools[self._main_group]
        self._roster = JobTable(tables, limits.max_running)
        self._scheduler = Scheduler(self._roster, limits)
        self._progress = StepProgress(self._roster, limits)
        self._runner = ModelRunner(model, kv, limits.max_running, limits.context_len)
        self._sampler = Sampler(limits, ops)
        self._head = model.logits
        self._meter = StepMeter(token_s)
        self._reservations: dict[str, Reservation] = {}
        self._events: list[Event] = []  # of the next step
        self._arrivals = 0
        self._head_claim = ("", 0)  # key and order of the reservation last refused

    @property
    def has_work(self) -> bool:
        """Whether a request is queued or in the batch, or an event waits to be told."""
        return bool(self._roster.waiting or self._roster.running or self._events)

    def submit(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest, ContextLengthExceeded or QueueFull."""
        job = self._new_job(request)
        if len(self._roster.waiting) >= self.limits.max_waiting:
            raise QueueFull(f"{len(self._roster.waiting)} requests are waiting")
        self._roster.jobs[job.key] = job
        self._roster.waiting[job.key] = job
        self._events += self._progress.start(job)

    def abort(self, key: str, choices: Sequence[int] = ()) -> bool:
        """Ends a request, or some choices of it, in any state; their blocks are free on return.

        Unfinished choices get a last NewTokens with ABORTED in the next step, and Finished follows
        when none is left. An aborted reservation is closed. False if the key is unknown.
        """
        job = self._roster.jobs.get(key)
        if job is None:
            return False
        known = [c for c in choices if 0 <= c < len(job.finish)]
        if choices and not known:
            return True
        self._events += self._progress.abort(job, known)
        if key not in self._roster.jobs and key in self._reservations:
            self._reservations.pop(key).state = ReservationState.ABORTED
        return True

    def park(self, key: str) -> bool:
        """Gives a queued or running request no steps until unpark; it keeps its blocks.

        They are taken only when others lack blocks: then it ends with Evicted, the longest parked
        first. False if it is neither queued nor running.
        """
        job = self._roster.jobs.get(key)
        if job is None or not (key in self._roster.waiting or job in self._roster.running):
            return False
        self._roster.park(job)
        return True

    def unpark(self, key: str) -> bool:
        """A parked request goes on where it was. False if it is not parked."""
        job = self._roster.parked.get(key)
        if job is None:
            return False
        self._roster.unpark(job)
        return True

    def hold(self, key: str) -> Held | None:
        """Gives a request no steps until unhold, and its blocks to nobody: they can be read.

        None, and nothing changes, unless its KV is one chain that lacks only its last token's:
        while a prompt is computed, with several unfinished choices, or without blocks it stays.
        """
        job = self._roster.jobs.get(key)
        if job is None or job.request.prefill_only or key in self._roster.reserved:
            return None
        if len(job.sequences) != 1 or len(job.unfinished) != 1 or job.prompt_scores is not None:
            return None
        if job.sequences[0].num_left != 1:
            return None
        self._roster.hold(job)
        return Held(job.sequences[0].num_computed, job.cached_tokens)

    def unhold(self, key: str) -> bool:
        """A held request goes on where it was. False if it is not held."""
        job = self._roster.held.get(key)
        if job is None or job.request.prefill_only:
            return False
        self._roster.unhold(job)
        return True

    def schedule(self) -> Plan | None:
        """What the next step computes; None when there is nothing to do."""
        plan = self._scheduler.schedule(self._clock(), self._events)
        self._events = []  # not before: if scheduling raises they are told later
        return plan

    def expected_s(self, plan: Plan) -> float:
        """What the step should take at most, as the steps before it did."""
        return self._meter.expected_s(plan)

    def announce(self, plan: Plan) -> Step:
        """What a plan tells before it runs, Scheduled above all, as a step without rows.

        Told here it is not told again by collect. Whoever hears it must leave the engine alone
        until collect: the plan's blocks are spoken for.
        """
        events, plan.events = tuple(plan.events), []
        return Step(self._meter.step + 1, num_tokens=0, num_rows=0, events=events, wall_s=0.0)

    def launch(self, plan: Plan) -> Pending:
        """Starts the step. A model that raises fails the requests of this step only."""
        started_s = self._clock()
        try:
            return Pending(plan, self._runner.launch(plan), started_s)
        except Exception as error:
            log.exception("the forward pass failed")
            return Pending(plan, None, started_s, f"{type(error).__name__}: {error}")

    def collect(self, pending: Pending) -> Step:
        """Waits for the step, samples, and says what has happened."""
        plan = pending.plan
        outcomes: list[Outcome] = []
        error = pending.error
        if pending.launched is not None:
            try:
                outcomes = self._sampler.sample(plan.rows, pending.launched.hidden, self._head)
            except Exception as raised:
                log.exception("sampling failed")
                error = f"{type(raised).__name__}: {raised}"
        events = self._fail_step(plan, error) if error else self._progress.apply(plan, outcomes)
        wall_s = self._clock() - pending.started_s
        self._meter.count(plan, wall_s)
        return Step(
            index=self._meter.step,
            num_tokens=plan.num_tokens,
            num_rows=len(plan.rows),
            events=(*plan.events, *events),
            wall_s=wall_s,
        )

    def step(self) -> Step | None:
        """schedule, launch and collect; None when there is nothing to do."""
        plan = self.schedule()
        return None if plan is None else self.collect(self.launch(plan))

    def fail_all(self, message: str) -> None:
        """Gives up every request that is queued or running; the next step tells."""
        for job in [*self._roster.running, *self._roster.waiting.values()]:
            self._events += self._progress.fail(job, message)

    def reserve(self, request: Request, sender: bytes = b"") -> Reservation | None:
        """Blocks for the prefix that a prefill worker will send, or None if they are short.

        A refused one is the head of the claims and is asked for again before every step. Between
        it and the queue the order of arrival holds: it is refused while an older queued request
        lacks blocks, and while it is refused no younger one gets any. Raises like submit, but the
        queue's bound does not apply.

        `sender`: digest of the KV identity that computes it, if it is another than ours. Then its
        blocks match and enter the prefix cache for that pair of identities only.
        """
        if request.prefill_only or request.params.prompt_logprobs is not None:
            raise InvalidRequest("prompt logprobs are computed where the prompt is", "prompt")
        key, order = self._head_claim
        job = self._new_job(request, order if key == request.key else None, sender)
        if not job.unfinished:
            raise InvalidRequest("every choice has ended", "choices")
        first = self._scheduler.comes_first(job.order)
        made = None if first else reservations.reserve(self._roster, job)
        while made is None and not first and self._scheduler.evict(self._events):
            made = reservations.reserve(self._roster, job)
        if made is None:
            self._head_claim = (job.key, job.order)
            self._scheduler.hold_up(job.order)
            return None
        reservation, copies = made
        self.kv.copy(copies)
        self._roster.jobs[job.key] = job
        self._reservations[job.key] = reservation
        return reservation

    def verified(self, reservation: Reservation, num_tokens: int) -> int:
        """KV of the first `num_tokens` tokens is in its blocks: full ones become a cached prefix.

        Returns the tokens cached so far; they stay cached when the reservation is released.
        Raises ValueError if it is not open, or if it has fewer tokens.
        """
        return reservations.verified(self._roster, reservation, num_tokens)

    def commit(self, reservation: Reservation) -> None:
        """KV of reservation.num_tokens tokens is in its blocks: the request joins the batch."""
        reservations.commit(self._roster, reservation)
        del self._reservations[reservation.key]
        self._events += self._progress.start(reservation.job)

    def release(self, reservation: Reservation) -> None:
        """Frees the blocks; no event. Raises ValueError if it was committed or released before."""
        reservations.release(self._roster, reservation)
        self._reservations.pop(reservation.key, None)

    def chain(self, request: Request) -> list[bytes]:
        """Chain hashes of the full blocks of its prefix; any thread.

        None without a prefix cache, nor with window layers, of which a part of a prompt is no use.
        """
        tables = self._roster.tables
        if any(tables.windows):
            return []
        seed_hash = cache_seed(self.kv_identity.digest, request.cache_salt)
        return tables.hashes(prefix_ids(request), seed_hash)

    def num_found(self, chain: Sequence[bytes]) -> int:
        """How many leading blocks of a chain are in the prefix cache."""
        found = (index for index, link in enumerate(chain) if self._main_pool.find(link) is None)
        return next(found, len(chain))

    def held_blocks(self, key: str) -> list[list[int]]:
        """Blocks per group of a prefill_only request, from Scheduled to release_held or abort, or
        of a held one.

        Block i holds tokens [i * block_size, ...); 0 where the window has passed it.
        Raises KeyError if the request holds none.
        """
        job = self._roster.jobs[key]
        if not job.sequences or not (job.request.prefill_only or key in self._roster.held):
            raise KeyError(key)
        return [list(table) for table in job.sequences[0].block_tables]

    def release_held(self, key: str) -> None:
        """Frees a held request's blocks; no event follows. Raises KeyError if it is not held."""
        self._roster.end(self._roster.held[key])

    def stats(self) -> EngineStats:
        """Figures as they are now."""
        roster = self._roster
        computing = [s for job in roster.running for s in job.sequences if s.num_left > 1]
        return EngineStats(
            running=len(roster.running),
            waiting=len(roster.waiting),
            waiting_tokens=sum(j.num_left for j in roster.waiting.values())
            + sum(s.num_left for s in computing),
            held=len(roster.held),
            reserved=len(roster.reserved),
            parked=len(roster.parked),
            parked_blocks=self._num_blocks(roster.parked.values()),
            held_blocks=self._num_blocks(roster.held.values()),
            oldest_s=self._oldest(),
            blocks=self._main_pool.counts(),
            step=self._meter.step,
            prefill_tokens_s=self._meter.prefill_tokens_s,
            prompt_tokens=self._meter.prompt_tokens,
            generation_tokens=self._progress.generated_tokens,
            recomputed_tokens=self._meter.recomputed_tokens,
            preemptions=roster.preemptions,
            prefix_queries=roster.prefix_queries,
            prefix_hits=roster.prefix_hits,
        )

    def discrepancy(self, recount: bool = False) -> str:
        """What does not add up of its blocks (scheduling/accounting.py); empty if all does."""
        return discrepancy(self._roster, recount)

    def _num_blocks(self, jobs: Iterable[RequestState]) -> int:
        return sum(
            block != NULL_BLOCK
            for job in jobs
            for sequence in job.sequences
            for block in sequence.block_tables[self._main_group]
        )

    def _oldest(self) -> dict[str, float]:
        """By state of blocks: seconds since the oldest request arrived that has some; 0: none."""
        roster, now = self._roster, self._clock()
        return {
            state: max((now - job.arrived_s for job in jobs if job.sequences), default=0.0)
            for state, jobs in (
                ("used", roster.running),
                ("held", roster.held.values()),
                ("parked", roster.parked.values()),
                ("reserved", roster.reserved.values()),
            )
        }

    def take_prefix_events(self) -> tuple[list[bytes], list[bytes]]:
        """Net (added, removed) chain hashes of the first full-attention group since last asked."""
        for pool in self._roster.tables.pools:
            if pool is not self._main_pool:
                pool.take_events()
        return self._main_pool.take_events()

    def _new_job(
        self, request: Request, order: int | None = None, sender: bytes = b""
    ) -> RequestState:
        max_tokens = self.limits.check(request)
        if request.key in self._roster.jobs:
            raise InvalidRequest(f"a request {request.key!r} is under way", "request")
        if order is None:
            self._arrivals += 1
            order = self._arrivals
        seed_hash = cache_seed(sender + self.kv_identity.digest, request.cache_salt)
        return RequestState(request, order, self._clock(), max_tokens, seed_hash)

    def _fail_step(self, plan: Plan, message: str) -> list[Event]:
        jobs = {row.sequence.job.key: row.sequence.job for row in plan.rows}
        return [
            event
            for key, job in jobs.items()
            if self._roster.jobs.get(key) is job
            for event in self._progress.fail(job, message)
        ]
