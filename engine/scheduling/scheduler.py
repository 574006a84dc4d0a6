"""Decides what each step computes: decode rows first, then prefill chunks, under a token budget.

Pure: time is an argument. A prefill chunk ends at a multiple of the chunk size counted from token
0, so the tokens that are computed together do not depend on the load. Tenants take turns (Turns).
Within a tenant the lowest priority value comes first, however long other requests wait. Prompts of
equal priority are ordered by waiting time divided by length (highest response ratio, Brinch Hansen
1971): a short prompt soon passes a long one, none starves, and of two equally long ones the older
comes first.

While several tenants are active, each has a share of a step, in decode rows and in prompt tokens,
so that the first token of one tenant's request does not wait long for steps that another tenant
fills. A chunk larger than the share runs if it is the first of its step. Fairness records what a
step owes to the requests that the previous step passed over.

When blocks run out, parked requests are evicted, the longest parked first. Then the youngest
request, or one of the same tenant with a higher priority value, is preempted: it loses its blocks,
keeps its tokens, and its KV is computed again later.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import chain

from pdserve.engine.api import Event, Evicted, PrefillComputed, Scheduled
from pdserve.engine.scheduling.fairness import Fairness, Turns, by_priority
from pdserve.engine.scheduling.job_table import JobTable
from pdserve.engine.scheduling.limits import EngineLimits
from pdserve.engine.scheduling.plan import Plan, Row
from pdserve.engine.scheduling.request_state import RequestState, Sequence


class Scheduler:
    """Plans engine steps over the requests of a JobTable. StepProgress applies their outcomes."""

    def __init__(self, jobs: JobTable, limits: EngineLimits) -> None:
        self._jobs = jobs
        self._limits = limits
        self._turns = Turns()
        self._fairness = Fairness()

    def must_wait(self, reserving: RequestState) -> bool:
        """Whether a reservation of blocks must wait because a queued request that lacks blocks
        precedes it. `reserving`: the request to reserve for."""
        return self._fairness.must_wait(reserving)

    def hold_up(self, refused: RequestState) -> None:
        """Record the request whose reservation of blocks was refused; in the next step no queued
        request after it gets blocks."""
        self._fairness.refuse(refused)

    def evict(self, events: list[Event]) -> bool:
        """End the longest parked request that has blocks, to free them, and append its Evicted
        event to `events`. Return False if no parked request has blocks."""
        job = self._jobs.evict()
        if job is not None:
            events.append(Evicted(job.key))
        return job is not None

    def schedule(self, now_s: float, events: list[Event]) -> Plan | None:
        """Plan the next step, whose plan also carries `events` to send; return None if there is
        neither a row to compute nor an event to send. `now_s`: current time in seconds."""
        plan = Plan(events)
        in_step: set[int] = set()  # orders of the jobs with rows; they are not preempted
        limits, jobs = self._limits, chain(self._jobs.running, self._waiting())
        shared = self._turns.are_shared((job.request.tenant for job in jobs), now_s)
        # One tenant's maximum of the step, for decode rows and for prompt tokens each.
        share = limits.shared_step_tokens if shared else limits.step_tokens
        self._add_decode_rows(plan, in_step, share)
        chunks = self._chunks(now_s, plan, in_step, share)
        if not plan.rows and not chunks and self._fairness.gave_way:
            # The prompt that rows gave way to cannot run yet.
            self._add_decode_rows(plan, in_step, share)
        plan.rows += [row for row in chunks if row.num_tokens == 1]
        plan.num_decode_rows = len(plan.rows)
        plan.rows += [row for row in chunks if row.num_tokens > 1]
        return plan if plan.rows or plan.events else None

    def _add_decode_rows(self, plan: Plan, in_step: set[int], share: int) -> None:
        """Add decode rows to the plan, at most `share` of each tenant; a request with more rows
        than that gets them if it is the first of its tenant."""
        tenants: dict[bytes, list[RequestState]] = {}
        for job in self._jobs.running:
            tenants.setdefault(job.request.tenant, []).append(job)
        has_new_tenant = any(job.request.tenant not in tenants for job in self._waiting())
        prompt_waits = has_new_tenant and self._jobs.num_free_slots > 0
        for tenant, rank in self._fairness.begin_rows(tenants, prompt_waits).items():
            jobs = sorted(tenants[tenant], key=lambda job: job.rank)
            first = bisect_left(jobs, rank, key=lambda job: job.rank)
            free_rows = share
            for job in jobs[first:] + jobs[:first]:
                rows = self._decode_rows(job)
                if len(rows) > free_rows and free_rows < share:
                    self._fairness.leave_out(tenant, job.rank)
                    break
                if rows and self._grow(job, rows, plan, in_step):
                    plan.rows += rows
                    in_step.add(job.order)
                    free_rows -= len(rows)

    def _decode_rows(self, job: RequestState) -> list[Row]:
        """Return a decode row for each sequence of the request that lacks the KV of exactly one
        token, its last."""
        rows: list[Row] = []
        for sequence in job.sequences:
            end = len(sequence.ids)
            start = end - 1
            if sequence.num_computed != start:
                continue
            if job.constraints is None and not sequence.is_prefix:  # fast path, equal to _row
                rows.append(Row(sequence, start, end, sequence.choices, start))
            elif (row := self._row(sequence)) is not None:
                rows.append(row)
        return rows

    def _chunks(self, now_s: float, plan: Plan, in_step: set[int], share: int) -> list[Row]:
        """Return the prefill chunks that fill the rest of the step's token budget, in the order of
        `_queue`.

        The first chunk of the step runs whatever its size; further chunks run only within the
        `share` of their tenant. If a tenant got no chunk for that reason, the first chunk of every
        tenant runs in the next step.

        A waiting request that lacks slots of the batch holds up the waiting requests behind it. If
        it lacks KV blocks instead, waiting requests that already have blocks may pass it, because
        they will free the blocks that it needs.
        """
        fairness = self._fairness
        is_catching_up = fairness.begin_chunks()
        used: Counter[bytes] = Counter()
        in_prefill = [
            (job, sequence)
            for job in self._jobs.running
            for sequence in job.sequences
            if sequence.num_left > 1
        ]
        chunks: list[Row] = []
        budget = self._limits.step_tokens - len(plan.rows)
        lacks_slots = False
        blocked: RequestState | None = None
        for job, sequence in self._queue(now_s, in_prefill):
            if budget <= 0:
                if blocked is None and fairness.short in self._jobs.waiting.values():
                    blocked = fairness.short  # the budget ended before it was reached
                break
            if sequence is None:
                if lacks_slots or (not job.sequences and (blocked or fairness.held_up(job))):
                    continue
                if min(job.num_left, self._limits.chunk_size) > budget:
                    continue
                if job.num_places > self._jobs.num_free_slots:
                    lacks_slots = True
                    continue
                sequence = self._admit(job, plan)
                if sequence is None:
                    blocked = blocked or job
                    continue
            elif sequence not in job.sequences:
                continue  # preempted in this step
            if not sequence.num_left:
                continue
            row, tenant = self._row(sequence), job.request.tenant
            if row is None:
                continue
            is_first = not used[tenant] if is_catching_up else not used
            if used[tenant] + row.num_tokens > share and not is_first:
                if not used[tenant]:
                    fairness.keep_out()
                continue
            if row.num_tokens <= budget and self._grow(job, [row], plan, in_step):
                chunks.append(row)
                in_step.add(job.order)
                budget -= row.num_tokens
                used[tenant] += row.num_tokens
                self._turns.computed(tenant, row.num_tokens)
        fairness.end_chunks(blocked)
        return chunks

    def _waiting(self) -> list[RequestState]:
        """Return the queued requests whose grammars are ready. A request whose grammar is not ready
        keeps its place in the queue but gets no slots or blocks yet; requests behind it may get
        them first."""
        return [job for job in self._jobs.waiting.values() if job.is_ready]

    def _queue(
        self, now_s: float, in_prefill: list[tuple[RequestState, Sequence]]
    ) -> Iterable[tuple[RequestState, Sequence | None]]:
        """Return requests with prompt tokens to compute, in the order in which they get chunks:
        running requests with the sequence that is in prefill, and waiting requests with None
        instead of a sequence."""
        queue: list[tuple[float, int, int, RequestState, Sequence | None]] = []

        def add(job: RequestState, size: int, num_left: int, sequence: Sequence | None) -> None:
            ratio = (now_s - job.arrived_s) / max(1, size)
            queue.append((-ratio, num_left, job.order, job, sequence))

        for job, sequence in in_prefill:
            if sequence in job.sequences:  # otherwise its job was preempted
                size = len(sequence.ids) - job.cached_tokens
                add(job, size, sequence.num_left, sequence)
        for job in self._waiting():
            add(job, job.num_left, job.num_left, None)
        queue.sort(key=lambda entry: entry[:3])
        ordered = [(job, sequence) for _, _, _, job, sequence in queue]
        ordered = by_priority(ordered, _tenant, lambda entry: entry[0].request.priority)
        return self._turns.order(ordered, _tenant)

    def _admit(self, job: RequestState, plan: Plan) -> Sequence | None:
        while (copies := self._jobs.admit(job)) is None:
            if not self.evict(plan.events):
                return None
        plan.copies += copies
        # A job that was parked may have more sequences; they run from the next step on.
        sequence = job.sequences[0]
        if not job.announced:
            job.announced = True
            plan.events.append(Scheduled(job.key, job.cached_tokens))
        if not sequence.num_left:  # a prefill_only request fully found in the cache
            plan.events.append(PrefillComputed(job.key, sequence.num_computed, True))
            self._jobs.hold(job)
        return sequence

    def _grow(self, job: RequestState, rows: list[Row], plan: Plan, in_step: set[int]) -> bool:
        """Allocate KV blocks for the rows of a request; if they are short, evict parked requests
        and then preempt requests. Return False if the rows cannot run in this step."""
        for row in rows:
            if row.end <= row.sequence.writable_to:
                continue  # the common case
            while (copies := self._jobs.extend(row.sequence, row.end)) is None:
                if self.evict(plan.events):
                    continue
                victim = self._jobs.victim(in_step)
                if victim is None:
                    return False
                self._jobs.preempt(victim)
                if victim is job:
                    return False
            plan.copies += copies
        return True

    def _row(self, sequence: Sequence) -> Row | None:
        """Return the row of a sequence's next tokens, up to the next multiple of the chunk size or
        to the sequence's end. The last token is left out until the constraints of the choices allow
        sampling from it; return None if no other token remains."""
        start, total, chunk = sequence.num_computed, len(sequence.ids), self._limits.chunk_size
        end = min(total, (start // chunk + 1) * chunk)
        if end == total and not sequence.may_sample:
            end -= 1
            if start == end:
                return None
        choices = sequence.choices if end == total else ()
        first_output = end - 1 if choices else end
        job = sequence.job
        if job.pooled is not None and end == total:
            first_output = end - 1
        if sequence.is_prefix and (
            job.prompt_scores is not None or (job.pooled and job.pooled.needs_all)
        ):
            first_output = start
        return Row(sequence, start, end, choices, first_output)


def _tenant(entry: tuple[RequestState, Sequence | None]) -> bytes:
    return entry[0].request.tenant
