"""Actions of the router on a request, as plain data; the state machine (machine.py) returns them.

RoutedRequest (request.py) carries them out in the order given. An attempt is one try to run the
request on a decode worker and perhaps a prefill worker. Workers and attempts are named by id.
"""

from dataclasses import dataclass
from enum import Enum


class FailureReason(Enum):
    """Why the router itself, and not a worker, ends a request with an error."""

    CANCELLED = "cancelled"
    CLIENT_GONE = "client gone"
    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue timeout"
    POISON = "poison"  # too many workers died while running it
    NO_ATTEMPT_LEFT = "no attempt left"
    NO_WORKER_HERE = "no worker here"  # another router of a sharded fleet may have one


@dataclass(frozen=True, slots=True)
class RoutingAction:
    """Base class of the actions of the router on a request."""


@dataclass(frozen=True, slots=True)
class AttemptAction(RoutingAction):
    """Base class of the actions that concern one attempt of a request."""

    attempt: bytes


class Place(RoutingAction):
    """Choose workers for the request and begin an attempt now, or queue the request. Always the
    last action of a step."""


@dataclass(frozen=True, slots=True)
class OpenAttempt(AttemptAction):
    """Route workers' messages about the attempt to the request from now on. `decode` and `prefill`:
    incarnations of the attempt's workers."""

    decode: bytes
    prefill: bytes = b""
    adopted: bool = False  # another session began it, so there is no new work
    follows: bool = False  # decode is expected to wait for the KV of another prompt
    migrates: bool = False  # another decode worker sends its KV


@dataclass(frozen=True, slots=True)
class CloseAttempt(AttemptAction):
    """Ignore workers' messages about the attempt from now on. `lost`: why the attempt was dropped,
    or empty."""

    lost: str = ""


@dataclass(frozen=True, slots=True)
class SendAdmit(AttemptAction):
    """Send Admit, with the request, to the attempt's decode worker. `sender`: the worker that will
    send the KV of the attempt; empty if no worker does."""

    sender: bytes
    min_shared_tokens: int


class SendResume(AttemptAction):
    """Send Resume to the attempt's decode worker, so that this session takes over an attempt that
    another session owns or owned."""


@dataclass(frozen=True, slots=True)
class SendPrefillStart(AttemptAction):
    """Send PrefillStart to the prefill worker, which computes the attempt's KV and sends it to
    decode. Idempotent: a repeated command starts nothing new."""

    prefill: bytes


class SendHold(AttemptAction):
    """Send Hold to the source of a migration: it freezes the attempt, which makes no more steps."""


@dataclass(frozen=True, slots=True)
class SendMove(AttemptAction):
    """Send Move to the source of a migration: it sends its KV to attempt `to` at the target."""

    to: bytes


class SendStay(AttemptAction):
    """Send Stay to the source of a failed migration: the attempt continues there."""


@dataclass(frozen=True, slots=True)
class CancelAtDecode(AttemptAction):
    """Cancel the attempt at its decode worker, or only the given choices of it."""

    choices: tuple[int, ...] = ()


class CancelAtPrefill(AttemptAction):
    """Cancel the attempt at its prefill worker."""


class RepeatAborts(AttemptAction):
    """Send decode once more the cancels of all choices that the client has cancelled, because
    decode may not have received them."""


class ReleasePrefill(AttemptAction):
    """Give up the prefill worker chosen for the attempt, because decode needs no KV from it."""


class AnnouncePlacement(AttemptAction):
    """Send the client Placed, the new placement of the request: its attempt and workers."""


class Adopt(AttemptAction):
    """Continue an attempt that another session began: take over the ticket of its hand-off, and
    send the client its placement."""


class Forward(AttemptAction):
    """Send the client the output that came with the event: tokens, log-probabilities or
    embedding."""


@dataclass(frozen=True, slots=True)
class SendFinished(RoutingAction):
    """Send the client Finished, the terminal event of a request without error. `attempt`: the
    attempt that its worker reported as finished; empty if all choices have ended without a worker's
    report."""

    attempt: bytes = b""


@dataclass(frozen=True, slots=True)
class SendFailed(RoutingAction):
    """Send the client Failed, the terminal event of a request, with an error of the router or of
    another service."""

    error: FailureReason | Exception
    attempt: bytes = b""


@dataclass(frozen=True, slots=True)
class LogLoss(RoutingAction):
    """Log why the router gave up an attempt, or the search for the attempt's worker."""

    reason: str


class HandOver(AttemptAction):
    """Let the next issue of the same request take over the attempt, while decode has yet to answer
    its Admit. An issue is one Start that the client sends for the request."""


class LeaveToSuccessor(RoutingAction):
    """Leave the attempt running at decode when the client issues the request again; the new issue
    finds the attempt by its placement."""
