"""What can happen to a request in the router: the events of machine.py, without any rule; pure.

Workers and attempts are known by their ids alone. An event that a worker caused names the attempt
that it is about, and counts only while the machine has that attempt.
"""

from dataclasses import dataclass
from enum import Enum

from pdserve.services.router.requests.actions import FailureReason


class Reachability(Enum):
    """Whether commands can be sent to a worker that the request looks for."""

    YES = "yes"
    NOT_YET = "not yet"  # it may still join, or its session is being opened again
    NO = "no"


# --- events: the client and the dispatcher


@dataclass(frozen=True, slots=True)
class Submitted:
    """The request is taken. `decode`: whether the decode worker that its Start names, if it names
    one, can be reached."""

    decode: Reachability | None = None


@dataclass(frozen=True, slots=True)
class AttemptBegun:
    """The placement policy chose workers; `prefill` is empty if decode computes the prompt."""

    attempt: bytes
    decode: bytes
    prefill: bytes = b""
    follows: bool = False  # decode is expected to wait for the KV of another prompt
    min_shared_tokens: int = 0  # of another prompt that are worth waiting for


@dataclass(frozen=True, slots=True)
class Queued:
    """No worker can take it now: it waits, and then every worker may be asked again."""


@dataclass(frozen=True, slots=True)
class Reissued:
    """Its client issued it again under a higher epoch: a successor goes on with the request.
    `same_progress`: the successor's Start holds exactly the ids that this one has."""

    same_progress: bool


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """Its client cancelled all of it."""


@dataclass(frozen=True, slots=True)
class ChoicesCancelled:
    """Its client cancelled some choices; `complete`: every choice has ended now."""

    choices: tuple[int, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The session of its client ended."""


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The dispatcher will not go on with it."""

    error: FailureReason | Exception


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed; whether the workers that the request may be looking for can be reached."""

    decode: Reachability = Reachability.NO
    prefill: Reachability = Reachability.NO


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died or froze (`crashed`), or only the session with it broke, and with it whatever
    was on its way. `forgotten`: the fleet does not have it any more."""

    worker: bytes
    how: str
    crashed: bool
    forgotten: bool


@dataclass(frozen=True, slots=True)
class MigrationBegun:
    """The running request is to go to another decode worker with its KV."""

    target: bytes


# --- events: a decode worker


@dataclass(frozen=True, slots=True)
class AdmitAccepted:
    """Admitted: decode has promised blocks. With a ticket it waits for a remote prefill."""

    attempt: bytes
    ticket: bool
    follows: bool = False  # it waits for KV that is on its way there for another prompt


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
    """Resumed: the attempt is this session's, and what was said of it before is said again."""

    attempt: bytes
    epoch: int
    ticket: bool  # its KV is still awaited ...
    prefill: bytes = b""  # ... from this worker,
    reachable: Reachability = Reachability.NO  # if it can be reached
    follows: bool = False


@dataclass(frozen=True, slots=True)
class TokensReceived:
    """Ids arrived and continue the answer; what the request has now."""

    attempt: bytes
    begun: bool  # some choice has ids
    complete: bool  # every choice has ended


@dataclass(frozen=True, slots=True)
class ScoresReceived:
    """Log-probabilities of the prompt arrived."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class EmbeddingReceived:
    """The embedding of the prompt arrived: all that the request is for."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class OutputMissing:
    """Ids (or log-probabilities of the prompt) arrived, but those before them never did."""

    attempt: bytes
    reason: str
    tokens: bool


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    """Every choice has ended at decode."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Decode refused or failed it; `elsewhere`: another worker may still take it."""

    attempt: bytes
    error: Exception
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class KvLost:
    """HandoffLost: decode gave up waiting for the KV, and its blocks are free."""

    attempt: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """Attached: the KV of the other prompt is there, so decode may compute from now on."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class WaitFailed:
    """PlaceAgain: decode waited for another prompt in vain; nothing was tried."""

    attempt: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class SourceHeld:
    """Held: the source of a migration has stopped. `complete`: the router has all of its ids;
    `target_attempt`: an id for the attempt at the target."""

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
    """PrefillAccepted: it has the prompt."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class PrefillSent:
    """PrefillDone: decode has verified every block."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """It failed, or never began; `at_fault`: it counts among the failures after which decode
    computes the prompt itself."""

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
