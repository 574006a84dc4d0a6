"""Decides what each step computes: decode rows first, then prefill chunks, under a token budget.

Pure: time is an argument. Chunks end at multiples of the chunk size counted from token 0, so what
is computed together does not depend on the load. Prompts are computed in the order of waiting time
divided by length (highest response ratio, Brinch Hansen 1971): a short prompt soon passes a long
one, no prompt starves, and of two alike the older comes first. Tenants take turns
(turns.py). When blocks run out, parked requests
are evicted, the longest parked first; then the youngest request is preempted: it loses its blocks,
keeps its tokens and is computed again later.
"""

from collections.abc import Iterable

from pdserve.engine.api.request import Event, Evicted, PrefillComputed, Scheduled
from pdserve.engine.scheduling.job_table import JobTable
from pdserve.engine.scheduling.limits import EngineLimits
from pdserve.engine.scheduling.plan import Plan, Row
from pdserve.engine.scheduling.request_state import RequestState, Sequence
from pdserve.engine.scheduling.turns import Turns


class Scheduler:
    """Plans steps over the requests of a job table; StepProgress applies what a step has done."""

    def __init__(self, jobs: JobTable, limits: EngineLimits) -> None:
        self._jobs = jobs
        self._limits = limits
        self._turns = Turns()
        self._short: RequestState | None = None  # the next job to admit, if it lacks blocks
        # The order of arrival of a reservation that was refused since the last step.
        self._refused_order: int | None = None

    def comes_first(self, order: int) -> bool:
        """Whether a queued job that lacks blocks arrived before a reservation of this order."""
        return self._short is not None and self._short.order < order

    def hold_up(self, order: int) -> None:
        """A reservation was refused: in the next step no job that arrived after it gets blocks."""
        self._refused_order = order

    def evict(self, events: list[Event]) -> bool:
        """Ends one parked request for its blocks; False if none has any."""
        job = self._jobs.evict()
        if job is not None:
            events.append(Evicted(job.key))
        return job is not None

    def schedule(self, now_s: float, events: list[Event]) -> Plan | None:
        """The next step, with `events` to be sent first; None when there is nothing to do."""
        plan = Plan(events)
        in_step: set[int] = set()  # orders of the jobs with rows; they are not preempted
        in_prefill = self._add_decode_rows(plan, in_step)
        plan.num_decode_rows = len(plan.rows)
        if in_prefill or self._jobs.waiting:
            self._add_chunks(now_s, in_prefill, plan, in_step)
        else:
            self._short = None
        self._refused_order = None
        return plan if plan.rows or plan.events else None

    def _add_decode_rows(
        self, plan: Plan, in_step: set[int]
    ) -> list[tuple[RequestState, Sequence]]:
        """Adds the rows of one token; returns the sequences that have more tokens to compute."""
        in_prefill: list[tuple[RequestState, Sequence]] = []
        for job in list(self._jobs.running):
            rows: list[Row] = []
            for sequence in job.sequences:
                left = sequence.num_left
                if left == 1:
                    rows.append(self._row(sequence))
                elif left:
                    in_prefill.append((job, sequence))
            if rows and self._grow(job, rows, plan, in_step):
                plan.rows += rows
                in_step.add(job.order)
        return in_prefill

    def _add_chunks(
        self,
        now_s: float,
        in_prefill: list[tuple[RequestState, Sequence]],
        plan: Plan,
        in_step: set[int],
    ) -> None:
        """Fills the token budget with chunks, the highest response ratio first.

        A job that cannot be admitted holds up those behind it. If it lacks blocks, jobs that have
        their blocks already still pass, since it waits for blocks that these will give back.
        """
        budget = self._limits.step_tokens - len(plan.rows)
        lacks_slots = False
        short: RequestState | None = None
        for job, sequence in self._queue(now_s, in_prefill):
            if budget <= 0:
                if short is None and self._short in self._jobs.waiting.values():
                    short = self._short  # the budget ended before it was reached
                break
            if sequence is None:
                if lacks_slots or (not job.sequences and (short or self._held_up(job))):
                    continue
                if min(job.num_left, self._limits.chunk_size) > budget:
                    continue
                if job.num_places > self._jobs.num_free_slots:
                    lacks_slots = True
                    continue
                sequence = self._admit(job, plan)
                if sequence is None:
                    short = short or job
                    continue
            elif sequence not in job.sequences:
                continue  # preempted in this step
            if not sequence.num_left:
                continue
            row = self._row(sequence)
            if row.num_tokens <= budget and self._grow(job, [row], plan, in_step):
                plan.rows.append(row)
                in_step.add(job.order)
                budget -= row.num_tokens
                self._turns.computed(job.request.tenant, row.num_tokens)
        self._short = short
        plan.rows.sort(key=lambda row: row.num_tokens > 1)
        plan.num_decode_rows = sum(row.num_tokens == 1 for row in plan.rows)

    def _held_up(self, job: RequestState) -> bool:
        return self._refused_order is not None and job.order > self._refused_order

    def _queue(
        self, now_s: float, in_prefill: list[tuple[RequestState, Sequence]]
    ) -> Iterable[tuple[RequestState, Sequence | None]]:
        """Sequences in prefill, and waiting jobs with None; the next to compute comes first."""
        queue: list[tuple[float, int, int, RequestState, Sequence | None]] = []

        def add(job: RequestState, size: int, left: int, sequence: Sequence | None) -> None:
            ratio = (now_s - job.arrived_s) / max(1, size)
            queue.append((-ratio, left, job.order, job, sequence))

        for job, sequence in in_prefill:
            if sequence in job.sequences:  # otherwise its job was preempted
                size = len(sequence.ids) - job.cached_tokens
                add(job, size, sequence.num_left, sequence)
        for job in self._jobs.waiting.values():
            add(job, job.num_left, job.num_left, None)
        queue.sort(key=lambda entry: entry[:3])
        ordered = [(job, sequence) for _, _, _, job, sequence in queue]
        return self._turns.order(ordered, lambda entry: entry[0].request.tenant)

    def _admit(self, job: RequestState, plan: Plan) -> Sequence | None:
        while (copies := self._jobs.admit(job)) is None:
            if not self.evict(plan.events):
                return None
        plan.copies += copies
        # A job that was parked may have more sequences; those run from the next step on.
        sequence = job.sequences[0]
        if not job.announced:
            job.announced = True
            plan.events.append(Scheduled(job.key, job.cached_tokens))
        if not sequence.num_left:  # a prefill_only request, all of it from the cache
            plan.events.append(PrefillComputed(job.key, sequence.num_computed, True))
            self._jobs.hold(job)
        return sequence

    def _grow(self, job: RequestState, rows: list[Row], plan: Plan, in_step: set[int]) -> bool:
        """Gets blocks for the rows of a job, if need be by eviction and preemption; False if the
        rows cannot run in this step."""
        for row in rows:
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

    def _row(self, sequence: Sequence) -> Row:
        """The row of a sequence's next tokens, up to the next chunk border or to its end."""
        start, total, chunk = sequence.num_computed, len(sequence.ids), self._limits.chunk_size
        end = min(total, (start // chunk + 1) * chunk)
        choices = sequence.choices if end == total else ()
        first_output = end - 1 if choices else end
        if sequence.is_prefix and sequence.job.prompt_scores is not None:
            first_output = start
        return Row(sequence, start, end, choices, first_output)
