"""The engine takes requests and makes steps with events. Every method runs on one thread.

It owns the KV pool through its parts: the JobTable gains and loses the blocks of requests, the
KvCache holds their bytes. Every submitted request ends with exactly one Finished, RequestFailed or
Evicted event, unless it is held and released: a prefill_only request, whose last event is
PrefillComputed(done), or one that has migrated. Steps raise DeviceLost once the device is lost, and
requests have no more events then.

Over 400 lines: one class that all callers share, whose methods say what they promise.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdserve.engine.api.errors import InvalidRequest, QueueFull
from pdserve.engine.api.request import Event, Request, Step, prefix_ids
from pdserve.engine.constraints.grammars.backend import GrammarBackend
from pdserve.engine.constraints.grammars.compiled import GrammarError
from pdserve.engine.constraints.manager import ConstraintManager, has_constraints
from pdserve.engine.execution.ahead import plan_ahead
from pdserve.engine.execution.batch import UnreadTokens
from pdserve.engine.execution.pooler import with_states
from pdserve.engine.execution.runner import DeviceLost, DeviceModel, Model, ModelRunner
from pdserve.engine.execution.sampler import Sampler
from pdserve.engine.kv.block_hash import cache_seed
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.identity import UNKNOWN, KvIdentity
from pdserve.engine.scheduling.accounting import discrepancy
from pdserve.engine.scheduling.block_tables import BlockTables
from pdserve.engine.scheduling.job_table import JobTable
from pdserve.engine.scheduling.limits import EngineLimits
from pdserve.engine.scheduling.plan import Outcome, Plan
from pdserve.engine.scheduling.request_state import RequestState
from pdserve.engine.scheduling.reservation import Reservation
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.stats import EngineStats, StepMeter
from pdserve.engine.scheduling.step_progress import StepProgress, is_in_batch
from pdserve.kernels.streams import Picks, SamplingOps

log = logging.getLogger(__name__)

MAX_REFUSED = 4096  # refused reservations that keep their order of arrival


@dataclass(slots=True)
class Pending:
    """A launched step; with an `error` its forward pass has failed."""

    plan: Plan
    hidden: Any  # what ModelRunner.launch returned; None with an `error`
    started_s: float
    picks: Picks | None = None  # launched behind it, if its rows are such that it can be
    error: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A held request, whose KV can be read."""

    num_tokens: int  # leading tokens whose KV is in its blocks: all but the last
    cached_tokens: int  # what its Finished event would say


