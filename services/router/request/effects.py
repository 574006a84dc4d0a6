"""Interfaces through which a request acts on the rest of the router."""

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pdserve.protos import worker_pb2 as wire
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import NumberedChoice
from pdserve.services.router.fleet import Command, Worker
from pdserve.services.router.request.actions import OpenAttempt
from pdserve.services.router.request.events import Reachability
from pdserve.services.router.request.state import Transition

RequestT = TypeVar("RequestT", contravariant=True)


class Client(Protocol):
    """Where a request came from: a gateway's session or one Generate call."""

    @property
    def key(self) -> bytes:
        """Key within which request ids are unique."""

    def put(self, event: RequestEvent) -> None:
        """Queue an event for the client; never blocks."""

    @property
    def reads_rows(self) -> bool:
        """Whether it accepts `put_token`; never changes."""

    def put_token(self, choice: NumberedChoice, position: int, id_: int) -> bool:
        """Take a token without log-probabilities of an unfinished choice. Returns False unless it
        `reads_rows`."""


@dataclass(eq=False, slots=True)
class Assignment:
    """The workers of an attempt, and the ids that they compute."""

    id: bytes
    decode: Worker
    prefill: Worker | None
    ids: list[int]  # prefix ids less the last: their KV must exist before the first decode row
    began: float  # when Admit was sent
    ticket: wire.Ticket | None = None  # of its hand-off
    adopted: bool = False  # another session began it
    # From the worker's NumberedChoice to the client's.
    clients_choices: dict[NumberedChoice, NumberedChoice] = field(default_factory=dict)


class Effects(Protocol[RequestT]):
    """What a request does to the rest of the router; the dispatcher implements it."""

    def emit(self, request: RequestT, event: RequestEvent) -> None:
        """Send an event to the client."""

    def place(self, request: RequestT, now: float) -> None:
        """Begin an attempt now, or queue the request in order of arrival."""

    def find(self, incarnation: bytes) -> Worker | None:
        """Return the worker with this incarnation if commands can be sent to it."""

    def reach(self, incarnation: bytes, now: float) -> Reachability:
        """Return whether commands can be sent to the worker now, or may be possible soon."""

    def send(self, worker: Worker, command: Command) -> None:
        """Send a command; dropped if the session is down."""

    def opened(
        self, request: RequestT, attempt: Assignment, action: OpenAttempt, now: float
    ) -> None:
        """Route messages of this attempt to the request."""

    def stepped(self, request: RequestT, transition: Transition, now: float) -> None:
        """Update counters after a step of its state machine, before its actions."""

    def closed(self, request: RequestT, attempt: Assignment, lost: str) -> None:
        """Stop routing messages of this attempt to the request. `lost`: why it was dropped."""

    def waited(self, request: RequestT, seconds: float) -> None:
        """Record the time from the request's arrival to the attempt that produced its first
        token."""

    def count_prefill(self, remote: bool) -> None:
        """Count a prompt computed by a prefill worker (`remote`) or by a decode worker."""

    def ended(
        self, request: RequestT, now: float, error: ServiceError | None, served: bool
    ) -> None:
        """Forget a request after its terminal event. `served`: a decode worker still keeps its last
        events."""
