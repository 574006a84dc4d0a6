"""The engine accepts requests and runs steps that return events.

One thread calls every method, unless its docstring allows others. The engine owns the KV pool
through its parts: the JobTable gains and frees the blocks of requests, the KvCache holds their
bytes. Every submitted request ends with exactly one Finished, RequestFailed or Evicted event,
unless its blocks are held and then released: a prefill_only request, whose last event is
PrefillComputed(done), or a migrated request. After the device is lost, steps raise DeviceLost and
requests get no more events.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdserve.engine.api import Event, InvalidRequest, QueueFull, Request, Step, prefix_ids
from pdserve.engine.constraints import ConstraintManager, has_constraints
from pdserve.engine.constraints.grammars import GrammarBackend, GrammarError
from pdserve.engine.execution import (
    DeviceLost,
    DeviceModel,
    Model,
    ModelRunner,
    Sampler,
    UnreadTokens,
    plan_ahead,
    with_states,
)
from pdserve.engine.kv import UNKNOWN, KvIdentity, cache_seed
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import (
    BlockTables,
    EngineLimits,
    EngineStats,
    JobTable,
    Outcome,
    Plan,
    RequestState,
    Reservation,
    Scheduler,
    StepMeter,
    StepProgress,
    discrepancy,
    is_in_batch,
)
from pdserve.kernels.sampling_ops import SampledTokens, SamplingOps

log = logging.getLogger(__name__)

MAX_REFUSED = 4096  # refused reservations whose arrival order is kept


@dataclass(slots=True)
class Pending:
    """A launched step; `error` is set if its forward pass failed."""

    plan: Plan
    hidden: Any  # what ModelRunner.launch returned; None with an `error`
    started_s: float
    tokens: SampledTokens | None = None  # sampling launched behind it, if rows and backend allow
    error: str = ""


@dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen request, whose KV can be read."""

    num_tokens: int  # leading tokens whose KV is in its blocks: all except the last
    cached_tokens: int  # as in its Finished event


