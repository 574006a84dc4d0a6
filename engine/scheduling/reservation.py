"""Blocks on the decode side for KV that a prefill worker computes. Pure.

The blocks belong to the reservation from reserve() until commit(), which makes them the request's,
or release(), which frees them; each at most once. An abort of the request ends it as well. What was
verified meanwhile can be found in the prefix cache, and stays there when the blocks are freed.
"""

from enum import Enum

from pdserve.engine.kv.block_pool import BlockCopy
from pdserve.engine.kv.spec import blocks_for
from pdserve.engine.scheduling.job_table import JobTable
from pdserve.engine.scheduling.request_state import RequestState


class ReservationState(Enum):
    """open -> committed | released | aborted"""

    OPEN = "open"
    COMMITTED = "committed"
    RELEASED = "released"
    ABORTED = "aborted"


class Reservation:
    """Where the KV of a request's prefix, less its last token, is to be written.

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
        # Of a windowed group only what the next token sees is needed.
        self.first_block = [
            min(count, max(hit, (num_tokens - w + 1) // block_size if w else 0)) for w in windows
        ]

    @property
    def open(self) -> bool:
        """Whether its blocks may still be written."""
        return self.state is ReservationState.OPEN


def reserve(roster: JobTable, job: RequestState) -> tuple[Reservation, list[BlockCopy]] | None:
    """Blocks of the job's whole prefix, or None. The copies are due before anything else."""
    opened = roster.open_prefix(job, spare=0, reserved=True)
    if opened is None:
        return None
    sequence, copies = opened
    roster.reserved[job.key] = job
    tables = roster.tables
    reservation = Reservation(job, len(sequence.ids) - 1, tables.block_size, tables.windows)
    return reservation, copies


def verified(roster: JobTable, reservation: Reservation, num_tokens: int) -> int:
    """KV of the first `num_tokens` tokens is there: full blocks become an ordinary cached prefix.

    Returns the tokens of the prefix that are cached so far. The blocks stay reserved; when the
    reservation ends without a commit they are left behind to be found and evicted. With window
    groups nothing is cached as long as the next token would lack a block that was not asked for.
    """
    _expect_open(reservation)
    if num_tokens > reservation.num_tokens:
        raise ValueError(f"{num_tokens} tokens verified of {reservation.num_tokens}")
    tables, sequence = roster.tables, reservation.job.sequences[0]
    size = tables.block_size
    full = num_tokens // size * size
    hit = blocks_for(reservation.cached_tokens, size)
    for window, first in zip(tables.windows, reservation.first_block, strict=True):
        if window and first > max(hit, tables.first_seen(full, window)):
            break
    else:
        tables.publish(sequence, full, reservation.first_block)
    return sequence.num_published * size


def commit(roster: JobTable, reservation: Reservation) -> None:
    """The KV is there: the request joins the queue with its blocks."""
    _expect_open(reservation)
    job = reservation.job
    roster.tables.commit(job.sequences[0], reservation.num_tokens)
    reservation.state = ReservationState.COMMITTED
    del roster.reserved[job.key]
    roster.waiting[job.key] = job


def release(roster: JobTable, reservation: Reservation) -> None:
    """Frees the blocks of an open reservation; of an aborted one they are free already."""
    if reservation.state is ReservationState.ABORTED:
        return
    _expect_open(reservation)
    reservation.state = ReservationState.RELEASED
    roster.end(reservation.job)


def _expect_open(reservation: Reservation) -> None:
    if not reservation.open:
        raise ValueError(f"reservation of {reservation.key!r} is {reservation.state.value}")
