"""The state machine of a hand-off, which both sides run; pure: time is an argument.

    RECEIVE (decode)                            SEND (prefill)
    ----------------                            --------------
    ADMITTED   a promise, nothing pinned        ADMITTED   queued in the engine, nothing pinned
       | Claimed                                   | Picked: its blocks are allocated
       v                                           v
    CLAIMED    waits for blocks, in turn        CLAIMED    holds blocks, waits for ClaimGranted
       | Reserved                                  | ClaimGranted
       v                                           v
    RECEIVING  holds blocks, takes frames       RECEIVING  holds blocks, pushes frames
       | Filled                                    | Filled (decode's Complete)
       v                                           v
    COMMITTED  blocks belong to the sequence    COMMITTED  blocks are freed

Every state except the last row also goes to RELEASED, at the first of: HandoffEnded (cancel, a
peer's Abort or Gone, a closed connection, a failed check) and what Tick finds (the deadline, a
silent peer, a frozen peer). COMMITTED and RELEASED are final: a late event is counted and changes
nothing, and a late Claim is answered Gone.

Invariant: a state that holds blocks (or a promise) frees them in exactly one action of the step
that leaves it; `holds` and `promised` are functions of (side, phase), so no flag can disagree.
"""

from dataclasses import dataclass, replace
from enum import Enum

SILENCE_S = 1.0  # without a byte from the peer, from Claim on
FROZEN_S = 10.0  # of an unchanged liveness counter of the peer
PROGRESS_S = 0.1  # interval at which each side sends its liveness counter


class Side(Enum):
    SEND = "send"
    RECEIVE = "receive"


class Phase(Enum):
    ADMITTED = "admitted"
    CLAIMED = "claimed"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    RELEASED = "released"


class Action(Enum):
    """What the Sender or Receiver does after a step of the machine; actions run in the returned
    order."""

    QUEUE_CLAIM = "queue_claim"  # receive: wait for blocks in the ClaimQueue
    SEND_CLAIM = "send_claim"
    SEND_GRANTED = "send_granted"
    SEND_COMPLETE = "send_complete"
    SEND_ABORT = "send_abort"
    SEND_GONE = "send_gone"
    SEND_FRAMES = "send_frames"  # send: push the blocks that Granted names
    GIVE_BACK_PROMISE = "give_back_promise"
    FREE_BLOCKS = "free_blocks"
    LEAVE_QUEUE = "leave_queue"  # send: remove the request from the engine's queue
    COMMIT = "commit"  # receive: the reservation joins the batch
    REPORT_DONE = "report_done"
    REPORT_LOST = "report_lost"
    COUNT_STALE = "count_stale"


@dataclass(frozen=True, slots=True)
class Claimed:
    """Event at decode: prefill's Claim arrived."""


@dataclass(frozen=True, slots=True)
class Picked:
    """Event at prefill: the engine allocated the blocks of the whole prompt."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Event at decode: the engine allocated the blocks that the Claim asks for."""


@dataclass(frozen=True, slots=True)
class ClaimGranted:
    """Event at prefill: decode granted the Claim and named the first blocks to send."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Event on both sides: decode has all blocks. At decode, its bitmap is complete; at prefill,
    decode's Complete arrived."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Event: a byte from the peer arrived at time `at`."""

    at: float


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """Event: a Progress message with the liveness counter of the peer's engine thread arrived.

    The counter changes with every iteration of that thread, and during a step for as long as the
    step may take (engine/thread.py).
    """

    at: float
    liveness: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed, so the machine checks the deadline and whether the peer is silent or
    frozen."""


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """Event: the attempt ends for `reason`. `peer_notified`: the peer already knows or is
    unreachable, so no Abort is sent."""

    reason: str
    peer_notified: bool = False


Event = (
    Claimed | Picked | Reserved | ClaimGranted | Filled | Heard | PeerProgress | Tick | HandoffEnded
)
Actions = tuple[Action, ...]

FINAL = (Phase.COMMITTED, Phase.RELEASED)


@dataclass(frozen=True, slots=True)
class Handoff:
    """The state of one hand-off attempt on one side; immutable."""

    side: Side
    deadline: float  # absolute; inf means none
    phase: Phase = Phase.ADMITTED
    heard: float = 0.0  # last byte of the peer, from Claim on
    liveness: int = -1  # the peer's counter
    moved: float = 0.0  # when `liveness` last changed
    reason: str = ""  # of a release

    @property
    def final(self) -> bool:
        return self.phase in FINAL

    @property
    def holds(self) -> bool:
        """Whether this side has blocks allocated for the attempt."""
        if self.side is Side.SEND:
            return self.phase in (Phase.CLAIMED, Phase.RECEIVING)
        return self.phase is Phase.RECEIVING

    @property
    def promised(self) -> bool:
        """Whether decode still counts the attempt's promised blocks; always false at prefill."""
        return self.side is Side.RECEIVE and self.phase in (Phase.ADMITTED, Phase.CLAIMED)

    @property
    def linked(self) -> bool:
        """Whether the attempt is in a phase in which both sides send Progress on its connection."""
        return self.phase in (Phase.CLAIMED, Phase.RECEIVING)


