"""Which router session a served request belongs to, and how long it outlives a lost one; pure.

    OWNED(epoch) --SessionLost--> PARKED(epoch, until) --Tick at until, Evicted--> GIVEN_UP
      |  ^  ^  |                    |         |
      |  |  |  |                    |         | Ended(keep)
      |  |  |  +--Evicted--> GIVEN_UP         |
      |  |  +--Resumed(higher)------+         v
      |  +--Resumed(higher), from OWNED     KEPT(epoch, until) --Tick at until, Evicted--> ENDED
      +-----------Ended(keep)---------------> ^  |
                                              +--+ Resumed(higher): its words are said again
    OWNED, PARKED, KEPT --Ended--> ENDED

A lost session is not a cancel: while parked a request keeps its blocks and has no steps, and a
hand-off to it goes on. KEPT is a request that has ended but whose last words may not have arrived;
it has no blocks. Of several routers the highest epoch has it: a Resume with a lower or an equal one
is counted and otherwise ignored. A Resume from `until` on finds nothing, whether or not a Tick came
first, and is answered Gone.

Invariant: a lease leaves OWNED and PARKED once, by exactly one of Ended and Evicted, whose sender
has freed the blocks, and the action GIVE_UP, which frees them.
"""

from dataclasses import dataclass, replace
from enum import Enum

PARK_S = 5.0  # how long a request waits for another session, and last words for being asked for


class Phase(Enum):
    OWNED = "owned"
    PARKED = "parked"
    KEPT = "kept"
    GIVEN_UP = "given_up"
    ENDED = "ended"


class Action(Enum):
    """What the shell does after a step, in the order given."""

    PARK = "park"  # the engine gives it no steps
    UNPARK = "unpark"
    HAND_OVER = "hand_over"  # answer Resumed, and say again what comes after the asker's counts
    GIVE_UP = "give_up"  # the engine ends it; its blocks are back
    FORGET = "forget"  # its ids and last words
    SEND_GONE = "send_gone"  # to the asker; without one, to the session that owns it
    COUNT_STALE = "count_stale"
    COUNT_ADOPTED = "count_adopted"
    COUNT_EXPIRED = "count_expired"
    COUNT_EVICTED = "count_evicted"


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session that had it under `epoch` is over; of an older epoch it says nothing."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A session asks for it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Its blocks were needed and are another's: it is over. Of a kept one: its memory was."""


@dataclass(frozen=True, slots=True)
class Ended:
    """It is over and its blocks are free. `keep`: with last words that somebody waits for."""

    keep: bool = False


Event = SessionLost | Resumed | Tick | Evicted | Ended
Actions = tuple[Action, ...]

FINAL = (Phase.GIVEN_UP, Phase.ENDED)


@dataclass(frozen=True, slots=True)
class Lease:
    """The state of one attempt's ownership."""

    epoch: int
    phase: Phase = Phase.OWNED
    until: float = float("inf")  # parked or kept, not longer

    @property
    def final(self) -> bool:
        return self.phase in FINAL

    @property
    def live(self) -> bool:
        """The engine or a hand-off has it."""
        return self.phase in (Phase.OWNED, Phase.PARKED)


def step(lease: Lease, event: Event, now: float) -> tuple[Lease, Actions]:
    """The next state and what to do; total: any event is allowed in any state."""
    expired: Actions = ()
    if now >= lease.until and not lease.final:
        lease, expired = _expire(lease)
    after, actions = _step(lease, event, now)
    return after, expired + actions


def _step(lease: Lease, event: Event, now: float) -> tuple[Lease, Actions]:
    match event, lease.phase:
        case Tick(), _:
            return lease, ()
        case Resumed(), Phase.GIVEN_UP | Phase.ENDED:
            return lease, (Action.COUNT_STALE, Action.SEND_GONE)
        case Resumed(epoch), _ if epoch <= lease.epoch:
            return lease, (Action.COUNT_STALE,)
        case Resumed(epoch), Phase.OWNED:
            return replace(lease, epoch=epoch), (Action.HAND_OVER,)
        case Resumed(epoch), Phase.PARKED:
            adopted = (Action.HAND_OVER, Action.UNPARK, Action.COUNT_ADOPTED)
            return Lease(epoch), adopted
        case Resumed(epoch), Phase.KEPT:
            again = (Action.HAND_OVER, Action.COUNT_ADOPTED)
            return Lease(epoch, Phase.KEPT, now + PARK_S), again
        case SessionLost(epoch), Phase.OWNED if epoch == lease.epoch:
            return Lease(epoch, Phase.PARKED, now + PARK_S), (Action.PARK,)
        case SessionLost(epoch), Phase.KEPT if epoch == lease.epoch:
            return replace(lease, until=now + PARK_S), ()
        case Evicted(), Phase.OWNED:  # it was parked when the engine chose it
            lost = (Action.COUNT_EVICTED, Action.SEND_GONE, Action.FORGET)
            return _over(lease, Phase.GIVEN_UP), lost
        case Evicted(), Phase.PARKED:
            return _over(lease, Phase.GIVEN_UP), (Action.COUNT_EVICTED, Action.FORGET)
        case Evicted(), Phase.KEPT:
            return _over(lease, Phase.ENDED), (Action.FORGET,)
        case Ended(True), Phase.OWNED | Phase.PARKED:
            return Lease(lease.epoch, Phase.KEPT, now + PARK_S), ()
        case Ended(False), Phase.OWNED | Phase.PARKED | Phase.KEPT:
            return _over(lease, Phase.ENDED), (Action.FORGET,)
        case _:
            return lease, ()


def _expire(lease: Lease) -> tuple[Lease, Actions]:
    if lease.phase is Phase.PARKED:
        gone = (Action.GIVE_UP, Action.COUNT_EXPIRED, Action.FORGET)
        return _over(lease, Phase.GIVEN_UP), gone
    return _over(lease, Phase.ENDED), (Action.FORGET,)


def _over(lease: Lease, phase: Phase) -> Lease:
    return Lease(lease.epoch, phase)
