"""Actions of the router on a request, as data without rules; machine.py returns them.

The shell (request.py) carries them out in the order given. Workers are named by boot id.
"""

from dataclasses import dataclass
from enum import Enum


class FailureReason(Enum):
    """Why the router itself ends a request with an error."""

    CANCELLED = "cancelled"
    CLIENT_GONE = "client gone"
    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue timeout"
    POISON = "poison"  # too many workers died while running it
    NO_TRY_LEFT = "no try left"
    NO_WORKER_HERE = "no worker here"  # another router of a sharded fleet may have one


@dataclass(frozen=True, slots=True)
class Place:
    """Choose workers and begin an attempt now, or queue the request. Always the last action."""


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """Route messages about this attempt to the request from now on; `decode` serves it."""

    attempt: bytes
    decode: bytes
    prefill: bytes = b""
    adopted: bool = False  # another session began it, so there is no new work
    follows: bool = False  # decode is expected to wait for the KV of another prompt
    migrates: bool = False  # another decode worker sends its KV


@dataclass(frozen=True, slots=True)
class CloseAttempt:
    """Ignore messages about the attempt from now on. `lost`: why it was dropped, or empty."""

    attempt: bytes
    lost: str = ""


@dataclass(frozen=True, slots=True)
class SendAdmit:
    """Send the request to decode. `sender` will send its KV; empty: no worker does."""

    attempt: bytes
    sender: bytes
    min_shared_tokens: int


@dataclass(frozen=True, slots=True)
class SendResume:
    """Request an attempt from decode that another session owns or owned."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class SendPrefillStart:
    """Have the KV of the attempt computed and sent. Idempotent: a repeat starts nothing new."""

    attempt: bytes
    prefill: bytes


@dataclass(frozen=True, slots=True)
class SendHold:
    """Stop the source of a migration."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class SendMove:
    """Have the source send its KV to attempt `to` at the target."""

    attempt: bytes
    to: bytes


@dataclass(frozen=True, slots=True)
class SendStay:
    """Have the source go on."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class CancelAtDecode:
    """End the attempt at decode, or only some of its choices."""

    attempt: bytes
    choices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelAtPrefill:
    """End the attempt at prefill."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class RepeatAborts:
    """Cancel again the choices that the client has cancelled: decode may not have received it."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class SparePrefill:
    """Release the chosen prefill worker: decode answered without a ticket."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class AnnouncePlacement:
    """Send the client the new placement of the request."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class GoOn:
    """Go on with the attempt where another session left it: take its ticket, tell the client."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class PassOn:
    """Send the client the output that came with the event."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class SendFinished:
    """Send the terminal event. `attempt`: the one whose Finished came with the event; empty if all
    choices have ended without a worker to report it."""

    attempt: bytes = b""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Send the terminal event with an error of the router or of another service."""

    error: FailureReason | Exception
    attempt: bytes = b""


@dataclass(frozen=True, slots=True)
class LogLoss:
    """Log that an attempt, or the search for one, is dropped."""

    reason: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """Hand the attempt over to the successor, with the answer that decode still owes."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class LeaveToSuccessor:
    """Leave the attempt running at decode; the successor finds it by its placement."""


RoutingAction = (
    Place
    | OpenAttempt
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
    | AnnouncePlacement
    | GoOn
    | PassOn
    | SendFinished
    | SendFailed
    | LogLoss
    | HandOver
    | LeaveToSuccessor
)
