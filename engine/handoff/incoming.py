"""One attempt at decode, as plain data: the Receiver acts on it, on the engine thread."""

from dataclasses import dataclass
from typing import Protocol

from pdserve.engine.handoff.endpoint import Attempt
from pdserve.engine.handoff.keys import Ticket, TicketKeys
from pdserve.engine.handoff.layout import Bitmap
from pdserve.engine.handoff.machine import Handoff
from pdserve.engine.request import Request, prefix_ids


class ReservationLike(Protocol):
    num_tokens: int
    blocks: list[list[int]]
    first_block: list[int]
    cached_tokens: int


@dataclass(slots=True)
class ReceiveTimes:
    """Clock readings of one attempt; 0: not reached."""

    admitted: float
    claimed: float = 0.0  # when prefill began, as its Claim tells
    granted: float = 0.0
    computed: float = 0.0  # prefill's last chunk
    committed: float = 0.0


@dataclass(frozen=True, slots=True)
class Received:
    """A hand-off that is complete: its request is in the batch."""

    attempt: bytes
    transport: str
    num_bytes: int
    cached_tokens: int  # not computed for it: decode's prefix hit, or prefill's if longer
    times: ReceiveTimes


class Incoming(Attempt):
    """An attempt at decode."""

    def __init__(
        self,
        ticket: Ticket,
        state: Handoff,
        keys: TicketKeys,
        request: Request,
        promised: int,
        times: ReceiveTimes,
    ) -> None:
        super().__init__(ticket, state, keys.to_prefill, keys.to_decode)
        self.request = request
        self.num_tokens = len(prefix_ids(request)) - 1
        self.promised = promised  # blocks
        self.cancelled: set[int] = set()  # choices, before it joins the batch
        self.reservation: ReservationLike | None = None
        self.bitmap: Bitmap | None = None
        self.acks: list[int] = []
        self.num_bytes = 0
        self.prefill_cached = 0
        self.times = times