class Engine:
    """Continuous batching over one model and one KV pool. `jobs` is read-only for callers."""

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
        grammars: GrammarBackend | None = None,
    ) -> None:
        """`token_s`: seconds per token of a chunk; 0: unknown. `grammars`: None refuses them."""
        self.model = model
        self.kv = kv
        self.limits = limits
        self.kv_identity = kv_identity
        self.numerics_id = numerics_id
        self._clock = clock
        prefix_cache &= limits.pooling != "mean"  # mean pooling needs the states of all tokens
        tables = BlockTables(kv.spec, kv.num_blocks, limits.chunk_size, prefix_cache)
        self.jobs = JobTable(tables, limits.max_running)
        self._scheduler = Scheduler(self.jobs, limits)
        self._progress = StepProgress(self.jobs, limits)
        self._runner = ModelRunner(model, kv, limits.max_running, limits.context_len)
        self._sampler = Sampler(limits, ops)
        self._constraints = ConstraintManager(limits.vocab_size, limits.eos_ids, grammars)
        self._constrained: list[RequestState] = []  # requests with constraints
        self._meter = StepMeter(token_s)
        self._events: list[Event] = []  # sent with the next step
        self._collected_s = 0.0  # time when the last step was collected
        self._arrivals = 0
        self._refused: dict[str, int] = {}  # refused reservations: key to arrival order

    @property
    def has_work(self) -> bool:
        """Whether a request is queued or in the batch, or an event waits for the next step."""
        return bool(self.jobs.waiting or self.jobs.running or self._events)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, ContextLengthExceeded or QueueFull."""
        job = self._new_job(request)
        if len(self.jobs.waiting) >= self.limits.max_waiting:
            raise QueueFull(f"the queue is full: {len(self.jobs.waiting)} requests are waiting")
        self._constrain(job)
        self.jobs.add(job)
        self._events += self._progress.end_complete(job)

    def abort(self, key: str, choices: Sequence[int] = ()) -> bool:
        """Abort a request, or some of its choices, in any state; their blocks are free on return.

        Each unfinished choice gets a last NewTokens with ABORTED in the next step; Finished follows
        when all choices have ended. Aborting a request aborts its reservation. Returns False if the
        key is unknown.
        """
        job = self.jobs.by_key.get(key)
        if job is None:
            return False
        valid_choices = [c for c in choices if 0 <= c < len(job.finish)]
        if choices and not valid_choices:
            return True
        self._events += self._progress.abort(job, valid_choices)
        return True

    def park(self, key: str) -> bool:
        """Exclude a queued or running request from steps until `unpark`; it keeps its blocks.

        If other requests lack blocks, the longest parked request is the first to lose its blocks,
        and ends with Evicted. Returns False if the request is neither queued nor running.
        """
        job = self.jobs.by_key.get(key)
        if job is None or not (key in self.jobs.waiting or job in self.jobs.running):
            return False
        self.jobs.park(job)
        return True

    def unpark(self, key: str) -> bool:
        """Let a parked request continue where it stopped. Returns False if it is not parked."""
        job = self.jobs.parked.get(key)
        if job is None:
            return False
        self.jobs.unpark(job)
        return True

    def freeze(self, key: str) -> Frozen | None:
        """Exclude a request from steps until `resume`; hold its blocks so that they can be read.

        Returns None and changes nothing unless the request has one sequence that lacks only the KV
        of its last token: not during prefill, with several unfinished choices, or without blocks.
        """
        job = self.jobs.by_key.get(key)
        if job is None or not job.request.generates or key in self.jobs.reserved:
            return None
        if len(job.sequences) != 1 or len(job.unfinished) != 1 or job.prompt_scores is not None:
            return None
        if job.sequences[0].num_left != 1:
            return None
        self.jobs.hold(job)
        return Frozen(job.sequences[0].num_computed, job.cached_tokens)

    def resume(self, key: str) -> bool:
        """Let a frozen request continue where it stopped. Returns False if it is not frozen."""
        job = self.jobs.held.get(key)
        if job is None or job.request.prefill_only:
            return False
        self.jobs.unhold(job)
        return True

    def schedule(self) -> Plan | None:
        """Plan the next step; return None when there is nothing to do."""
        self._poll_constraints()
        plan = self._scheduler.schedule(self._clock(), self._events)
        self._events = []  # only now: if scheduling raises, a later step sends them
        return plan

    def expected_s(self, plan: Plan) -> float:
        """Return the maximum seconds that the step should take, judged by earlier steps."""
        return self._meter.expected_s(plan)

    def announce(self, plan: Plan) -> Step:
        """Return a plan's events, above all Scheduled, as a step without rows, before the plan
        runs.

        `collect` does not repeat them. The receiver must not change the engine before `collect`:
        the plan's rows refer to its blocks.
        """
        events, plan.events = tuple(plan.events), []
        return Step(self._meter.step + 1, events, wall_s=0.0)

    def launch(self, plan: Plan) -> Pending:
        """Start the step. An error fails only its requests. Raises DeviceLost."""
        return self._launch(plan, None)

    def launch_ahead(self, pending: Pending) -> Pending | None:
        """Start the step that follows a launched step, before that step is collected.

        May compute one token past the end of a choice; it is discarded. Returns None if the next
        step cannot be planned before the tokens are known.
        """
        self._poll_constraints()
        if pending.tokens is None or self._events:
            return None
        ahead = plan_ahead(pending.plan, self.jobs)
        if ahead is None:
            return None
        plan, indices = ahead
        return self._launch(plan, UnreadTokens(pending.tokens.tokens, np.array(indices)))

    def _launch(self, plan: Plan, unread: UnreadTokens | None) -> Pending:
        pending = Pending(plan, None, self._clock())
        try:
            pending.hidden = hidden = self._runner.launch(plan, unread)
            if hidden is not None:
                num_unread = int(unread is not None)
                pending.tokens = self._sampler.begin(
                    plan.rows, hidden, self.model.logits, num_unread
                )
        except Exception as error:
            log.exception("the forward pass failed")
            self._synchronize()
            pending.hidden, pending.error = None, f"{type(error).__name__}: {error}"
        return pending

    def collect(self, pending: Pending) -> Step:
        """Wait for the step, sample, and return the step's events."""
        plan = pending.plan
        if pending.hidden is None and plan.rows:
            self._synchronize()  # no read of its output waits for it
        outcomes: list[Outcome] = []
        error = pending.error
        if not error:
            try:
                outcomes = self._outcomes(pending)
            except Exception as raised:
                log.exception("sampling failed")
                self._synchronize()
                error = f"{type(raised).__name__}: {raised}"
        events = self._fail_step(plan, error) if error else self._progress.apply(plan, outcomes)
        self._constraints.start_masks()
        now_s = self._clock()
        wall_s = now_s - max(pending.started_s, self._collected_s)
        self._collected_s = now_s
        self._meter.count(plan, wall_s)
        return Step(self._meter.step, (*plan.events, *events), wall_s)

    def _synchronize(self) -> None:
        """Wait for the device, if there is one. Raises DeviceLost if waiting fails."""
        if isinstance(self.model, DeviceModel):
            try:
                self.model.synchronize()
            except Exception as error:
                raise DeviceLost(f"{type(error).__name__}: {error}") from error

    def _outcomes(self, pending: Pending) -> list[Outcome]:
        if pending.tokens is not None:
            return self._sampler.read(pending.tokens)
        rows = pending.plan.rows
        outcomes = self._sampler.sample(rows, pending.hidden, self.model.logits)
        return with_states(rows, outcomes, pending.hidden, self.model)

    def step(self) -> Step | None:
        """Run schedule, launch and collect; return None when there is nothing to do."""
        plan = self.schedule()
        return None if plan is None else self.collect(self.launch(plan))

    def fail_all(self, message: str) -> None:
        """Fail every queued or running request; the next step sends the events."""
        for job in [*self.jobs.running, *self.jobs.waiting.values()]:
            self._events += self._progress.fail(job, message)

    def reserve(self, request: Request, sender: bytes = b"") -> Reservation | None:
        """Reserve blocks for the prefix a prefill worker will send; return None if they are short.

        The caller retries the first refused request before every step; a refused request keeps the
        arrival order of its first attempt. Reservations and queued requests get blocks in arrival
        order, within a tenant by priority first: a reservation is refused while a queued request
        that precedes it lacks blocks, and while it is refused, no request that it precedes gets
        blocks. Raises the same errors as submit, except that max_waiting does not apply.

        `sender`: digest of the prefill worker's KV identity, if it differs from this engine's. The
        blocks then match and enter the prefix cache for that pair of identities only.
        """
        if request.prefill_only or request.needs_whole_prompt:
            raise InvalidRequest(
                "the worker that generates the output must also compute this prompt", "prompt"
            )
        job = self._new_job(request, self._refused.get(request.key), sender)
        if not job.unfinished:
            raise InvalidRequest("every choice has already ended", "choices")
        must_wait = self._scheduler.must_wait(job)
        reserved = None if must_wait else self.jobs.reserve(job)
        while reserved is None and not must_wait and self._scheduler.evict(self._events):
            reserved = self.jobs.reserve(job)
        if reserved is None:
            self._refused[job.key] = job.order
            if len(self._refused) > MAX_REFUSED:  # the oldest ended without a retry
                del self._refused[next(iter(self._refused))]
            self._scheduler.hold_up(job)
            return None
        self._refused.pop(job.key, None)
        reservation, copies = reserved
        self.kv.copy(copies)
        self._constrain(job)
        return reservation

    def verified(self, reservation: Reservation, num_tokens: int) -> int:
        """Add full blocks of the first `num_tokens` received tokens to the prefix cache.

        Returns the number of tokens cached so far; they stay cached when the reservation is
        released. Raises ValueError if the reservation is not open or has fewer tokens.
        """
        return self.jobs.verified(reservation, num_tokens)

    def commit(self, reservation: Reservation) -> None:
        """Queue the request of a reservation whose blocks have all KV. Raises ValueError if it is
        not open."""
        self.jobs.commit(reservation)
        self._events += self._progress.end_complete(reservation.job)

    def release(self, reservation: Reservation) -> None:
        """Free the blocks of a reservation that is open or was aborted; no event follows. Raises
        ValueError if it was committed or released."""
        self.jobs.release(reservation)

    def chain(self, request: Request) -> list[bytes]:
        """Return the chain hashes of the full blocks of a request's prefix; any thread may call it.
        Empty without a prefix cache, and with window layers, which cannot reuse a part of a
        prompt."""
        tables = self.jobs.tables
        if any(tables.windows):
            return []
        seed_hash = cache_seed(self.kv_identity.digest, request.cache_salt)
        return tables.hashes(prefix_ids(request), seed_hash)

    def num_found(self, chain: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain are in the prefix cache."""
        return self.jobs.tables.num_found(chain)

    def held_blocks(self, key: str) -> list[list[int]]:
        """Return the blocks, per group, of a held request, or of a prefill_only one from Scheduled
        on.

        Block i holds tokens [i * block_size, (i + 1) * block_size); it is 0 if the window has
        passed it. Raises KeyError if the request has no such blocks.
        """
        job = self.jobs.by_key[key]
        if not job.sequences or not (job.request.prefill_only or key in self.jobs.held):
            raise KeyError(key)
        return [list(table) for table in job.sequences[0].block_tables]

    def release_held(self, key: str) -> None:
        """End a held request and free its blocks; no event follows. Raises KeyError if not held."""
        self.jobs.end(self.jobs.held[key])

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Set the callback, for any thread, that a request that waited for its grammar may
        continue."""
        self._constraints.wake = wake

    def load_grammars(self) -> None:
        """Prepare for grammars. Takes about a second, during which no thread of this process runs
        Python; otherwise the first request with a grammar pays that time."""
        self._constraints.load()

    def close(self) -> None:
        """End the threads and the process that grammars use."""
        self._constraints.close()

    def stats(self) -> EngineStats:
        """Return the current statistics."""
        jobs = self.jobs
        computing = [s for job in jobs.running for s in job.sequences if s.num_left > 1]
        return EngineStats(
            running=len(jobs.running),
            waiting=len(jobs.waiting),
            waiting_tokens=sum(j.num_left for j in jobs.waiting.values())
            + sum(s.num_left for s in computing),
            held=len(jobs.held),
            reserved=len(jobs.reserved),
            parked=len(jobs.parked),
            parked_blocks=jobs.num_blocks(jobs.parked.values()),
            held_blocks=jobs.num_blocks(jobs.held.values()),
            oldest_s=self._oldest(),
            blocks=jobs.tables.main_pool.counts(),
            step=self._meter.step,
            prefill_tokens_s=self._meter.prefill_tokens_s,
            prompt_tokens=self._meter.prompt_tokens,
            generation_tokens=self._progress.generated_tokens,
            recomputed_tokens=self._meter.recomputed_tokens,
            preemptions=jobs.preemptions,
            prefix_queries=jobs.prefix_queries,
            prefix_hits=jobs.prefix_hits,
        )

    def discrepancy(self, recount: bool = False) -> str:
        """Describe block inconsistencies (scheduling.discrepancy); empty if there are none."""
        return discrepancy(self.jobs, recount)

    def _oldest(self) -> dict[str, float]:
        """Return, by block state, the seconds since the oldest such request arrived; 0 if none."""
        jobs, now = self.jobs, self._clock()
        return {
            state: max((now - job.arrived_s for job in state_jobs if job.sequences), default=0.0)
            for state, state_jobs in (
                ("used", jobs.running),
                ("held", [*jobs.held.values()]),
                ("parked", [*jobs.parked.values()]),
                ("reserved", [reservation.job for reservation in jobs.reserved.values()]),
            )
        }

    def take_prefix_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return chain hashes (added, removed) since the last call, of the first full group."""
        return self.jobs.tables.take_prefix_events()

    def _new_job(
        self, request: Request, order: int | None = None, sender: bytes = b""
    ) -> RequestState:
        max_tokens = self.limits.check(request)
        self._constraints.check(request)
        if request.key in self.jobs.by_key:
            raise InvalidRequest(
                f"a request with the key {request.key!r} already exists", "request"
            )
        if order is None:
            self._arrivals += 1
            order = self._arrivals
        seed_hash = cache_seed(sender + self.kv_identity.digest, request.cache_salt)
        pooling = self.limits.pooling
        return RequestState(request, order, self._clock(), max_tokens, seed_hash, pooling)

    def _constrain(self, job: RequestState) -> None:
        """Make the constraints of a new job; its grammar compiles in the background."""
        request = job.request
        if has_constraints(request.params) and request.generates:
            job.constraints = self._constraints.of_request(request, job.generated, self._clock())
            job.is_plain = False
            self._constrained.append(job)

    def _poll_constraints(self) -> None:
        """Fail requests with a wrong grammar; end choices that it now shows to be complete."""
        remaining: list[RequestState] = []
        for job in self._constrained:
            constraints = job.constraints
            if constraints is None:
                continue
            try:
                may_continue = not constraints.is_ready and self._is_active(job)
                if may_continue and constraints.poll(self._clock()):
                    self._events += self._progress.end_complete(job)
            except GrammarError as error:
                self._events += self._progress.fail(job, str(error), error.param)
            except Exception as error:
                log.exception("checking the constraints of a request failed")
                message = f"{type(error).__name__}: {error}"
                self._events += self._progress.fail(job, message)
            if self.jobs.by_key.get(job.key) is job:
                remaining.append(job)
            else:
                constraints.release()
        self._constrained = remaining

    def _is_active(self, job: RequestState) -> bool:
        """Whether the job is queued or running."""
        return self.jobs.waiting.get(job.key) is job or job in self.jobs.running

    def _fail_step(self, plan: Plan, message: str) -> list[Event]:
        rows = [row for row in plan.rows if is_in_batch(row)]
        jobs = {row.sequence.job.key: row.sequence.job for row in rows}
        return [
            event
            for key, job in jobs.items()
            if self.jobs.by_key.get(key) is job
            for event in self._progress.fail(job, message)
        ]
