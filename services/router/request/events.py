"""Events of a request in the router, as plain data: the inputs of the state machine (machine.py).

Workers and attempts are named by id only. An event caused by a worker names its attempt and counts
only while the machine has that attempt.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError
from pdserve.services.router.request.actions import FailureReason


class Reachability(Enum):
    """Whether commands can be sent to a worker that the request needs."""

    YES = "yes"
    NOT_YET = "not yet"  # it may still join, or its session is being reopened
    NO = "no"


@dataclass(frozen=True, slots=True)
class RoutingEvent:
    """An event of a request; those of the client and the dispatcher derive from it directly."""


@dataclass(frozen=True, slots=True)
class WorkerEvent(RoutingEvent):
    """A message of a worker about an attempt."""

    attempt: bytes


class DecodeEvent(WorkerEvent):
    """A message of a decode worker."""


class OutputEvent(DecodeEvent):
    """A message of a decode worker with output, or with its end."""


class PrefillEvent(WorkerEvent):
    """A message of a prefill worker."""


# --- events of the client and the dispatcher


@dataclass(frozen=True, slots=True)
class Submitted(RoutingEvent):
    """The router has taken the request. `decode`: reachability of the decode worker that its Start
    names; None if it names none."""

    decode: Reachability | None = None


@dataclass(frozen=True, slots=True)
class AttemptBegun(RoutingEvent):
    """The placement policy chose workers. `prefill` is empty if decode computes the prompt."""

    attempt: bytes
    decode: bytes
    prefill: bytes = b""
    follows: bool = False  # decode is expected to wait for the KV of another prompt
    min_shared_tokens: int = 0  # least tokens of another prompt worth waiting for


class Queued(RoutingEvent):
    """No worker can take the request now: it waits, after which it may try every worker again."""


@dataclass(frozen=True, slots=True)
class Reissued(RoutingEvent):
    """The client issued the request again under a higher epoch, and that issue continues it.
    `same_progress`: its Start holds exactly the ids that this request has."""

    same_progress: bool


class RequestCancelled(RoutingEvent):
    """The client cancelled the whole request."""


@dataclass(frozen=True, slots=True)
class ChoicesCancelled(RoutingEvent):
    """The client cancelled some choices. `complete`: every choice has ended now."""

    choices: tuple[int, ...]
    complete: bool


class ClientLeft(RoutingEvent):
    """The session of the client ended."""


@dataclass(frozen=True, slots=True)
class RequestRefused(RoutingEvent):
    """The dispatcher ends the request with this error."""

    error: FailureReason | Exception


@dataclass(frozen=True, slots=True)
class TimePassed(RoutingEvent):
    """Time has passed. The fields say whether the request's workers can be reached."""

    decode: Reachability = Reachability.NO
    prefill: Reachability = Reachability.NO


@dataclass(frozen=True, slots=True)
class WorkerLost(RoutingEvent):
    """A worker died or froze (`crashed`), or only the session with it broke and the messages in
    flight are lost. `forgotten`: the fleet has removed the worker."""

    worker: bytes
    reason: str
    crashed: bool
    forgotten: bool


@dataclass(frozen=True, slots=True)
class MigrationBegun(RoutingEvent):
    """The running request is to migrate to another decode worker with its KV."""

    target: bytes


# --- messages of a decode worker


@dataclass(frozen=True, slots=True)
class AdmitAccepted(DecodeEvent):
    """Admitted: decode has promised blocks. With a ticket it waits for a remote prefill."""

    ticket: bool
    follows: bool = False  # it waits for KV in transfer there for another prompt


class AdmitRefused(DecodeEvent):
    """Busy: decode has no room now."""


class AttemptUnknown(DecodeEvent):
    """Gone: decode does not know the attempt."""


@dataclass(frozen=True, slots=True)
class ResumeAccepted(DecodeEvent):
    """Resumed: the attempt belongs to this session, and decode repeats its earlier messages."""

    epoch: int
    ticket: bool  # its KV is still awaited ...
    prefill: bytes = b""  # ... from this worker,
    reachable: Reachability = Reachability.NO  # if it can be reached
    follows: bool = False


