"""All requests of an engine by state, and the reservations of KV blocks for transfers. Only this
module allocates and frees blocks for them. Pure.

Reserved blocks belong to the reservation from JobTable.reserve until JobTable.commit gives them to
the request, or JobTable.release frees them; each of these happens at most once. Aborting the
request ends its reservation too. Blocks whose KV was received and verified are in the prefix cache,
and stay there when the reservation frees them.

A request (a *job* here) is in one of these states:

    waiting    in the queue; has blocks only after a KV transfer, a park or a hold
    running    has rows (slots) of the batch
    held       other workers read its blocks: it is prefill_only and computed, or it migrates
    reserved   has reserved blocks, for which a prefill worker sends the KV
    parked     its client does not listen: has no slots, and loses its blocks if others need them

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
  | cached                advance, verified     no owner: its content can be found by hash until   |
  |                                             BlockPool.allocate takes the block                 |
  +------------------------------------------------------------------------------------------------+

Invariant: a sequence has blocks exactly while it is in `job.sequences` of a job in
JobTable.by_key, and its references to them count as reserved exactly while the job is in
JobTable.reserved. `discrepancy` compares this with the counts of the pools: after every turn of the
simulation, at the end of every test that uses an engine, and in every running worker.
tests/engine/scheduling checks it after each of thousands of random operations, and checks that no
other module changes a block table.
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
    """State of a reservation of KV blocks: open, then one of committed, released or aborted."""

    OPEN = "open"
    COMMITTED = "committed"
    RELEASED = "released"
    ABORTED = "aborted"


class Reservation:
    """KV blocks that a prefill worker fills for a request: those of the request's prefix without
    its last token.

    Block i of a group holds tokens [i * block_size, (i + 1) * block_size). The worker sends only
    the blocks from `first_block[group]` on, and only while the reservation is open.
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
        """Whether the reservation is open, so that its blocks may still be written."""
        return self.state is ReservationState.OPEN

    def check_open(self) -> None:
        """Raise ValueError if the reservation is not open."""
        if not self.open:
            raise ValueError(f"the reservation of request {self.key!r} is {self.state.value}")