def step(state: Handoff, event: Event, now: float) -> tuple[Handoff, Actions]:
    """Return the state of an attempt after `event` and the actions to carry out. Any event is
    allowed in any state."""
    if state.final:
        late = (Action.COUNT_STALE,) if not isinstance(event, Tick | Heard | PeerProgress) else ()
        return state, (*late, Action.SEND_GONE) if isinstance(event, Claimed) else late
    match event:
        case Heard(at):
            return replace(state, heard=max(state.heard, at)), ()
        case PeerProgress(at, liveness):
            moved = max(state.moved, at) if liveness != state.liveness else state.moved
            return replace(state, heard=max(state.heard, at), liveness=liveness, moved=moved), ()
        case Tick():
            reason = _overdue(state, now)
            return _release(state, HandoffEnded(reason)) if reason else (state, ())
        case HandoffEnded():
            return _release(state, event)
        case _:
            return _advance(state, event, now)


def _advance(state: Handoff, event: Event, now: float) -> tuple[Handoff, Actions]:
    """Move to the next row of the drawing if the event leads there; any other event is a duplicate
    or late, and is only counted."""
    match state.side, state.phase, event:
        case Side.RECEIVE, Phase.ADMITTED, Claimed():
            return _linked(state, now), (Action.QUEUE_CLAIM,)
        case Side.RECEIVE, Phase.CLAIMED, Reserved():
            granted = (Action.GIVE_BACK_PROMISE, Action.SEND_GRANTED)
            return replace(state, phase=Phase.RECEIVING), granted
        case Side.RECEIVE, Phase.RECEIVING, Filled():
            committed = (Action.COMMIT, Action.SEND_COMPLETE, Action.REPORT_DONE)
            return replace(state, phase=Phase.COMMITTED), committed
        case Side.SEND, Phase.ADMITTED, Picked():
            return _linked(state, now), (Action.SEND_CLAIM,)
        case Side.SEND, Phase.CLAIMED, ClaimGranted():
            return replace(state, phase=Phase.RECEIVING), (Action.SEND_FRAMES,)
        case Side.SEND, Phase.RECEIVING, Filled():
            sent = (Action.FREE_BLOCKS, Action.REPORT_DONE)
            return replace(state, phase=Phase.COMMITTED), sent
        case _:
            return state, (Action.COUNT_STALE,)


def _linked(state: Handoff, now: float) -> Handoff:
    return replace(state, phase=Phase.CLAIMED, heard=now, moved=now)


def _overdue(state: Handoff, now: float) -> str:
    if now >= state.deadline:
        return "deadline"
    if state.linked and now - state.heard >= SILENCE_S:
        return "peer silent"
    if state.linked and now - state.moved >= FROZEN_S:
        return "peer frozen"
    return ""


def _release(state: Handoff, end: HandoffEnded) -> tuple[Handoff, Actions]:
    actions = []
    if state.promised:
        actions.append(Action.GIVE_BACK_PROMISE)
    if state.holds:
        actions.append(Action.FREE_BLOCKS)
    if state.side is Side.SEND and state.phase is Phase.ADMITTED:
        actions.append(Action.LEAVE_QUEUE)
    if state.linked and not end.peer_notified:
        actions.append(Action.SEND_ABORT)
    actions.append(Action.REPORT_LOST)
    return replace(state, phase=Phase.RELEASED, reason=end.reason), tuple(actions)
