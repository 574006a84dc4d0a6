"""Actions of the router on a request, as plain data; the state machine (machine.py) returns them.

The shell (request.py) carries them out in the order given. Workers and attempts are named by id.
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
    NO_ATTEMPT_LEFT = "no attempt left"
    NO_WORKER_HERE = "no worker here"  # another router of a sharded fleet may have one


@dataclass(frozen=True, slots=True)
class RoutingAction:
    """An action of the router on a request."""


@dataclass(frozen=True, slots=True)
class AttemptAction(RoutingAction):
    """An action that concerns one attempt."""

    attempt: bytes


class Place(RoutingAction):
    """Choose workers and begin an attempt now, or queue the request. Always the last action."""


@dataclass(frozen=True, slots=True)
class OpenAttempt(AttemptAction):
    """Route messages about this attempt to the request from now on; `decode` serves it."""

    decode: bytes
    prefill: bytes = b""
    adopted: bool = False  # another session began it, so there is no new work
    follows: bool = False  # decode is expected to wait for the KV of another prompt
    migrates: bool = False  # another decode worker sends its KV


@dataclass(frozen=True, slots=True)
class CloseAttempt(AttemptAction):
    """Ignore messages about the attempt from now on. `lost`: why it was dropped, or empty."""

    lost: str = ""


@dataclass(frozen=True, slots=True)
class SendAdmit(AttemptAction):
    """Send the request to decode. `sender` will send its KV; empty: no worker does."""

    sender: bytes
    min_shared_tokens: int


class SendResume(AttemptAction):
    """Send Resume to decode, for an attempt that another session owns or owned."""


@dataclass(frozen=True, slots=True)
class SendPrefillStart(AttemptAction):
    """Have the KV of the attempt computed and sent. Idempotent: a repeat starts nothing new."""

    prefill: bytes


class SendHold(AttemptAction):
    """Freeze the source of a migration: it makes no more steps."""


@dataclass(frozen=True, slots=True)
class SendMove(AttemptAction):
    """Have the source of a migration send its KV to attempt `to` at the target."""

    to: bytes


class SendStay(AttemptAction):
    """Let the source of a failed migration continue."""


@dataclass(frozen=True, slots=True)
class CancelAtDecode(AttemptAction):
    """End the attempt at decode, or only some of its choices."""

    choices: tuple[int, ...] = ()


class CancelAtPrefill(AttemptAction):
    """End the attempt at prefill."""


class RepeatAborts(AttemptAction):
    """Cancel again the choices that the client has cancelled: decode may not have received it."""


class ReleasePrefill(AttemptAction):
    """Release the chosen prefill worker: decode computes the prompt itself."""


class AnnouncePlacement(AttemptAction):
    """Send the client the new placement of the request."""


class Adopt(AttemptAction):
    """Continue the attempt where another session left it: take its ticket, inform the client."""


class Forward(AttemptAction):
    """Send the client the output that came with the event."""


@dataclass(frozen=True, slots=True)
class SendFinished(RoutingAction):
    """Send the terminal event. `attempt`: the one whose Finished came with the event; empty if all
    choices have ended without a worker to report it."""

    attempt: bytes = b""


@dataclass(frozen=True, slots=True)
class SendFailed(RoutingAction):
    """Send the terminal event with an error of the router or of another service."""

    error: FailureReason | Exception
    attempt: bytes = b""


@dataclass(frozen=True, slots=True)
class LogLoss(RoutingAction):
    """Log why an attempt, or the search for its worker, was given up."""

    reason: str


class HandOver(AttemptAction):
    """Let the request's next issue take over the attempt, whose Admit decode has yet to answer."""


class LeaveToSuccessor(RoutingAction):
    """Leave the attempt running at decode; the request's next issue finds it by its placement."""