class JobTable:
    """All requests of an engine, their slots (rows of the batch) and their KV blocks; only the
    methods of this class change them.

    A method that returns None because blocks are short has changed nothing. The BlockCopys that
    methods return must run, in order, before anything is written to a block.
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
        """Number of slots (rows of the batch) that no request occupies."""
        return len(self._free_slots)

    def num_blocks(self, jobs: Iterable[RequestState]) -> int:
        """Return how many blocks of the main layer group these requests use; a block that several
        sequences share counts once for each."""
        return sum(
            block != NULL_BLOCK
            for job in jobs
            for sequence in job.sequences
            for block in sequence.block_tables[self.tables.main_group]
        )

    # --- the queue and the batch

    def add(self, job: RequestState) -> None:
        """Add a new request to the queue, without KV blocks."""
        self.by_key[job.key] = job
        self.waiting[job.key] = job

    def admit(self, job: RequestState) -> list[BlockCopy] | None:
        """Move a waiting request into the batch, which must have slots for it, and allocate its
        blocks. Return the block copies to make; None if there are too few blocks."""
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
        """Take a request's blocks and slots and return it to the queue. It keeps its generated
        tokens, whose KV is computed again later."""
        self._close_sequences(job)
        if job in self.running:
            self.running.remove(job)
        self.waiting[job.key] = job
        self.preemptions += 1

    def victim(self, excluded: set[int]) -> RequestState | None:
        """Return the request to preempt when blocks run out; None if there is none.

        It belongs to the tenant of the youngest request with blocks, and is the last of that tenant
        by priority and arrival; so priorities do not let a tenant keep more blocks. `excluded`:
        arrival numbers (`order`) of requests in the current step, which are not preempted.
        """
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
        """Add blocks to a sequence for its first `num_tokens` tokens, and make the block of the
        next token to compute writable. Return the block copies to make; None if there are too few
        blocks."""
        return self.tables.extend(sequence, num_tokens)

    def advance(self, sequence: Sequence, num_computed: int) -> None:
        """Record that the KV of the sequence's first `num_computed` tokens is computed: add full
        blocks to the prefix cache, and release blocks that the attention window has passed."""
        self.tables.advance(sequence, num_computed)

    def fork(self, prefix: Sequence, choice: int) -> None:
        """Make a separate sequence for a choice, which continues from the computed prefix: it
        shares all blocks of the prefix and takes one of the request's slots."""
        job = prefix.job
        branch = self.tables.fork(prefix, job.branch_ids(choice), (choice,))
        branch.is_prefix = False
        branch.slot = job.slots.pop()
        job.sequences.append(branch)

    def forget(self, job: RequestState) -> None:
        """Remove the request's blocks from the prefix cache."""
        for sequence in job.sequences:
            self.tables.forget(sequence)

    def end_sequence(self, sequence: Sequence) -> None:
        """End the sequence of a finished choice; free its blocks and its slot."""
        sequence.job.sequences.remove(sequence)
        self.tables.close(sequence)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    def return_slot(self, job: RequestState) -> None:
        """Free the slot that a request holds for a choice that has ended before the shared prefix
        was computed."""
        if job.slots:
            self._free_slots.append(job.slots.pop())

    # --- park, hold and the end

    def park(self, job: RequestState) -> None:
        """Exclude a waiting or running request from steps: it keeps its blocks but gives up its
        slots."""
        self._leave_steps(job)
        self.parked[job.key] = job

    def unpark(self, job: RequestState) -> None:
        """Return a parked request to the queue, with its blocks."""
        self.waiting[job.key] = self.parked.pop(job.key)

    def evict(self) -> RequestState | None:
        """End the request that has been parked longest and still has blocks, and return it; return
        None if no parked request has blocks."""
        job = next((j for j in self.parked.values() if j.sequences), None)
        if job is not None:
            self.end(job)
        return job

    def hold(self, job: RequestState) -> None:
        """Exclude a request from steps and keep its blocks, so that another worker can read
        them."""
        self._leave_steps(job)
        self.parked.pop(job.key, None)
        self.held[job.key] = job

    def unhold(self, job: RequestState) -> None:
        """Return a held request to the queue, with its blocks."""
        self.waiting[job.key] = self.held.pop(job.key)

    def end(self, job: RequestState) -> None:
        """Remove a request in any state and free its blocks; abort its reservation if that is
        open."""
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
        """Reserve blocks for the whole prefix of a new request, whose KV a prefill worker will
        send. Return the reservation and the block copies to make; None if there are too few
        blocks."""
        copies = self._open_prefix(job, spare=(), reserved=True)
        if copies is None:
            return None
        tables, (sequence,) = self.tables, job.sequences
        reservation = Reservation(job, len(sequence.ids) - 1, tables.block_size, tables.windows)
        self.by_key[job.key] = job
        self.reserved[job.key] = reservation
        return reservation, copies

    def verified(self, reservation: Reservation, num_tokens: int) -> int:
        """Add the full blocks of a reservation's first `num_tokens` tokens, which have been
        received and verified, to the prefix cache. Return the number of prefix tokens cached so
        far.

        The blocks stay reserved; if the reservation ends without a commit, they stay in the cache
        until they are evicted. With window groups, caches nothing as long as the token after the
        first `num_tokens` attends to a block that is neither cached nor sent by the prefill worker.
        Raises ValueError if the reservation is not open or has fewer than `num_tokens` tokens.
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
        """Queue the request of a reservation whose blocks are all filled; the blocks become the
        request's. Raises ValueError if the reservation is not open."""
        reservation.check_open()
        job = reservation.job
        self.tables.commit(job.sequences[0], reservation.num_tokens)
        reservation.state = ReservationState.COMMITTED
        del self.reserved[job.key]
        self.waiting[job.key] = job

    def release(self, reservation: Reservation) -> None:
        """Free the blocks of an open reservation and end its request. Does nothing if the
        reservation was aborted; raises ValueError if it was committed or released before."""
        if reservation.state is ReservationState.ABORTED:
            return
        reservation.check_open()
        reservation.state = ReservationState.RELEASED
        self.end(reservation.job)

    # --- steps of the above

    def _open_prefix(
        self, job: RequestState, spare: Seq[int], reserved: bool
    ) -> list[BlockCopy] | None:
        """Make a sequence of the request's prefix and allocate its first blocks, some from the
        prefix cache. Return the block copies to make; None if there are too few blocks."""
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
        """Return how many blocks of each layer group must stay available when this request is
        admitted: one for each running sequence, which may need another block, and those for the
        request's other choices."""
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
    """Describe the first inconsistency between the block pools and the requests; empty if there is
    none.

    In each layer group free + used + cached + reserved must equal the number of blocks. With
    `recount`, also compares the reference counts of the pool with the blocks that sequences really
    refer to, which takes time in proportion to the blocks in use.
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
    """Count how often each block of a layer group is referred to: by ordinary sequences, and by
    those of reservations."""
    used, reserved = Counter[int](), Counter[int]()
    for job in jobs.by_key.values():
        references = reserved if job.key in jobs.reserved else used
        for sequence in job.sequences:
            references.update(b for b in sequence.block_tables[group] if b != NULL_BLOCK)
    return used, reserved
