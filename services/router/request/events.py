"""Events of a request in the router, as plain data: the inputs of the state machine (machine.py).

Workers and attempts are named by id only. An event that a worker's message causes names its
attempt, and is ignored unless the state machine has that attempt.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError
from pdserve.services.router.request.actions import FailureReason


class Reachability(Enum):
    """Whether commands can be sent to a worker that the request needs: now, perhaps soon, or
    not."""

    YES = "yes"
    NOT_YET = "not yet"  # it may still join, or its session is being reopened
    NO = "no"


@dataclass(frozen=True, slots=True)
class RoutingEvent:
    """Base class of all events of a request. Events of the client and of the dispatcher derive from
    it directly."""


@dataclass(frozen=True, slots=True)
class WorkerEvent(RoutingEvent):
    """Base class of the events that are a worker's message about an attempt."""

    attempt: bytes


class DecodeEvent(WorkerEvent):
    """Base class of the events that are a decode worker's message about an attempt."""


class OutputEvent(DecodeEvent):
    """Base class of the decode worker's messages that bring output of an attempt or report that it
    has finished."""


class PrefillEvent(WorkerEvent):
    """Base class of the events that are a prefill worker's message about an attempt."""


# --- events of the client and the dispatcher


@dataclass(frozen=True, slots=True)
class Submitted(RoutingEvent):
    """Event: the router has accepted the request. `decode`: whether the decode worker that the
    request's Start names can be reached; None if the Start names none."""

    decode: Reachability | None = None


@dataclass(frozen=True, slots=True)
class AttemptBegun(RoutingEvent):
    """Event: the placement policy has chosen workers for a new attempt. `prefill` is empty if
    decode computes the prompt."""

    attempt: bytes
    decode: bytes
    prefill: bytes = b""
    follows: bool = False  # decode is expected to wait for the KV of another prompt
    min_shared_tokens: int = 0  # least tokens of another prompt worth waiting for


class Queued(RoutingEvent):
    """Event: no worker can take the request now, so it waits in the queue; afterwards it may try
    every worker again."""


@dataclass(frozen=True, slots=True)
class Reissued(RoutingEvent):
    """Event: the client has issued the request again under a higher epoch, and that issue continues
    the request. `same_progress`: whether the new Start holds exactly the generated ids of this
    one."""

    same_progress: bool


class RequestCancelled(RoutingEvent):
    """Event: the client has cancelled the whole request."""


@dataclass(frozen=True, slots=True)
class ChoicesCancelled(RoutingEvent):
    """Event: the client has cancelled some choices of the request. `complete`: whether every choice
    has ended now."""

    choices: tuple[int, ...]
    complete: bool


class ClientLeft(RoutingEvent):
    """Event: the session of the request's client has ended."""


@dataclass(frozen=True, slots=True)
class RequestRefused(RoutingEvent):
    """Event: the dispatcher refuses the request, or ends it while it waits, with this error."""

    error: FailureReason | Exception


@dataclass(frozen=True, slots=True)
class TimePassed(RoutingEvent):
    """Event: time has passed. `decode` and `prefill`: whether the request's workers can be reached
    now."""

    decode: Reachability = Reachability.NO
    prefill: Reachability = Reachability.NO


@dataclass(frozen=True, slots=True)
class WorkerLost(RoutingEvent):
    """Event: a worker died or froze (`crashed`), or only the session with it broke, which loses the
    messages in flight. `forgotten`: whether the fleet has removed the worker."""

    worker: bytes
    reason: str
    crashed: bool
    forgotten: bool


@dataclass(frozen=True, slots=True)
class MigrationBegun(RoutingEvent):
    """Event: the router has chosen the running request to migrate, with its KV, to the decode
    worker `target`."""

    target: bytes


# --- messages of a decode worker


@dataclass(frozen=True, slots=True)
class AdmitAccepted(DecodeEvent):
    """Message Admitted: decode has accepted the attempt. With a ticket, it has promised blocks for
    KV that another worker sends."""

    ticket: bool
    follows: bool = False  # it waits for KV in transfer there for another prompt


class AdmitRefused(DecodeEvent):
    """Message Busy: decode refuses the attempt, because it has no room now."""