@dataclass(frozen=True, slots=True)
class TokensReceived(OutputEvent):
    """Ids arrived that continue the response. The flags describe the request after them."""

    begun: bool  # some choice has ids
    complete: bool  # every choice has ended


class ScoresReceived(OutputEvent):
    """Log-probabilities of the prompt arrived."""


class EmbeddingReceived(OutputEvent):
    """The embedding of the prompt arrived, which is the whole response."""


@dataclass(frozen=True, slots=True)
class OutputMissing(OutputEvent):
    """Ids or prompt log-probabilities arrived, but earlier ones are missing."""

    reason: str
    tokens: bool


class AttemptFinished(OutputEvent):
    """Every choice has ended at decode."""


@dataclass(frozen=True, slots=True)
class AttemptFailed(DecodeEvent):
    """Decode refused or failed the attempt. `elsewhere`: another worker may still take it."""

    error: Exception
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class KvLost(DecodeEvent):
    """HandoffLost: decode stopped waiting for the KV and has freed its blocks."""

    reason: str


class WaitEnded(DecodeEvent):
    """Attached: the KV of the other prompt is there, so decode may compute from now on."""


@dataclass(frozen=True, slots=True)
class WaitFailed(DecodeEvent):
    """PlaceAgain: decode waited for another prompt's KV, but it did not come; no work began."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceHeld(DecodeEvent):
    """Held: the source of a migration is frozen. `complete`: the router has all of its ids.
    `target_attempt`: the id for the attempt at the target."""

    complete: bool
    target_attempt: bytes


@dataclass(frozen=True, slots=True)
class SourceMoved(DecodeEvent):
    """Moved: the attempt has ended at the source, and attempt `to` has its KV."""

    to: bytes


@dataclass(frozen=True, slots=True)
class SourceStayed(DecodeEvent):
    """Stayed: the migration failed, and the attempt continues at the source."""

    reason: str


# --- messages of a prefill worker


class PrefillStarted(PrefillEvent):
    """PrefillAccepted: the prefill worker has the prompt."""


class PrefillSent(PrefillEvent):
    """PrefillDone: decode has verified every block."""


@dataclass(frozen=True, slots=True)
class PrefillEnded(PrefillEvent):
    """The prefill failed or never began. `at_fault`: it counts among the failures after which
    decode computes the prompt itself."""

    reason: str
    at_fault: bool = True


def of_decode(kind: str, message: Any) -> DecodeEvent:
    """Convert a self-contained event of a decode session; `kind` is its name in the proto. Raises
    ValueError for any other event."""
    attempt = message.attempt
    match kind:
        case "admitted":
            return AdmitAccepted(attempt, message.HasField("ticket"), message.follows)
        case "busy":
            return AdmitRefused(attempt)
        case "gone":
            return AttemptUnknown(attempt)
        case "finished":
            return AttemptFinished(attempt)
        case "failed":
            elsewhere = message.failure.code in (pb.UNAVAILABLE, pb.OVERLOADED)
            return AttemptFailed(attempt, ServiceError.from_failure(message.failure), elsewhere)
        case "handoff_lost":
            return KvLost(attempt, message.reason)
        case "attached":
            return WaitEnded(attempt)
        case "place_again":
            return WaitFailed(attempt, message.reason)
        case "moved":
            return SourceMoved(attempt, message.to)
        case "stayed":
            return SourceStayed(attempt, message.reason)
    raise ValueError(f"unexpected event of a decode worker: {kind}")


def of_prefill(kind: str, message: Any) -> PrefillEvent:
    """Convert an event of a prefill session; `kind` is its name in the proto."""
    attempt = message.attempt
    match kind:
        case "accepted":
            return PrefillStarted(attempt)
        case "done":
            return PrefillSent(attempt)
        case "failed":
            return PrefillEnded(attempt, message.failure.message, not message.handed_back)
    return PrefillEnded(attempt, kind)  # Busy or Gone
