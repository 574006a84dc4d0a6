"""State machine of a lease: which router session owns a served request, and how long the request
outlives a lost session; pure.

    state                event                                     next state
    OWNED(epoch)         SessionLost of its epoch                  PARKED(epoch, until)
    OWNED                Resumed by a higher epoch                 OWNED
    OWNED                BlocksEvicted                             GIVEN_UP
    PARKED               Resumed by a higher epoch, before until   OWNED
    PARKED               LeaseTick at until, BlocksEvicted         GIVEN_UP
    OWNED, PARKED        AttemptEnded(keep)                        KEPT(epoch, until)
    OWNED, PARKED, KEPT  AttemptEnded                              ENDED
    KEPT                 Resumed by a higher epoch                 KEPT, last events repeated
    KEPT                 SessionLost of its epoch                  KEPT, until is extended
    KEPT                 LeaseTick at until, BlocksEvicted         ENDED

A lost session does not cancel a request: a parked request keeps its blocks but gets no steps, and a
hand-off to it continues. A KEPT request has ended and has no blocks, but its last events may not
have arrived at a router. If several routers send Resume, the highest epoch gets the request: a
Resume with a lower or equal epoch is counted and otherwise ignored. The response to a Resume at
`until` or later is Gone, whether or not a LeaseTick came first.

Invariant: a lease leaves OWNED and PARKED once, by exactly one of AttemptEnded, BlocksEvicted (the
sender of either has freed the blocks) and the action GIVE_UP, which frees them.
"""

from dataclasses import dataclass, replace
from enum import Enum

PARK_S = 5.0  # how long a parked request, or a kept one's last events, wait for another session


class LeasePhase(Enum):
    OWNED = "owned"
    PARKED = "parked"
    KEPT = "kept"
    GIVEN_UP = "given_up"
    ENDED = "ended"


class LeaseAction(Enum):
    """An action of the decode worker on an attempt. A step of the attempt's lease returns actions,
    which Leases (leases.py) carries out in the order given."""

    PARK = "park"  # the engine stops its steps
    UNPARK = "unpark"
    HAND_OVER = "hand_over"  # send Resumed and repeat the events that the new session lacks
    GIVE_UP = "give_up"  # the engine ends it and frees its blocks
    FORGET = "forget"  # drop its ids and last events
    SEND_GONE = "send_gone"  # to the session that sent Resume; without one, to the owner
    COUNT_STALE = "count_stale"
    COUNT_ADOPTED = "count_adopted"
    COUNT_EXPIRED = "count_expired"
    COUNT_EVICTED = "count_evicted"


@dataclass(frozen=True, slots=True)
class SessionLost:
    """Event: the router session that owned the attempt under `epoch` has ended. Changes nothing if
    another session with a higher epoch owns the attempt now."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """Event: a router session has sent Resume for the attempt, with this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseTick:
    """Event: time has passed, so the lease may have expired."""


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    """Event: the attempt's blocks were needed for other requests, so the attempt is over. For a
    kept attempt, which has no blocks, the event drops its last events to free memory."""


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """Event: the attempt is over and its blocks are free. `keep`: whether to keep its last events
    for a router that may not have received them."""

    keep: bool = False


Event = SessionLost | Resumed | LeaseTick | BlocksEvicted | AttemptEnded
Actions = tuple[LeaseAction, ...]

FINAL = (LeasePhase.GIVEN_UP, LeasePhase.ENDED)


@dataclass(frozen=True, slots=True)
class Lease:
    """Which session epoch owns an attempt, and until when the attempt may be without an owner."""

    epoch: int
    phase: LeasePhase = LeasePhase.OWNED
    until: float = float("inf")  # when PARKED or KEPT ends

    @property
    def final(self) -> bool:
        return self.phase in FINAL

    @property
    def live(self) -> bool:
        """Whether the attempt has not ended: the engine or a hand-off still has it."""
        return self.phase in (LeasePhase.OWNED, LeasePhase.PARKED)


def step(lease: Lease, event: Event, now: float) -> tuple[Lease, Actions]:
    """Apply an event to a lease. Returns the next state of the lease and the actions to carry out.
    Accepts any event in any state."""
    expired: Actions = ()
    if now >= lease.until and not lease.final:
        lease, expired = _expire(lease)
    next_lease, actions = _step(lease, event, now)
    return next_lease, expired + actions


def _step(lease: Lease, event: Event, now: float) -> tuple[Lease, Actions]:
    match event, lease.phase:
        case LeaseTick(), _:
            return lease, ()
        case Resumed(), LeasePhase.GIVEN_UP | LeasePhase.ENDED:
            return lease, (LeaseAction.COUNT_STALE, LeaseAction.SEND_GONE)
        case Resumed(epoch), _ if epoch <= lease.epoch:
            return lease, (LeaseAction.COUNT_STALE,)
        case Resumed(epoch), LeasePhase.OWNED:
            return replace(lease, epoch=epoch), (LeaseAction.HAND_OVER,)
        case Resumed(epoch), LeasePhase.PARKED:
            adopt = (LeaseAction.HAND_OVER, LeaseAction.UNPARK, LeaseAction.COUNT_ADOPTED)
            return Lease(epoch), adopt
        case Resumed(epoch), LeasePhase.KEPT:
            repeat = (LeaseAction.HAND_OVER, LeaseAction.COUNT_ADOPTED)
            return Lease(epoch, LeasePhase.KEPT, now + PARK_S), repeat
        case SessionLost(epoch), LeasePhase.OWNED if epoch == lease.epoch:
            return Lease(epoch, LeasePhase.PARKED, now + PARK_S), (LeaseAction.PARK,)
        case SessionLost(epoch), LeasePhase.KEPT if epoch == lease.epoch:
            return replace(lease, until=now + PARK_S), ()
        case BlocksEvicted(), LeasePhase.OWNED:  # it was parked when the engine chose it
            evict = (LeaseAction.COUNT_EVICTED, LeaseAction.SEND_GONE, LeaseAction.FORGET)
            return _over(lease, LeasePhase.GIVEN_UP), evict
        case BlocksEvicted(), LeasePhase.PARKED:
            return _over(lease, LeasePhase.GIVEN_UP), (
                LeaseAction.COUNT_EVICTED,
                LeaseAction.FORGET,
            )
        case BlocksEvicted(), LeasePhase.KEPT:
            return _over(lease, LeasePhase.ENDED), (LeaseAction.FORGET,)
        case AttemptEnded(True), LeasePhase.OWNED | LeasePhase.PARKED:
            return Lease(lease.epoch, LeasePhase.KEPT, now + PARK_S), ()
        case AttemptEnded(False), LeasePhase.OWNED | LeasePhase.PARKED | LeasePhase.KEPT:
            return _over(lease, LeasePhase.ENDED), (LeaseAction.FORGET,)
        case _:
            return lease, ()


def _expire(lease: Lease) -> tuple[Lease, Actions]:
    if lease.phase is LeasePhase.PARKED:
        give_up = (LeaseAction.GIVE_UP, LeaseAction.COUNT_EXPIRED, LeaseAction.FORGET)
        return _over(lease, LeasePhase.GIVEN_UP), give_up
    return _over(lease, LeasePhase.ENDED), (LeaseAction.FORGET,)


def _over(lease: Lease, phase: LeasePhase) -> Lease:
    return Lease(lease.epoch, phase)
