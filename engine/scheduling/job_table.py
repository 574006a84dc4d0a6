"""Requests of an engine by state, and reservations for transfers; the only module that gains and
frees blocks for them. Pure.

Reserved blocks belong to the reservation from JobTable.reserve until commit makes them the
request's, or release frees them, each at most once. Aborting the request ends the reservation too.
Verified blocks are in the prefix cache and stay there when the reservation frees them.

A request (a *job* here) is in one of these states:

    waiting    queued; it has blocks only after a KV transfer, a park or a hold
    running    it has rows (slots) of the batch
    held       others read its blocks: a computed prefill_only request, or one that migrates
    reserved   a prefill worker sends its KV
    parked     no client listens; it has no slots, and its blocks until others need them

  +--- Who frees which blocks ---------------------------------------------------------------------+
  | slice                 gained by             freed by                                           |
  | --------------------- --------------------- -------------------------------------------------- |
  | prefix hit (shared)   admit, reserve        with the sequence: end_sequence, preempt, end;     |
  |                                             only this request's reference is released          |
  | rest of the prompt    admit, reserve        with the sequence, as above                        |
  | growth                extend, advance       with the sequence, as above                        |
  | shared by choices     fork                  with each choice's sequence: end_sequence, end     |
  | copied on write       extend, admit,        the copy with the sequence; the reference to the   |
  |                       reserve               source at once, since the step's BlockCopy runs    |
  |                                             before anything is written                         |
  | behind the window     as above              advance, commit: when the window has passed it     |
  | reserved for a        reserve               release or an abort (end); commit makes it the     |
  | KV transfer                                 request's                                          |
  | running prefill       as rest and growth    end, by Engine.abort: Sender._leave calls it if    |
  |                                             the attempt ends before all is computed            |
  | held by prefill, all  as rest and growth    end, by Engine.release_held: Sender._leave calls   |
  | is computed                                 it at decode's Complete or at the attempt's end    |
  | migrating (held)      as rest and growth    end, by Engine.release_held once the target has    |
  |                                             committed; unhold keeps it                         |
  | parked                as rest and growth    end, by evict when others lack blocks; unpark      |
  |                                             keeps it                                           |
  | cached                advance, verified     no owner: the pool keeps its content to be found   |
  |                                             until `allocate` takes the block                   |
  +------------------------------------------------------------------------------------------------+

A sequence has blocks exactly while it is in `job.sequences` of a job in `by_key`, and its
references are reserved exactly while the job is in `reserved`. `discrepancy` compares this with the
counts of the pools: after every turn of the simulation, at the end of every test that uses
an engine, and in every running worker. tests/engine/scheduling checks it after each of thousands of
random operations, and checks that no other module changes a block table.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from enum import Enum

from pdserve.engine.kv import NULL_BLOCK, BlockCopy, blocks_for
from pdserve.engine.scheduling.block_tables import BlockTables
from pdserve.engine.scheduling.request_state import RequestState, Sequence


class ReservationState(Enum):
    """The state of a reservation: open -> committed | released | aborted."""

    OPEN = "open"
    COMMITTED = "committed"
    RELEASED = "released"
    ABORTED = "aborted"


class Reservation:
    """Blocks for the KV of a request's prefix without its last token.

    Block i of a group holds tokens [i * block_size, (i + 1) * block_size). Only blocks from
    `first_block[group]` on are to be filled, and only while the reservation is open.
    """

    def __init__(
        self, job: RequestState, num_tokens: int, block_size: int, windows: list[int]
    ) -> None:
        (sequence,) = job.sequences
        self.job = job
        self.key = job.key
        self.num_tokens = num_tokens
        self.cached_tokens = sequence.num_computed
        self.state = ReservationState.OPEN
        count = blocks_for(num_tokens, block_size)
        self.blocks = [list(table[:count]) for table in sequence.block_tables]
        hit = blocks_for(self.cached_tokens, block_size)
        # A window group needs only what the next token sees.
        self.first_block = [
            min(count, max(hit, (num_tokens - w + 1) // block_size if w else 0)) for w in windows
        ]

    @property
    def open(self) -> bool:
        """Whether its blocks may still be written."""
        return self.state is ReservationState.OPEN

    def check_open(self) -> None:
        """Raise ValueError if the reservation is not open."""
        if not self.open:
            raise ValueError(f"reservation of {self.key!r} is {self.state.value}")


class JobTable:
    """Requests, their slots in the batch and their blocks; only its methods change them.

    A method that returns None for lack of blocks has changed nothing. The BlockCopys that methods
    return must run, in order, before anything is written to a block.
    """

    def __init__(self, tables: BlockTables, num_slots: int) -> None:
        self.tables = tables
        self.by_key: dict[str, RequestState] = {}
        self.waiting: dict[str, RequestState] = {}
        self.running: list[RequestState] = []  # oldest first
        self.held: dict[str, RequestState] = {}
        self.reserved: dict[str, Reservation] = {}
        self.parked: dict[str, RequestState] = {}  # the longest parked first
        self.preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up in the prefix cache
        self.prefix_hits = 0  # prompt tokens found there
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        """Rows of the batch that no job holds."""
        return len(self._free_slots)

    def num_blocks(self, jobs: Iterable[RequestState]) -> int:
        """Return how many main-group blocks these jobs use; shared ones count each time."""
        return sum(
            block != NULL_BLOCK
            for job in jobs
            for sequence in job.sequences
            for block in sequence.block_tables[self.tables.main_group]
        )

    # --- the queue and the batch

    def add(self, job: RequestState) -> None:
        """Queue a new job, without blocks."""
        self.by_key[job.key] = job
        self.waiting[job.key] = job

    def admit(self, job: RequestState) -> list[BlockCopy] | None:
        """Move a waiting job into the batch, which has slots; return None if blocks are short."""
        copies: list[BlockCopy] = []
        if not job.sequences:
            opened = self._open_prefix(job, self._spare(job), reserved=False)
            if opened is None:
                return None
            copies = opened
        del self.waiting[job.key]
        insort(self.running, job, key=lambda j: j.order)
        job.slots = [self._free_slots.pop() for _ in range(job.num_places)]
        for sequence in job.sequences:  # several only after a park
            sequence.slot = job.slots.pop()
            sequence.rewritten_from = [0] * len(sequence.block_tables)
        return copies

    def preempt(self, job: RequestState) -> None:
        """Return a job to the queue without blocks; it keeps its generated tokens."""
        self._close_sequences(job)
        if job in self.running:
            self.running.remove(job)
        self.waiting[job.key] = job
        self.preemptions += 1

    def victim(self, excluded: set[int]) -> RequestState | None:
        """Return the job to preempt: the last by rank of the youngest job's tenant, so that
        priorities do not let a tenant keep more blocks. `excluded`: orders of jobs in the step."""
        with_blocks = [j for j in self.waiting.values() if j.sequences]
        candidates = [
            job
            for job in [*self.running, *with_blocks]
            if job.order not in excluded and not job.request.prefill_only
        ]
        youngest = max(candidates, key=lambda j: j.order, default=None)
        if youngest is None:
            return None
        same_tenant = [j for j in candidates if j.request.tenant == youngest.request.tenant]
        return max(same_tenant, key=lambda j: j.rank)

    # --- sequences of running jobs

    def extend(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Add blocks up to `num_tokens` tokens and make the next one's writable; None: too few."""
        return self.tables.extend(sequence, num_tokens)

    def advance(self, sequence: Sequence, num_computed: int) -> None:
        """Record KV of the first `num_computed` tokens: full blocks enter the prefix cache, and
        blocks that the window has passed are released."""
        self.tables.advance(sequence, num_computed)

    def fork(self, prefix: Sequence, choice: int) -> None:
        """Continue a choice from a computed prefix; it shares all blocks and takes one slot."""
        job = prefix.job
        branch = self.tables.fork(prefix, job.branch_ids(choice), (choice,))
        branch.is_prefix = False
        branch.slot = job.slots.pop()
        job.sequences.append(branch)

    def forget(self, job: RequestState) -> None:
        """Remove the job's blocks from the prefix cache."""
        for sequence in job.sequences:
            self.tables.forget(sequence)

    def end_sequence(self, sequence: Sequence) -> None:
        """End the sequence of a finished choice and free its blocks and slot."""
        sequence.job.sequences.remove(sequence)
        self.tables.close(sequence)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    def return_slot(self, job: RequestState) -> None:
        """Free a slot of a job for a choice that ended before the prefix was computed."""
        if job.slots:
            self._free_slots.append(job.slots.pop())

    # --- park, hold and the end

    def park(self, job: RequestState) -> None:
        """Take a waiting or running job out of the steps: it keeps its blocks, not its slots."""
        self._leave_steps(job)
        self.parked[job.key] = job

    def unpark(self, job: RequestState) -> None:
        """Return a parked job to the queue, with its blocks."""
        self.waiting[job.key] = self.parked.pop(job.key)

    def evict(self) -> RequestState | None:
        """End the longest parked job that has blocks; return None if there is none."""
        job = next((j for j in self.parked.values() if j.sequences), None)
        if job is not None:
            self.end(job)
        return job

    def hold(self, job: RequestState) -> None:
        """Take a job out of the steps and pin its blocks: others read them."""
        self._leave_steps(job)
        self.parked.pop(job.key, None)
        self.held[job.key] = job

    def unhold(self, job: RequestState) -> None:
        """Return a held job to the queue, with its blocks."""
        self.waiting[job.key] = self.held.pop(job.key)

    def end(self, job: RequestState) -> None:
        """Remove a job in any state and free its blocks; an open reservation is aborted."""
        reservation = self.reserved.pop(job.key, None)
        self._close_sequences(job, reserved=reservation is not None)
        if reservation is not None and reservation.open:
            reservation.state = ReservationState.ABORTED
        del self.by_key[job.key]
        for state in (self.waiting, self.held, self.parked):
            state.pop(job.key, None)
        if job in self.running:
            self.running.remove(job)

    # --- reservations: blocks for KV that a prefill worker sends

    def reserve(self, job: RequestState) -> tuple[Reservation, list[BlockCopy]] | None:
        """Reserve blocks for a new job's whole prefix; return None if they are short."""
        copies = self._open_prefix(job, spare=(), reserved=True)
        if copies is None:
            return None
        tables, (sequence,) = self.tables, job.sequences
        reservation = Reservation(job, len(sequence.ids) - 1, tables.block_size, tables.windows)
        self.by_key[job.key] = job
        self.reserved[job.key] = reservation
        return reservation, copies

    def verified(self, reservation: Reservation, num_tokens: int) -> int:
        """Add full blocks of the first `num_tokens` received tokens to the prefix cache, and return
        the number of prefix tokens cached so far.

        The blocks stay reserved; if the reservation ends without a commit, they stay in the cache
        until they are evicted. With window groups, nothing is cached while the next token would
        lack a block that was not requested. Raises ValueError if the reservation is not open or has
        fewer tokens.
        """
        reservation.check_open()
        if num_tokens > reservation.num_tokens:
            raise ValueError(
                f"cannot verify {num_tokens} tokens: the reservation has {reservation.num_tokens}"
            )
        tables, sequence = self.tables, reservation.job.sequences[0]
        size = tables.block_size
        full = num_tokens // size * size
        hit = blocks_for(reservation.cached_tokens, size)
        for window, first in zip(tables.windows, reservation.first_block, strict=True):
            if window and first > max(hit, tables.first_seen(full, window)):
                break
        else:
            tables.publish(sequence, full, reservation.first_block)
        return sequence.num_published * size

    def commit(self, reservation: Reservation) -> None:
        """Queue the job of a fully written reservation. Raises ValueError if it is not open."""
        reservation.check_open()
        job = reservation.job
        self.tables.commit(job.sequences[0], reservation.num_tokens)
        reservation.state = ReservationState.COMMITTED
        del self.reserved[job.key]
        self.waiting[job.key] = job

    def release(self, reservation: Reservation) -> None:
        """Free the blocks of an open reservation; an aborted one has none. Raises ValueError if it
        was committed or released before."""
        if reservation.state is ReservationState.ABORTED:
            return
        reservation.check_open()
        reservation.state = ReservationState.RELEASED
        self.end(reservation.job)

    # --- steps of the above

    def _open_prefix(
        self, job: RequestState, spare: Seq[int], reserved: bool
    ) -> list[BlockCopy] | None:
        """Make the job's prefix a sequence with its first blocks; return None if they are short."""
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
        return copies

    def _spare(self, job: RequestState) -> Seq[int]:
        """Return the blocks to leave in each group for the growth of jobs and of other choices."""
        tables = self.tables
        num_growing = sum(len(j.sequences) for j in self.running if j.request.generates)
        extra_blocks: list[int] = []
        if job.request.generates:
            size, prompt_len = tables.block_size, job.prompt_len
            lengths = [prompt_len + len(job.generated[c]) for c in job.unfinished[1:]]
            extra_blocks = [blocks_for(length, size) - prompt_len // size for length in lengths]
        return [
            num_growing + sum(tables.needed_at_once(more, window) for more in extra_blocks)
            for window in tables.windows
        ]

    def _close_sequences(self, job: RequestState, reserved: bool = False) -> None:
        self._return_slots(job)
        for sequence in reversed(job.sequences):
            self.tables.close(sequence, reserved)
        job.sequences = []

    def _leave_steps(self, job: RequestState) -> None:
        self._return_slots(job)
        if job in self.running:
            self.running.remove(job)
        self.waiting.pop(job.key, None)

    def _return_slots(self, job: RequestState) -> None:
        for sequence in reversed(job.sequences):
            if sequence.slot >= 0:
                self._free_slots.append(sequence.slot)
                sequence.slot = -1
        self._free_slots.extend(job.slots)
        job.slots = []


def discrepancy(jobs: JobTable, recount: bool = False) -> str:
    """Describe the first inconsistency between pools and jobs; empty if there is none.

    In each group free + used + cached + reserved must equal all blocks. With `recount`, the
    references that the pool has counted must also be those of the sequences, which takes time in
    proportion to the blocks in use.
    """
    for group, pool in enumerate(jobs.tables.pools):
        counts = pool.counts()
        if counts.total != pool.num_blocks or min(counts.used, counts.reserved) < 0:
            return f"group {group}: {counts} do not add up to {pool.num_blocks} blocks"
        if not jobs.by_key and (counts.used or counts.reserved):
            return f"group {group}: {counts}, but the engine has no requests"
        if recount:
            used, reserved = _references(jobs, group)
            if (used, reserved) != pool.references():
                return (
                    f"group {group}: {counts}; the references of sequences are {used}, of "
                    f"reservations {reserved}"
                )
    return ""


def _references(jobs: JobTable, group: int) -> tuple[Counter[int], Counter[int]]:
    """Return, by block, the references of sequences and those of reservations."""
    used, reserved = Counter[int](), Counter[int]()
    for job in jobs.by_key.values():
        references = reserved if job.key in jobs.reserved else used
        for sequence in job.sequences:
            references.update(b for b in sequence.block_tables[group] if b != NULL_BLOCK)
    return used, reserved