class Engine:
    """Continuous batching over one model and one KV pool.

    `jobs` is for reading: whoever wants to change a request calls a method of the engine.
    """

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
        """`token_s`: seconds that one token of a chunk takes, if known; 0 otherwise.

        Without `grammars` requests that have one are refused.
        """
        self.model = model
        self.kv = kv
        self.limits = limits
        self.kv_identity = kv_identity
        self.numerics_id = numerics_id
        self._clock = clock
        prefix_cache &= limits.pooling != "mean"  # which needs the states of all tokens
        tables = BlockTables(kv.spec, kv.num_blocks, limits.chunk_size, prefix_cache)
        self.jobs = JobTable(tables, limits.max_running)
        self._scheduler = Scheduler(self.jobs, limits)
        self._progress = StepProgress(self.jobs, limits)
        self._runner = ModelRunner(model, kv, limits.max_running, limits.context_len)
        self._sampler = Sampler(limits, ops)
        self._constraints = ConstraintManager(limits.vocab_size, limits.eos_ids, grammars)
        self._constrained: list[RequestState] = []  # those with constraints
        self._meter = StepMeter(token_s)
        self._events: list[Event] = []  # of the next step
        self._collected_s = 0.0  # when the last step was
        self._arrivals = 0
        self._refused: dict[str, int] = {}  # key to order of arrival, of refused reservations

    @property
    def has_work(self) -> bool:
        """Whether a request is queued or in the batch, or an event waits for the next step."""
        return bool(self.jobs.waiting or self.jobs.running or self._events)

    def submit(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest, ContextLengthExceeded or QueueFull."""
        job = self._new_job(request)
        if len(self.jobs.waiting) >= self.limits.max_waiting:
            raise QueueFull(f"{len(self.jobs.waiting)} requests are waiting")
        self._constrain(job)
        self.jobs.add(job)
        self._events += self._progress.end_complete(job)

    def abort(self, key: str, choices: Sequence[int] = ()) -> bool:
        """Ends a request, or some choices of it, in any state; their blocks are free on return.

        Unfinished choices get a last NewTokens with ABORTED in the next step, and Finished follows
        when none is left. A reservation is aborted with its request. False if the key is unknown.
        """
        job = self.jobs.by_key.get(key)
        if job is None:
            return False
        known = [c for c in choices if 0 <= c < len(job.finish)]
        if choices and not known:
            return True
        self._events += self._progress.abort(job, known)
        return True

    def park(self, key: str) -> bool:
        """Gives a queued or running request no steps until unpark; it keeps its blocks.

        When others lack blocks it loses them and ends with Evicted; the longest parked request is
        the first. False if it is neither queued nor running.
        """
        job = self.jobs.by_key.get(key)
        if job is None or not (key in self.jobs.waiting or job in self.jobs.running):
            return False
        self.jobs.park(job)
        return True

    def unpark(self, key: str) -> bool:
        """Lets a parked request go on where it was. False if it is not parked."""
        job = self.jobs.parked.get(key)
        if job is None:
            return False
        self.jobs.unpark(job)
        return True

    def hold(self, key: str) -> Held | None:
        """Gives a request no steps until unhold, and nobody else its blocks, so they can be read.

        Returns None, and nothing changes, unless it has one sequence that lacks only the KV of its
        last token: not while its prompt is computed, with several unfinished choices, or without
        blocks.
        """
        job = self.jobs.by_key.get(key)
        if job is None or not job.request.generates or key in self.jobs.reserved:
            return None
        if len(job.sequences) != 1 or len(job.unfinished) != 1 or job.prompt_scores is not None:
            return None
        if job.sequences[0].num_left != 1:
            return None
        self.jobs.hold(job)
        return Held(job.sequences[0].num_computed, job.cached_tokens)

    def unhold(self, key: str) -> bool:
        """Lets a held request go on where it was. False if it is not held."""
        job = self.jobs.held.get(key)
        if job is None or job.request.prefill_only:
            return False
        self.jobs.unhold(job)
        return True

    def schedule(self) -> Plan | None:
        """What the next step computes; None when there is nothing to do."""
        self._poll_constraints()
        plan = self._scheduler.schedule(self._clock(), self._events)
        self._events = []  # only now: if scheduling raises, a later step has them
        return plan

    def expected_s(self, plan: Plan) -> float:
        """Seconds that the step should take at most, judging by the steps before it."""
        return self._meter.expected_s(plan)

    def announce(self, plan: Plan) -> Step:
        """The events that a plan has before it runs, Scheduled above all, as a step without rows.

        `collect` does not repeat them. Whoever receives them must not change the engine before
        `collect`: the plan's rows refer to its blocks.
        """
        events, plan.events = tuple(plan.events), []
        return Step(self._meter.step + 1, events, wall_s=0.0)

    def launch(self, plan: Plan) -> Pending:
        """Starts the step. A model that raises fails the requests of this step only, or raises
        DeviceLost."""
        return self._launch(plan, None)

    def launch_ahead(self, pending: Pending) -> Pending | None:
        """Starts the step that follows a launched one, before that is collected. It may compute a
        token too many of a choice, which nobody is told.

        None if the next step has to be planned when the tokens are known.
        """
        self._poll_constraints()
        if pending.picks is None or self._events:
            return None
        found = plan_ahead(pending.plan, self.jobs)
        if found is None:
            return None
        plan, picks = found
        return self._launch(plan, UnreadTokens(pending.picks.tokens, np.array(picks)))

    def _launch(self, plan: Plan, unread: UnreadTokens | None) -> Pending:
        pending = Pending(plan, None, self._clock())
        try:
            pending.hidden = hidden = self._runner.launch(plan, unread)
            if hidden is not None:
                num_unread = int(unread is not None)
                pending.picks = self._sampler.begin(
                    plan.rows, hidden, self.model.logits, num_unread
                )
        except Exception as error:
            log.exception("the forward pass failed")
            self._synchronize()
            pending.hidden, pending.error = None, f"{type(error).__name__}: {error}"
        return pending

    def collect(self, pending: Pending) -> Step:
        """Waits for the step, samples, and returns what has happened."""
        plan = pending.plan
        if pending.hidden is None and plan.rows:
            self._synchronize()  # nothing of it is read
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
        """Waits for the device, if there is one. Raises DeviceLost if it cannot even do that."""
        if isinstance(self.model, DeviceModel):
            try:
                self.model.synchronize()
            except Exception as error:
                raise DeviceLost(f"{type(error).__name__}: {error}") from error

    def _outcomes(self, pending: Pending) -> list[Outcome]:
        if pending.picks is not None:
            return self._sampler.read(pending.picks)
        rows = pending.plan.rows
        outcomes = self._sampler.sample(rows, pending.hidden, self.model.logits)
        return with_states(rows, outcomes, pending.hidden, self.model)

    def step(self) -> Step | None:
        """schedule, launch and collect; None when there is nothing to do."""
        plan = self.schedule()
        return None if plan is None else self.collect(self.launch(plan))

    def fail_all(self, message: str) -> None:
        """Fails every request that is queued or running; the next step has the events."""
        for job in [*self.jobs.running, *self.jobs.waiting.values()]:
            self._events += self._progress.fail(job, message)

    def reserve(self, request: Request, sender: bytes = b"") -> Reservation | None:
        """Reserves blocks for the prefix that a prefill worker will send; None if they are short.

        The caller asks again before every step for the first of those that were refused; each keeps
        the order of arrival that it had when it was first asked for. Between it and the queue the
        order of arrival holds, and within a tenant that of priority before it: it is refused while
        a queued request that precedes it lacks blocks, and while it is refused none that it
        precedes gets any.
        Raises like submit, but max_waiting does not apply.

        `sender`: digest of the KV identity that computes it, if it is not ours. Its blocks then
        match and enter the prefix cache for that pair of identities only.
        """
        if request.prefill_only or request.needs_whole_prompt:
            raise InvalidRequest("its output needs the prompt to be computed here", "prompt")
        job = self._new_job(request, self._refused.get(request.key), sender)
        if not job.unfinished:
            raise InvalidRequest("every choice has ended", "choices")
        waits = self._scheduler.must_wait(job)
        made = None if waits else self.jobs.reserve(job)
        while made is None and not waits and self._scheduler.evict(self._events):
            made = self.jobs.reserve(job)
        if made is None:
            self._refused[job.key] = job.order
            if len(self._refused) > MAX_REFUSED:  # the oldest have ended without asking again
                del self._refused[next(iter(self._refused))]
            self._scheduler.hold_up(job)
            return None
        self._refused.pop(job.key, None)
        reservation, copies = made
        self.kv.copy(copies)
        self._constrain(job)
        return reservation

    def verified(self, reservation: Reservation, num_tokens: int) -> int:
        """KV of the first `num_tokens` tokens is in its blocks: full blocks enter the prefix cache.

        Returns the tokens cached so far; they stay cached when the reservation is released.
        Raises ValueError if it is not open, or if it has fewer tokens.
        """
        return self.jobs.verified(reservation, num_tokens)

    def commit(self, reservation: Reservation) -> None:
        """KV of reservation.num_tokens tokens is in its blocks: the request joins the queue.

        Raises ValueError if the reservation is not open.
        """
        self.jobs.commit(reservation)
        self._events += self._progress.end_complete(reservation.job)

    def release(self, reservation: Reservation) -> None:
        """Frees the blocks of a reservation that is open or was aborted; no event follows.

        Raises ValueError if it was committed or released before.
        """
        self.jobs.release(reservation)

    def chain(self, request: Request) -> list[bytes]:
        """Chain hashes of the full blocks of its prefix; any thread may call it.

        Empty without a prefix cache. Empty with window layers, since they cannot use a part of a
        prompt.
        """
        tables = self.jobs.tables
        if any(tables.windows):
            return []
        seed_hash = cache_seed(self.kv_identity.digest, request.cache_salt)
        return tables.hashes(prefix_ids(request), seed_hash)

    def num_found(self, chain: Sequence[bytes]) -> int:
        """How many leading blocks of a chain are in the prefix cache."""
        return self.jobs.tables.num_found(chain)

    def held_blocks(self, key: str) -> list[list[int]]:
        """The blocks per group of a held request, or of a prefill_only one from Scheduled on.

        Block i holds tokens [i * block_size, ...); it is 0 where the window has passed it.
        Raises KeyError if the request has no such blocks.
        """
        job = self.jobs.by_key[key]
        if not job.sequences or not (job.request.prefill_only or key in self.jobs.held):
            raise KeyError(key)
        return [list(table) for table in job.sequences[0].block_tables]

    def release_held(self, key: str) -> None:
        """Frees a held request's blocks; no event follows. Raises KeyError if it is not held."""
        self.jobs.end(self.jobs.held[key])

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when a request that had to wait for its grammar or its
        mask may go on: what schedule has to do may have changed."""
        self._constraints.wake = wake

    def load_grammars(self) -> None:
        """Makes ready for grammars. It takes a second or so, in which no thread of this process
        runs Python; without it the first request with a grammar costs that."""
        self._constraints.load()

    def close(self) -> None:
        """Ends the threads and the process that grammars need."""
        self._constraints.close()

    def stats(self) -> EngineStats:
        """The figures of this moment."""
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
        """What does not add up of its blocks (scheduling/accounting.py); empty if all does."""
        return discrepancy(self.jobs, recount)

    def _oldest(self) -> dict[str, float]:
        """By state of its blocks: seconds since the oldest such request arrived; 0 without one."""
        jobs, now = self.jobs, self._clock()
        return {
            state: max((now - job.arrived_s for job in found if job.sequences), default=0.0)
            for state, found in (
                ("used", jobs.running),
                ("held", [*jobs.held.values()]),
                ("parked", [*jobs.parked.values()]),
                ("reserved", [reservation.job for reservation in jobs.reserved.values()]),
            )
        }

    def take_prefix_events(self) -> tuple[list[bytes], list[bytes]]:
        """Net (added, removed) chain hashes of the first full-attention group since the last
        call."""
        return self.jobs.tables.take_prefix_events()

    def _new_job(
        self, request: Request, order: int | None = None, sender: bytes = b""
    ) -> RequestState:
        max_tokens = self.limits.check(request)
        self._constraints.check(request)
        if request.key in self.jobs.by_key:
            raise InvalidRequest(f"a request {request.key!r} is under way", "request")
        if order is None:
            self._arrivals += 1
            order = self._arrivals
        seed_hash = cache_seed(sender + self.kv_identity.digest, request.cache_salt)
        pooling = self.limits.pooling
        return RequestState(request, order, self._clock(), max_tokens, seed_hash, pooling)

    def _constrain(self, job: RequestState) -> None:
        """Makes the constraints of a new job; a grammar is compiled meanwhile."""
        request = job.request
        if has_constraints(request.params) and request.generates:
            job.constraints = self._constraints.of_request(request, job.generated, self._clock())
            job.is_plain = False
            self._constrained.append(job)

    def _poll_constraints(self) -> None:
        """Ends what a grammar ends without a token: requests whose grammar is wrong, and choices
        that were complete before it could say so."""
        left: list[RequestState] = []
        for job in self._constrained:
            constraints = job.constraints
            if constraints is None:
                continue
            try:
                may_go_on = not constraints.is_ready and self._is_active(job)
                if may_go_on and constraints.poll(self._clock()):
                    self._events += self._progress.end_complete(job)
            except GrammarError as error:
                self._events += self._progress.fail(job, str(error), error.param)
            except Exception as error:
                log.exception("the constraints of a request failed")
                text = f"{type(error).__name__}: {error}"
                self._events += self._progress.fail(job, text)
            if self.jobs.by_key.get(job.key) is job:
                left.append(job)
            else:
                constraints.release()
        self._constrained = left

    def _is_active(self, job: RequestState) -> bool:
        """Whether it waits for steps, or has them."""
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
