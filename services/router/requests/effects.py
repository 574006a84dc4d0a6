"""What a request in the router needs of the world around it; no behaviour."""

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pdserve.protos import worker_pb2 as wire
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.rpc.token_rows import NumberedChoice
from pdserve.services.router.fleet.fleet import Worker
from pdserve.services.router.requests.actions import OpenAttempt
from pdserve.services.router.requests.events import Reachability

Command = wire.DecodeCommand | wire.PrefillCommand
RequestT = TypeVar("RequestT", contravariant=True)


class Client(Protocol):
    """Who asked: a gateway's session or one Generate call."""

    @property
    def key(self) -> bytes:
        """Request ids are unique per key."""

    def put(self, event: RequestEvent) -> None:
        """Take an event; never blocks."""

    @property
    def reads_rows(self) -> bool:
        """Whether it takes tokens by `put_token`; that never changes."""

    def put_token(self, choice: NumberedChoice, position: int, id_: int) -> bool:
        """Take a token without log-probabilities of a choice that goes on; False unless it reads
        rows."""


@dataclass(eq=False, slots=True)
class Assignment:
    """The workers of an attempt, and what they are to compute."""

    id: bytes
    decode: Worker
    prefill: Worker | None
    ids: list[int]  # whose KV must exist before the first decode row: prefix ids less the last
    began: float  # when Admit was sent
    ticket: wire.Ticket | None = None  # of its hand-off
    adopted: bool = False  # another session began it
    # By the worker's NumberedChoice the client's.
    clients_choices: dict[NumberedChoice, NumberedChoice] = field(default_factory=dict)


class Effects(Protocol[RequestT]):
    """What a request needs done; the dispatcher does it."""

    def emit(self, request: RequestT, event: RequestEvent) -> None:
        """Pass an event to the client."""

    def place(self, request: RequestT, now: float) -> None:
        """Begin an attempt now, or queue the request in order of arrival."""

    def find(self, boot: bytes) -> Worker | None:
        """The worker with this boot id, if commands can be sent to it."""

    def reach(self, boot: bytes, now: float) -> Reachability:
        """Whether commands can be sent to it, or may be sent soon."""

    def send(self, worker: Worker, command: Command) -> None:
        """Send; dropped if the session is down."""

    def opened(self, request: RequestT, attempt: Assignment, how: OpenAttempt, now: float) -> None:
        """Messages of this attempt belong to the request."""

    def answered(self, attempt: Assignment) -> None:
        """Decode has answered the Admit."""

    def closed(self, request: RequestT, attempt: Assignment, lost: str) -> None:
        """Messages of this attempt no longer belong to the request; `lost`: why it was given up."""

    def waited(self, request: RequestT, seconds: float) -> None:
        """From its arrival to the try that gave its first token."""

    def taken(self, request: RequestT, attempt: Assignment) -> None:
        """A decode worker has taken the attempt."""

    def adopted(self, request: RequestT) -> None:
        """It goes on where another session left it."""

    def count_prefill(self, remote: bool) -> None:
        """The prompt was computed at a prefill worker, or at decode."""

    def migration_begun(self, request: RequestT) -> None:
        """It is on its way to another decode worker."""

    def migration_done(self, request: RequestT, num_tokens: int) -> None:
        """It has arrived there, with the KV of so many tokens."""

    def migration_failed(self, request: RequestT, step: str) -> None:
        """It has not; `step`: how far it was, empty if the request had to leave the source."""

    def ended(
        self, request: RequestT, now: float, error: ServiceError | None, served: bool
    ) -> None:
        """The terminal event is out; `served`: by a worker, who may be asked for it again."""
