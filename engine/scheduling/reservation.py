"""Blocks at a decode worker for KV that a prefill worker computes and transfers. Pure.

The blocks belong to the reservation from JobTable.reserve until commit makes them the request's, or
release frees them, each at most once. Aborting the request ends the reservation too. Verified
blocks are in the prefix cache and stay there when the reservation frees them.
"""

from enum import Enum

from pdserve.engine.kv.spec import blocks_for
from pdserve.engine.scheduling.request_state import RequestState


class ReservationState(Enum):
    """State of a reservation: open -> committed | released | aborted; the JobTable changes it."""

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
