"""Events of a request in the router, as data without rules; inputs of machine.py.

Workers and attempts are named by id only. An event caused by a worker names its attempt and counts
only while the machine has that attempt.
"""

from dataclasses import dataclass
from enum import Enum

from pdserve.services.router.request.actions import FailureReason


class Reachability(Enum):
    """Whether commands can be sent to a worker that the request seeks."""

    YES = "yes"
    NOT_YET = "not yet"  # it may still join, or its session is being reopened
    NO = "no"


# --- events: the client and the dispatcher


@dataclass(frozen=True, slots=True)
class Submitted:
    """The router has taken the request. `decode`: reachability of the decode worker that its Start
    names; None if it names none."""

    decode: Reachability | None = None


@dataclass(frozen=True, slots=True)
class AttemptBegun:
    """The placement policy chose workers. `prefill` is empty if decode computes the prompt."""

    attempt: bytes
    decode: bytes
    prefill: bytes = b""
    follows: bool = False  # decode is expected to wait for the KV of another prompt
    min_shared_tokens: int = 0  # least tokens of another prompt worth waiting for


@dataclass(frozen=True, slots=True)
class Queued:
    """No worker can take the request now: it waits, after which it may try every worker again."""


@dataclass(frozen=True, slots=True)
class Reissued:
    """The client issued the request again under a higher epoch, and a successor goes on with it.
    `same_progress`: the successor's Start holds exactly the ids that this request has."""

    same_progress: bool


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client cancelled the whole request."""


@dataclass(frozen=True, slots=True)
class ChoicesCancelled:
    """The client cancelled some choices. `complete`: every choice has ended now."""

    choices: tuple[int, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The session of the client ended."""


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The dispatcher ends the request with an error."""

    error: FailureReason | Exception


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed. The fields say whether the sought workers can be reached."""

    decode: Reachability = Reachability.NO
    prefill: Reachability = Reachability.NO


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died or froze (`crashed`), or only the session with it broke, losing the messages in
    flight. `forgotten`: the fleet no longer has it."""

    worker: bytes
    reason: str
    crashed: bool
    forgotten: bool


@dataclass(frozen=True, slots=True)
class MigrationBegun:
    """The running request is to move to another decode worker with its KV."""

    target: bytes


# --- events: a decode worker


@dataclass(frozen=True, slots=True)
class AdmitAccepted:
    """Admitted: decode has promised blocks. With a ticket it waits for a remote prefill."""

    attempt: bytes
    ticket: bool
    follows: bool = False  # it waits for KV in transfer there for another prompt


@dataclass(frozen=True, slots=True)
class AdmitRefused:
    """Busy: decode has no room now."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class AttemptUnknown:
    """Gone: decode does not know the attempt."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class ResumeAccepted:
    """Resumed: the attempt belongs to this session, and decode repeats its earlier messages."""

    attempt: bytes
    epoch: int
    ticket: bool  # its KV is still awaited ...
    prefill: bytes = b""  # ... from this worker,
    reachable: Reachability = Reachability.NO  # if it can be reached
    follows: bool = False


@dataclass(frozen=True, slots=True)
class TokensReceived:
    """Ids arrived that continue the answer. The flags describe the request after them."""

    attempt: bytes
    begun: bool  # some choice has ids
    complete: bool  # every choice has ended


@dataclass(frozen=True, slots=True)
class ScoresReceived:
    """Log-probabilities of the prompt arrived."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class EmbeddingReceived:
    """The embedding of the prompt arrived, which is the whole answer."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class OutputMissing:
    """Ids or prompt log-probabilities arrived, but earlier ones are missing."""

    attempt: bytes
    reason: str
    tokens: bool


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    """Every choice has ended at decode."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Decode refused or failed the attempt. `elsewhere`: another worker may still take it."""

    attempt: bytes
    error: Exception
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class KvLost:
    """HandoffLost: decode stopped waiting for the KV and has freed its blocks."""

    attempt: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """Attached: the KV of the other prompt is there, so decode may compute from now on."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class WaitFailed:
    """PlaceAgain: decode waited for another prompt in vain; no work began."""

    attempt: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class SourceHeld:
    """Held: the source of a migration has stopped. `complete`: the router has all of its ids.
    `target_attempt`: the id for the attempt at the target."""

    attempt: bytes
    complete: bool
    target_attempt: bytes


@dataclass(frozen=True, slots=True)
class SourceMoved:
    """Moved: the attempt has ended at the source, and attempt `to` has its KV."""

    attempt: bytes
    to: bytes


@dataclass(frozen=True, slots=True)
class SourceStayed:
    """Stayed: the attempt goes on at the source."""

    attempt: bytes
    reason: str


# --- events: a prefill worker


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """PrefillAccepted: the prefill worker has the prompt."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class PrefillSent:
    """PrefillDone: decode has verified every block."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The prefill failed or never began. `at_fault`: it counts among the failures after which
    decode computes the prompt itself."""

    attempt: bytes
    reason: str
    at_fault: bool = True


OfDecode = (
    AdmitAccepted
    | AdmitRefused
    | AttemptUnknown
    | ResumeAccepted
    | TokensReceived
    | ScoresReceived
    | EmbeddingReceived
    | OutputMissing
    | AttemptFinished
    | AttemptFailed
    | KvLost
    | WaitEnded
    | WaitFailed
    | SourceHeld
    | SourceMoved
    | SourceStayed
)
OfPrefill = PrefillStarted | PrefillSent | PrefillEnded
OfRouter = (
    Submitted
    | AttemptBegun
    | Queued
    | Reissued
    | RequestCancelled
    | ChoicesCancelled
    | ClientLeft
    | RequestRefused
    | TimePassed
    | WorkerLost
    | MigrationBegun
)
RoutingEvent = OfRouter | OfDecode | OfPrefill
