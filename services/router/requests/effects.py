"""What a flow needs of the world around it, and the record of one try; no behaviour.

A RoutedRequest knows its Effects only, so the same code runs under sockets and under a test's
clock.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from pdserve.protos import worker_pb2 as wire
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.host.errors import ServiceError
from pdserve.services.router.fleet.fleet import Worker

if TYPE_CHECKING:
    from pdserve.services.router.requests.request import RoutedRequest


class Stage(Enum):
    """Where a request stands."""

    QUEUED = "queued"
    SEEKING = "seeking"
    RESUMING = "resuming"
    ADMITTING = "admitting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"


ASKING = (Stage.ADMITTING, Stage.RESUMING)  # nothing is known to run


@dataclass(eq=False, slots=True)
class Attempt:
    """One try on one pair of workers."""

    id: bytes
    decode: Worker
    prefill: Worker | None
    ids: list[int]  # whose KV must exist before the first decode row: prefix ids less the last
    began: float  # when Admit was sent
    asked: float  # when the last command that waits for an answer was sent
    answered: bool = False  # the Admit was: Admitted, Busy, Failed or Gone
    decode_over: bool = False  # that side has ended it, so there is nothing to cancel there
    prefill_over: bool = False
    prefill_accepted: bool = False
    prefill_done: bool = False
    follows: bool = False  # it waits, or may wait, for the KV of another prompt
    produced: bool = False  # ids or prompt log-probabilities came
    moves: bool = False  # another decode worker sends its KV
    lost: str = ""  # why it was given up
    adopted: bool = False  # another flow began it; if its KV is awaited, with whom it may be:
    prefill_boot: bytes = b""
    ticket: wire.Ticket | None = None  # of its hand-off
    unheard: bool = False  # the session with prefill was lost: PrefillStart is said again

    @property
    def unsaid(self) -> bool:
        """Prefill may not know that its KV is wanted, or we may not hear of it."""
        return not self.prefill_over and (self.prefill is None or self.unheard)

    @property
    def filled(self) -> bool:
        """Its KV is known to be complete at decode."""
        return self.produced or self.prefill_done

    @property
    def computing(self) -> bool:
        """Its KV is complete or computed at decode: a step there may be its own."""
        local = self.prefill is None and self.ticket is None and not self.follows
        return local or self.filled


class Effects(Protocol):
    """What a RoutedRequest needs done."""

    def emit(self, flow: "RoutedRequest", event: RequestEvent) -> None:
        """Pass an event to whoever asked."""

    def place(self, flow: "RoutedRequest", now: float) -> None:
        """Begin an attempt now, or queue the flow in order of arrival."""

    def find(self, boot: bytes) -> Worker | None:
        """The worker with this boot id, if commands can be sent to it."""

    def may_join(self, boot: bytes, now: float) -> bool:
        """Whether that worker may be heard of yet."""

    def adopted(self, flow: "RoutedRequest") -> None:
        """It goes on where another session left it."""

    def opened(self, flow: "RoutedRequest", attempt: Attempt, now: float) -> None:
        """Messages of this attempt belong to the flow."""

    def closed(self, attempt: Attempt) -> None:
        """They no longer do."""

    def to_decode(self, worker: Worker, command: wire.DecodeCommand) -> None:
        """Send; dropped if the session is down."""

    def to_prefill(self, worker: Worker, command: wire.PrefillCommand) -> None:
        """Send; dropped if the session is down."""

    def ended(self, flow: "RoutedRequest", now: float, error: ServiceError | None) -> None:
        """The terminal event is out."""


class Client(Protocol):
    """Who asked: a gateway's session or one Generate call."""

    @property
    def key(self) -> bytes:
        """Request ids are unique per key."""

    def put(self, event: RequestEvent) -> None:
        """Take an event; never blocks."""
