"""Interfaces through which a request acts on its client and on the rest of the router."""

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
    """Interface to the origin of a request: a gateway's session or one Generate call."""

    @property
    def key(self) -> bytes:
        """Key of the client. Request ids are unique among the requests of one key."""

    def put(self, event: RequestEvent) -> None:
        """Queue an event to be sent to the client; never blocks."""

    @property
    def reads_rows(self) -> bool:
        """Whether the client accepts tokens as rows, the compact form (`put_token`); never
        changes."""

    def put_token(self, choice: NumberedChoice, position: int, id_: int) -> bool:
        """Queue a token of an unfinished choice, without log-probabilities, to be sent to the
        client as a row. Returns False if the client does not accept rows."""


@dataclass(eq=False, slots=True)
class Assignment:
    """The workers of one attempt, and the ids whose KV they compute."""

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
    """Interface through which a request acts on the rest of the router; the Dispatcher implements
    it."""

    def emit(self, request: RequestT, event: RequestEvent) -> None:
        """Send an event of the request to its client."""

    def place(self, request: RequestT, now: float) -> None:
        """Begin an attempt of the request now, or queue the request in order of arrival."""

    def find(self, incarnation: bytes) -> Worker | None:
        """Return the worker with this incarnation if commands can be sent to it now, otherwise
        None."""

    def reach(self, incarnation: bytes, now: float) -> Reachability:
        """Return whether commands can be sent to the worker with this incarnation: now, perhaps
        soon, or not."""

    def send(self, worker: Worker, command: Command) -> None:
        """Send a command to a worker. While the session with the worker is down, commands are
        dropped, except cancels of whole attempts."""

    def opened(
        self, request: RequestT, attempt: Assignment, action: OpenAttempt, now: float
    ) -> None:
        """Route workers' messages about a new attempt to the request, and count the attempt's
        work."""

    def stepped(self, request: RequestT, transition: Transition, now: float) -> None:
        """Update the router's counters after a step of the request's state machine, before the
        actions of the step are carried out."""

    def closed(self, request: RequestT, attempt: Assignment, lost: str) -> None:
        """Stop routing workers' messages about an attempt to the request. `lost`: why the attempt
        was dropped, or empty."""

    def waited(self, request: RequestT, seconds: float) -> None:
        """Record the seconds from the request's arrival to the beginning of the attempt that
        produced its first token."""

    def count_prefill(self, remote: bool) -> None:
        """Count a prompt that a prefill worker (`remote`) or a decode worker has computed."""

    def ended(
        self, request: RequestT, now: float, error: ServiceError | None, served: bool
    ) -> None:
        """Forget a request after its terminal event. `error`: its error or None; `served`: whether
        a decode worker still keeps its last events."""