class AttemptUnknown(DecodeEvent):
    """Message Gone: decode does not know the attempt, or no longer."""


@dataclass(frozen=True, slots=True)
class ResumeAccepted(DecodeEvent):
    """Message Resumed: the attempt belongs to this session from now on, and decode sends the output
    that the router lacks again."""

    epoch: int
    ticket: bool  # its KV is still awaited ...
    prefill: bytes = b""  # ... from this worker,
    reachable: Reachability = Reachability.NO  # if it can be reached
    follows: bool = False


@dataclass(frozen=True, slots=True)
class TokensReceived(OutputEvent):
    """Event: token ids that continue the response have arrived. `begun` and `complete` describe the
    request after them."""

    begun: bool  # some choice has ids
    complete: bool  # every choice has ended


class ScoresReceived(OutputEvent):
    """Event: log-probabilities of the prompt's tokens have arrived."""


class EmbeddingReceived(OutputEvent):
    """Event: the embedding of the prompt has arrived, which is the whole response."""


@dataclass(frozen=True, slots=True)
class OutputMissing(OutputEvent):
    """Event: token ids (`tokens`) or prompt log-probabilities have arrived, but earlier ones are
    missing, so the attempt is lost."""

    reason: str
    tokens: bool


class AttemptFinished(OutputEvent):
    """Message Finished: every choice of the attempt has ended at decode."""


@dataclass(frozen=True, slots=True)
class AttemptFailed(DecodeEvent):
    """Message Failed: decode has refused the attempt, or has failed while it ran. `elsewhere`:
    whether another worker may still take the request."""

    error: Exception
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class KvLost(DecodeEvent):
    """Message HandoffLost: decode has stopped waiting for the attempt's KV and has freed its
    blocks."""

    reason: str


class WaitEnded(DecodeEvent):
    """Message Attached: the KV of another prompt, for which the attempt waited, has arrived at
    decode, which may compute the attempt from now on."""


@dataclass(frozen=True, slots=True)
class WaitFailed(DecodeEvent):
    """Message PlaceAgain: the attempt waited at decode for another prompt's KV, but cannot continue
    there. It has ended before any work began, and the request must be placed again."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceHeld(DecodeEvent):
    """Message Held: the source of a migration has frozen the attempt. `complete`: whether the
    router has all ids that the source generated. `target_attempt`: id for the attempt at the
    target."""

    complete: bool
    target_attempt: bytes


@dataclass(frozen=True, slots=True)
class SourceMoved(DecodeEvent):
    """Message Moved: the attempt has ended at the source of a migration, and attempt `to` at the
    target has its KV."""

    to: bytes


@dataclass(frozen=True, slots=True)
class SourceStayed(DecodeEvent):
    """Message Stayed: the migration has failed, and the attempt continues at its source."""

    reason: str


# --- messages of a prefill worker


class PrefillStarted(PrefillEvent):
    """Message PrefillAccepted: the prefill worker has accepted the attempt's prompt."""


class PrefillSent(PrefillEvent):
    """Message PrefillDone: the prefill worker has sent the attempt's KV, and decode has verified
    every block."""


@dataclass(frozen=True, slots=True)
class PrefillEnded(PrefillEvent):
    """Event: the prefill of the attempt has failed or never began. `at_fault`: whether it counts
    among the failures after which decode computes the prompt itself."""

    reason: str
    at_fault: bool = True


def of_decode(kind: str, message: Any) -> DecodeEvent:
    """Convert a decode worker's message that needs no other data to an event. `kind`: name of the
    message's field in the proto. Raises ValueError for any other kind of message."""
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
    raise ValueError(
        f"no conversion for the message {kind} of a decode worker: it needs other data"
    )


def of_prefill(kind: str, message: Any) -> PrefillEvent:
    """Convert a prefill worker's message to an event. `kind`: name of the message's field in the
    proto."""
    attempt = message.attempt
    match kind:
        case "accepted":
            return PrefillStarted(attempt)
        case "done":
            return PrefillSent(attempt)
        case "failed":
            return PrefillEnded(attempt, message.failure.message, not message.handed_back)
    return PrefillEnded(attempt, kind)  # Busy or Gone
