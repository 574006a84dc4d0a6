"""The engine: accepts requests, and runs steps that return events.

All methods are called on one thread, except those whose docstring allows any thread. The engine
owns the KV pool through its parts: the JobTable allocates and frees the blocks of requests, the
KvCache holds their bytes. Every submitted request ends with exactly one Finished, RequestFailed or
Evicted event, with two exceptions: a prefill_only request, whose last event is
PrefillComputed(done=True), and a request that migrates to another engine; `release_held` ends both
without an event. After the device is lost, steps raise DeviceLost and requests get no more events.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.api import Event, InvalidRequest, QueueFull, Request, Step, prefix_ids
from pdserve.engine.constraints import ConstraintManager, has_constraints
from pdserve.engine.constraints.grammars import GrammarBackend, GrammarError, GrammarTimeout
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
    """A step that is launched but not yet collected; `error` is set if its forward pass failed."""

    plan: Plan
    hidden: Any  # what ModelRunner.launch returned; None with an `error`
    started_s: float
    tokens: SampledTokens | None = None  # sampling launched behind it, if rows and backend allow
    error: str = ""


@dataclass(frozen=True, slots=True)
class Frozen:
    """Description of a frozen request (see Engine.freeze), whose KV can be read for a migration."""

    num_tokens: int  # leading tokens whose KV is in its blocks: all except the last
    cached_tokens: int  # as in its Finished event


class Engine:
    """Continuous batching of requests over one model and one KV pool. Callers may read `jobs` but
    must not change it."""

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
        score: Callable[[NDArray[np.float32]], float] | None = None,
    ) -> None:
        """`token_s`: measured seconds per token of a prefill chunk; 0 if unknown. `grammars`: the
        backend that compiles grammars; if None, requests with a grammar are refused. `score`: makes
        the score of a reranker from the pooled state of a prompt."""
        self.model = model
        self.kv = kv
        self.limits = limits
        self.kv_identity = kv_identity
        self.numerics_id = numerics_id
        self._clock = clock
        # Mean and cls need the states of all tokens, so their models have no use for a cache.
        prefix_cache &= limits.pooling in ("", "last")
        tables = BlockTables(kv.spec, kv.num_blocks, limits.chunk_size, prefix_cache)
        self.jobs = JobTable(tables, limits.max_running)
        self._scheduler = Scheduler(self.jobs, limits)
        self._progress = StepProgress(self.jobs, limits, score)
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
        """Queue a request. Raises InvalidRequest, ContextLengthExceeded, or QueueFull if too many
        requests are waiting already."""
        job = self._new_job(request)
        if len(self.jobs.waiting) >= self.limits.max_waiting:
            raise QueueFull(
                f"the engine's queue is full: {len(self.jobs.waiting)} requests are waiting"
            )
        self._constrain(job)
        self.jobs.add(job)
        self._events += self._progress.end_complete(job)

    def abort(self, key: str, choices: Sequence[int] = ()) -> bool:
        """Abort a request in any state, or only some of its choices; free their blocks before
        returning.

        In the next step, each aborted choice that had not ended gets a last NewTokens event with
        the finish reason ABORTED, and the request its Finished event if all its choices have ended.
        Aborting a request also aborts its reservation. Returns False if the key is unknown.
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

        If other requests lack blocks, the request that has been parked longest is dropped with an
        Evicted event. Returns False if the request is neither queued nor running.
        """
        job = self.jobs.by_key.get(key)
        if job is None or not (key in self.jobs.waiting or job in self.jobs.running):
            return False
        self.jobs.park(job)
        return True

    def unpark(self, key: str) -> bool:
        """Return a parked request to the queue, to continue where it stopped. Returns False if the
        request is not parked."""
        job = self.jobs.parked.get(key)
        if job is None:
            return False
        self.jobs.unpark(job)
        return True

    def freeze(self, key: str) -> Frozen | None:
        """Exclude a request from steps until `resume`, and keep its blocks unchanged, so that
        another worker can read them.

        Returns None and changes nothing if the KV is not in a state to migrate: the request must
        have exactly one sequence, which lacks only the KV of its last token. This is not so during
        prefill, with several unfinished choices, or without blocks.
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
        """Let a frozen request continue where it stopped, in this engine. Returns False if it is
        not frozen."""
        job = self.jobs.held.get(key)
        if job is None or job.request.prefill_only:
            return False
        self.jobs.unhold(job)
        return True

    def schedule(self) -> Plan | None:
        """Plan the next step; return None if no request can run and no event waits."""
        self._poll_constraints()
        plan = self._scheduler.schedule(self._clock(), self._events)
        self._events = []  # only now: if scheduling raises, a later step sends them
        return plan

    def expected_s(self, plan: Plan) -> float:
        """Return the number of seconds within which the planned step should end, judged by the
        slowest earlier steps."""
        return self._meter.expected_s(plan)

    def announce(self, plan: Plan) -> Step:
        """Return the events that a plan already has before it runs, mostly Scheduled, as a Step
        without rows; `collect` does not return them again.

        The receiver of the events must not change the engine before `collect`, because the plan's
        rows refer to its blocks.
        """
        events, plan.events = tuple(plan.events), []
        return Step(self._meter.step + 1, events, wall_s=0.0)

    def launch(self, plan: Plan) -> Pending:
        """Start the forward pass of a planned step. If it fails, only the requests of that step
        fail, in `collect`. Raises DeviceLost."""
        return self._launch(plan, None)

    def launch_ahead(self, pending: Pending) -> Pending | None:
        """Start the step that follows the launched step `pending`, before `pending` is collected.

        May compute one token past the end of a choice; it is discarded. Returns None if the next
        step cannot be planned before the tokens of `pending` are known. Raises DeviceLost.
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
            log.exception("the forward pass of a step failed; the step's requests fail")
            self._synchronize()
            pending.hidden, pending.error = None, f"{type(error).__name__}: {error}"
        return pending

    def collect(self, pending: Pending) -> Step:
        """Wait for a launched step, sample its tokens, apply them to the requests, and return the
        step's events. Raises DeviceLost."""
        plan = pending.plan
        if pending.hidden is None and plan.rows:
            self._synchronize()  # no read of its output waits for it
        outcomes: list[Outcome] = []
        error = pending.error
        if not error:
            try:
                outcomes = self._outcomes(pending)
            except Exception as raised:
                log.exception("sampling a step's tokens failed; the step's requests fail")
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
        """Wait for all work launched on the device; do nothing for a model on the CPU. Raises
        DeviceLost if waiting fails."""
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
        """Run one whole step: schedule, launch and collect. Return None if there is nothing to
        do."""
        plan = self.schedule()
        return None if plan is None else self.collect(self.launch(plan))

    def fail_all(self, message: str) -> None:
        """Fail every queued or running request with this message; the next step sends their
        RequestFailed events."""
        for job in [*self.jobs.running, *self.jobs.waiting.values()]:
            self._events += self._progress.fail(job, message)

    def reserve(self, request: Request, sender: bytes = b"") -> Reservation | None:
        """Reserve blocks for the prefix of a request whose KV a prefill worker will send; return
        None if blocks are short, that is, if the reservation is refused.

        The caller retries the first refused reservation before every step; it keeps the arrival
        order of its first attempt. Reservations and queued requests get blocks in the order of
        their arrival, and within a tenant by priority first. So a reservation is refused while a
        queued request that precedes it lacks blocks; and after a refusal, queued requests behind
        the refused one get no blocks in the next step. Raises the same errors as `submit`, except
        that the queue's limit does not apply.

        `sender`: digest of the prefill worker's KV identity if it differs from this engine's. The
        prefix cache then shares the blocks only with requests that have the same `sender`.
        """
        if request.prefill_only or request.needs_whole_prompt:
            raise InvalidRequest(
                "the worker that generates the output must also compute this prompt; it cannot "
                "receive the prompt's KV from a prefill worker",
                "prompt",
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
        """Add the full blocks of a reservation's first `num_tokens` tokens, which have been
        received and verified, to the prefix cache.

        Returns the number of the prefix's tokens cached so far; their blocks stay cached if the
        reservation is released. Raises ValueError if the reservation is not open or has fewer than
        `num_tokens` tokens.
        """
        return self.jobs.verified(reservation, num_tokens)

    def commit(self, reservation: Reservation) -> None:
        """Queue the request of a reservation whose blocks have been filled completely. Raises
        ValueError if the reservation is not open."""
        self.jobs.commit(reservation)
        self._events += self._progress.end_complete(reservation.job)

    def release(self, reservation: Reservation) -> None:
        """Free the blocks of an open reservation and drop its request; no event follows. Does
        nothing if the reservation was aborted; raises ValueError if it was committed or
        released."""
        self.jobs.release(reservation)

    def chain(self, request: Request) -> list[bytes]:
        """Return the chain hashes of the full blocks of a request's prefix (prefix_ids); any thread
        may call this method. Returns an empty list if the prefix cache is disabled or the model has
        window layers, which cannot reuse a part of a prompt."""
        tables = self.jobs.tables
        if any(tables.windows):
            return []
        seed_hash = cache_seed(self.kv_identity.digest, request.cache_salt)
        return tables.hashes(prefix_ids(request), seed_hash)

    def num_found(self, chain: Sequence[bytes]) -> int:
        """Return how many blocks at the start of a chain, given by their hashes, are in the prefix
        cache."""
        return self.jobs.tables.num_found(chain)

    def held_blocks(self, key: str) -> list[list[int]]:
        """Return the blocks of a request in each layer group, so that a KV transfer can read them.
        The request must be held, or be a prefill_only request that has been scheduled.

        Block i of a group holds tokens [i * block_size, (i + 1) * block_size); it is 0 if the
        attention window has passed these tokens. Raises KeyError if the request is unknown, has no
        blocks or is not of these kinds.
        """
        job = self.jobs.by_key[key]
        if not job.sequences or not (job.request.prefill_only or key in self.jobs.held):
            raise KeyError(key)
        return [list(table) for table in job.sequences[0].block_tables]

    def release_held(self, key: str) -> None:
        """End a held request and free its blocks; no event follows. Raises KeyError if the request
        is not held."""
        self.jobs.end(self.jobs.held[key])

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Set the callback that is called when a request that waited for its grammar may continue.
        It may be called on any thread."""
        self._constraints.wake = wake

    def load_grammars(self) -> None:
        """Prepare the tokenizer for grammars, so that the first request with a grammar need not
        wait for it. Takes about a second, during which no thread of this process runs Python."""
        self._constraints.load()

    def close(self) -> None:
        """End the threads and the sandbox process that grammars use."""
        self._constraints.close()

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's statistics."""
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
        """Describe the first inconsistency between the block pools and the requests; empty if there
        is none. `recount`: also compare all reference counts, which takes longer."""
        return discrepancy(self.jobs, recount)

    def _oldest(self) -> dict[str, float]:
        """Return the age in seconds, since arrival, of the oldest request that holds blocks, for
        each state of requests: "used", "held", "parked" and "reserved"; 0 for a state without such
        requests."""
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
        """Return the chain hashes that the prefix cache has gained and lost since the last call, as
        (added, removed). In a model with several layer groups they are those of the first group
        with full attention."""
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
        pooling = self.limits.pooling or self.limits.pool
        return RequestState(request, order, self._clock(), max_tokens, seed_hash, pooling)

    def _constrain(self, job: RequestState) -> None:
        """Make the constraints of a new request, if it has any; its grammar is compiled on another
        thread."""
        request = job.request
        if has_constraints(request.params) and request.generates:
            job.constraints = self._constraints.of_request(request, job.generated, self._clock())
            job.is_plain = False
            self._constrained.append(job)

    def _poll_constraints(self) -> None:
        """Check the requests that wait for their grammars: fail those whose grammar is wrong, and
        end choices whose grammar shows them to be complete."""
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
                is_overload = isinstance(error, GrammarTimeout)
                self._events += self._progress.fail(job, str(error), error.param, is_overload)
            except Exception as error:
                log.exception("checking the constraints of a request failed; the request fails")
                message = f"{type(error).__name__}: {error}"
                self._events += self._progress.fail(job, message)
            if self.jobs.by_key.get(job.key) is job:
                remaining.append(job)
            else:
                constraints.release()
        self._constrained = remaining

    def _is_active(self, job: RequestState) -> bool:
        """Whether the request is queued or running."""
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
