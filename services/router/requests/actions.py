"""What the router does about a request: the actions of machine.py, without any rule; pure.

The shell (request.py) carries them out in the order given. A worker is known by its boot id.
"""

from dataclasses import dataclass
from enum import Enum


class FailureReason(Enum):
    """Why the router itself ends a request with an error."""

    CANCELLED = "cancelled"
    CLIENT_GONE = "client gone"
    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue timeout"
    POISON = "poison"  # workers died of it, or with it
    NO_TRY_LEFT = "no try left"
    NO_WORKER_HERE = "no worker here"  # another router of a sharded fleet may have one


@dataclass(frozen=True, slots=True)
class Place:
    """Choose workers and begin an attempt now, or put the request in the queue. Always last."""


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """Messages about this attempt belong to the request from now on; `decode` serves it."""

    attempt: bytes
    decode: bytes
    prefill: bytes = b""
    adopted: bool = False  # no new work: another session began it
    follows: bool = False  # decode is expected to wait for the KV of another prompt
    migrates: bool = False  # another decode worker sends its KV


@dataclass(frozen=True, slots=True)
class CountAnswer:
    """Its Admit is no longer unanswered."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class CloseAttempt:
    """Messages about it no longer count; `lost`: why it was given up, empty if it was not."""

    attempt: bytes
    lost: str = ""


@dataclass(frozen=True, slots=True)
class SendAdmit:
    """Hand the request over to decode; `sender` will send its KV, if anybody does."""

    attempt: bytes
    sender: bytes
    min_shared_tokens: int


@dataclass(frozen=True, slots=True)
class SendResume:
    """Ask decode for an attempt that another session has, or had."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class SendPrefillStart:
    """Have its KV computed and sent; said again, nothing begins anew."""

    attempt: bytes
    prefill: bytes


@dataclass(frozen=True, slots=True)
class SendHold:
    """Have the source of a migration stop."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class SendMove:
    """Have the source send its KV to the attempt at the target."""

    attempt: bytes
    to: bytes


@dataclass(frozen=True, slots=True)
class SendStay:
    """Have the source go on."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class CancelAtDecode:
    """End the attempt there, or some of its choices."""

    attempt: bytes
    choices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelAtPrefill:
    """End the attempt there."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class RepeatAborts:
    """Cancel at decode the choices that the client has cancelled: it may not have heard of it."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class SparePrefill:
    """The prefill worker that was chosen has nothing to do: decode answered without a ticket."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class CountPrefill:
    """The prefill worker has work after all, though decode was expected to wait for another."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class AnnouncePlacement:
    """Tell the client where the request runs; `anew`: that is somewhere else than before."""

    attempt: bytes
    anew: bool = True


@dataclass(frozen=True, slots=True)
class CountResume:
    """The attempt goes on where another session left it."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class CountIdentity:
    """A decode worker has taken the attempt: its KV identity may differ from the earlier one's."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class PassOn:
    """Send the client the output that came with the event."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class SendFinished:
    """The terminal event. `attempt`: the one whose Finished came with the event; empty if all
    choices have ended and no worker is left to say so."""

    attempt: bytes = b""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The terminal event, with what the router or somebody else says is wrong."""

    error: FailureReason | Exception
    attempt: bytes = b""


@dataclass(frozen=True, slots=True)
class LogLoss:
    """An attempt, or the search for one, is given up."""

    reason: str


@dataclass(frozen=True, slots=True)
class CountMigrationBegun:
    """A migration is under way."""


@dataclass(frozen=True, slots=True)
class CountMigrationDone:
    """It is over: `attempt` goes on at the target, and `source` has ended."""

    attempt: bytes
    source: bytes


@dataclass(frozen=True, slots=True)
class CountMigrationFailed:
    """It is over: the request stays at the source. `step`: how far it was; empty if the request
    itself left the source."""

    step: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """The successor takes the attempt over, and with it the answer that decode still owes."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class LeaveToSuccessor:
    """The successor will find the attempt by its placement: it goes on at decode meanwhile."""


RoutingAction = (
    Place
    | OpenAttempt
    | CountAnswer
    | CloseAttempt
    | SendAdmit
    | SendResume
    | SendPrefillStart
    | SendHold
    | SendMove
    | SendStay
    | CancelAtDecode
    | CancelAtPrefill
    | RepeatAborts
    | SparePrefill
    | CountPrefill
    | AnnouncePlacement
    | CountResume
    | CountIdentity
    | PassOn
    | SendFinished
    | SendFailed
    | LogLoss
    | CountMigrationBegun
    | CountMigrationDone
    | CountMigrationFailed
    | HandOver
    | LeaveToSuccessor
)
