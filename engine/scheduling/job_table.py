"""Every job of an engine by state, and the one place where jobs gain and lose blocks. Pure.

A job is in one of: waiting (with blocks only after a hand-off or a park), running (has slots of the
batch), held (its blocks are read: a computed prefill_only request, or one that moves to another
worker), reserved (the KV is on its way from a prefill worker), parked (nobody listens: its blocks
stay, unless others need them; it has no slots).
"""

from bisect import insort

from pdserve.engine.kv.block_pool import BlockCopy
from pdserve.engine.kv.spec import blocks_for
from pdserve.engine.scheduling.block_tables import BlockTables
from pdserve.engine.scheduling.request_state import RequestState, Sequence


class JobTable:
    """Jobs, their slots in the batch and their blocks."""

    def __init__(self, tables: BlockTables, num_slots: int) -> None:
        self.tables = tables
        self.jobs: dict[str, RequestState] = {}
        self.waiting: dict[str, RequestState] = {}
        self.running: list[RequestState] = []  # oldest first
        self.held: dict[str, RequestState] = {}
        self.reserved: dict[str, RequestState] = {}
        self.parked: dict[str, RequestState] = {}  # the longest parked first
        self.preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up in the prefix cache
        self.prefix_hits = 0  # of them found
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        """Rows of the batch that no job has."""
        return len(self._free_slots)

    def open_prefix(
        self, job: RequestState, spare: int, reserved: bool = False
    ) -> tuple[Sequence, list[BlockCopy]] | None:
        """The job's prefix as a sequence with all its blocks, or None if they are short."""
        prefix = job.prefix()
        tables = self.tables
        if job.hashes is None:
            job.hashes = tables.hashes(prefix, job.seed_hash)
        limit = job.hit_limit(prefix)
        hit = tables.match(job.hashes, limit)
        sequence = Sequence(job, list(prefix), job.trunk_choices(), job.seed_hash)
        copies = tables.open(sequence, job.hashes, hit, spare, reserved)
        if copies is None and hit % tables.block_size:
            # The copy of the block that holds the last token may be what does not fit.
            hit = tables.match(job.hashes, hit - hit % tables.block_size)
            copies = tables.open(sequence, job.hashes, hit, spare, reserved)
        if copies is None:
            return None
        job.hashes = None
        if not job.announced:
            job.cached_tokens = hit
            self.prefix_queries += len(prefix)
            self.prefix_hits += hit
        job.sequences = [sequence]
        return sequence, copies

    def admit(self, job: RequestState) -> list[BlockCopy] | None:
        """Moves a waiting job into the batch, which has slots for it; None if blocks are short."""
        copies: list[BlockCopy] = []
        if not job.sequences:
            opened = self.open_prefix(job, self._spare(job))
            if opened is None:
                return None
            copies = opened[1]
        del self.waiting[job.key]
        insort(self.running, job, key=lambda j: j.order)
        job.slots = [self._free_slots.pop() for _ in range(job.num_places)]
        for sequence in job.sequences:  # several only after a park
            sequence.slot = job.slots.pop()
            sequence.rewritten_from = [0] * len(sequence.block_tables)
        return copies

    def _spare(self, job: RequestState) -> int:
        """Blocks to leave for the growth of what runs and for the job's own longer choices."""
        growing = sum(len(j.sequences) for j in self.running if not j.request.prefill_only)
        if job.request.prefill_only or len(job.unfinished) == 1:
            return growing
        size, prompt_len = self.tables.block_size, len(job.request.prompt_ids)
        beyond = [len(job.generated[c]) + prompt_len for c in job.unfinished]
        return growing + sum(blocks_for(n, size) - prompt_len // size for n in beyond[1:])

    def preempt(self, job: RequestState) -> None:
        """Back to the queue without blocks; what it has generated is kept."""
        self._close_sequences(job)
        if job in self.running:
            self.running.remove(job)
        self.waiting[job.key] = job
        self.preemptions += 1

    def park(self, job: RequestState) -> None:
        """Takes a waiting or running job out of the steps: its blocks stay, its slots do not."""
        self._return_slots(job)
        if job in self.running:
            self.running.remove(job)
        self.waiting.pop(job.key, None)
        self.parked[job.key] = job

    def unpark(self, job: RequestState) -> None:
        """Back to the queue, with its blocks."""
        self.waiting[job.key] = self.parked.pop(job.key)

    def evict(self) -> RequestState | None:
        """Gives up the longest parked job that has blocks; None: there is none."""
        job = next((j for j in self.parked.values() if j.sequences), None)
        if job is not None:
            self.end(job)
        return job

    def victim(self, spared: set[int]) -> RequestState | None:
        """The youngest job whose blocks may be taken; `spared` are orders of jobs in the step."""
        with_blocks = [j for j in self.waiting.values() if j.sequences]
        candidates = [
            job
            for job in [*self.running, *with_blocks]
            if job.order not in spared and not job.request.prefill_only
        ]
        return max(candidates, key=lambda j: j.order, default=None)

    def hold(self, job: RequestState) -> None:
        """A job leaves the steps, and nobody takes its blocks: others read them."""
        self._return_slots(job)
        if job in self.running:
            self.running.remove(job)
        for state in (self.waiting, self.parked):
            state.pop(job.key, None)
        self.held[job.key] = job

    def unhold(self, job: RequestState) -> None:
        """Back to the queue, with its blocks."""
        self.waiting[job.key] = self.held.pop(job.key)

    def end_sequence(self, sequence: Sequence) -> None:
        """One choice has ended."""
        sequence.job.sequences.remove(sequence)
        self.tables.close(sequence)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    def return_slot(self, job: RequestState) -> None:
        """A choice has ended before the prefix was computed: one place less is needed."""
        if job.slots:
            self._free_slots.append(job.slots.pop())

    def end(self, job: RequestState) -> None:
        """The job leaves, in whatever state it is; every block is back."""
        self._close_sequences(job, reserved=job.key in self.reserved)
        del self.jobs[job.key]
        for state in (self.waiting, self.held, self.reserved, self.parked):
            state.pop(job.key, None)
        if job in self.running:
            self.running.remove(job)

    def _close_sequences(self, job: RequestState, reserved: bool = False) -> None:
        self._return_slots(job)
        for sequence in reversed(job.sequences):
            self.tables.close(sequence, reserved)
        job.sequences = []

    def _return_slots(self, job: RequestState) -> None:
        for sequence in reversed(job.sequences):
            if sequence.slot >= 0:
                self._free_slots.append(sequence.slot)
                sequence.slot = -1
        self._free_slots.extend(job.slots)
        job.slots = []
