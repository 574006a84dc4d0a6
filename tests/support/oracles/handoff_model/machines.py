"""The product's state machines of a hand-off, a lease and a request, as tables filled on demand.

All three are pure functions, so a state is a small number and each step is computed once. Time is
abstracted: every event happens at 0, and a time limit may be found exceeded whenever the world
allows it, by a step at that limit. Data that no later step reads is dropped (times, reasons,
counts of failures that only the placement policy uses).
"""

from dataclasses import replace
from typing import Generic, TypeVar

from oracles.handoff_model.config import Config
from oracles.handoff_model.rules import HandoffStep, LeaseStep, RequestStep
from pdserve.engine.handoff.protocol import (
    Action,
    Claimed,
    ClaimGranted,
    Event,
    Filled,
    Handoff,
    HandoffEnded,
    Heard,
    PeerProgress,
    Phase,
    Picked,
    Reserved,
    Side,
    Tick,
)
from pdserve.engine.handoff.protocol.machine import FROZEN_S, SILENCE_S
from pdserve.services.decode import lease_machine as lease
from pdserve.services.decode.lease_machine import PARK_S, Lease
from pdserve.services.router.request import events as on
from pdserve.services.router.request.actions import RoutingAction
from pdserve.services.router.request.machine import MAX_ATTEMPTS, OVERDUE_S
from pdserve.services.router.request.state import Routing, Stage

DEADLINE = 100.0  # after every other time limit
StateT = TypeVar("StateT")

# Events of a hand-off: the events of each row are applied one after the other.
HANDOFF_EVENTS: dict[str, tuple[tuple[Event, float], ...]] = {
    "claimed": ((Claimed(), 0.0),),
    "picked": ((Picked(), 0.0),),
    "reserved": ((Reserved(), 0.0),),
    "granted": ((ClaimGranted(), 0.0),),
    "filled": ((Filled(), 0.0),),
    "ended": ((HandoffEnded("cancelled"), 0.0),),
    "told": ((HandoffEnded("peer: cancelled", peer_notified=True), 0.0),),
    "disconnected": ((HandoffEnded("connection: closed", peer_notified=True), 0.0),),
    "silent": ((Tick(), SILENCE_S),),
    "no progress": (
        (Heard(FROZEN_S), FROZEN_S),
        (PeerProgress(FROZEN_S, -1), FROZEN_S),
        (Tick(), FROZEN_S),
    ),
    "alive": ((Heard(SILENCE_S), SILENCE_S), (PeerProgress(FROZEN_S, 0), 0.0), (Tick(), 0.5)),
    "deadline": ((Tick(), DEADLINE),),
}


class States(Generic[StateT]):
    """Small numbers for states."""

    def __init__(self) -> None:
        self.all: list[StateT] = []
        self._numbers: dict[StateT, int] = {}

    def number(self, state: StateT) -> int:
        found = self._numbers.get(state)
        if found is None:
            found = self._numbers[state] = len(self.all)
            self.all.append(state)
            self._added(state)
        return found

    def _added(self, state: StateT) -> None:
        """Process a state that was not there before."""


class Handoffs(States[Handoff]):
    """Every state of the machine that any attempt reaches. Number 0: no such attempt here."""

    def __init__(self, step: HandoffStep) -> None:
        super().__init__()
        self._step = step
        self._steps: dict[tuple[int, str], tuple[int, tuple[Action, ...]]] = {}
        self.over: list[bool] = []  # final; no event changes it or is answered except by Gone
        self.final: list[bool] = []
        self.live: list[bool] = []
        self.holds: list[bool] = []
        self.promised: list[bool] = []
        self.linked: list[bool] = []
        unknown = Handoff(Side.SEND, DEADLINE, Phase.RELEASED, reason="no such attempt")
        self.number(unknown)
        self.receive = self.number(Handoff(Side.RECEIVE, DEADLINE))
        self.send = self.number(Handoff(Side.SEND, DEADLINE))

    def _added(self, state: Handoff) -> None:
        self.final.append(state.final)
        self.live.append(not state.final)
        self.holds.append(state.holds)
        self.promised.append(state.promised)
        self.linked.append(state.linked)
        self.over.append(state.final and all(self._absorbs(state, name) for name in HANDOFF_EVENTS))

    def _absorbs(self, state: Handoff, name: str) -> bool:
        for event, now in HANDOFF_EVENTS[name]:
            after, actions = self._step(state, event, now)
            if after != state or not set(actions) <= {Action.COUNT_STALE, Action.SEND_GONE}:
                return False
        return True

    def step(self, number: int, name: str) -> tuple[int, tuple[Action, ...]]:
        """Return the state after an event, and all its actions."""
        key = number, name
        found = self._steps.get(key)
        if found is None:
            state, done = self.all[number], []
            for event, now in HANDOFF_EVENTS[name]:
                state, actions = self._step(state, event, now)
                done += actions
            state = replace(state, heard=0.0, moved=0.0, liveness=-1, reason="")
            found = self._steps[key] = self.number(state), tuple(done)
        return found


class Leases(States[Lease]):
    """Every state of a lease. Number 0: decode does not serve the attempt."""

    def __init__(self, step: LeaseStep) -> None:
        super().__init__()
        self._step = step
        self._steps: dict[
            tuple[int, lease.Event, bool], tuple[int, tuple[lease.LeaseAction, ...]]
        ] = {}
        self.live: list[bool] = []
        self.number(Lease(-1, lease.LeasePhase.ENDED))

    def _added(self, state: Lease) -> None:
        self.live.append(state.live)

    def owned(self, epoch: int) -> int:
        return self.number(Lease(epoch))

    def step(
        self, number: int, event: lease.Event, late: bool = False
    ) -> tuple[int, tuple[lease.LeaseAction, ...]]:
        """Return the state after an event. `late`: at the end of its time."""
        key = number, event, late
        found = self._steps.get(key)
        if found is None:
            state, actions = self._step(self.all[number], event, PARK_S if late else 0.0)
            if state.until != float("inf"):
                state = replace(state, until=PARK_S)
            found = self._steps[key] = self.number(state), actions
        return found


DECODE = b"decode"  # the one decode worker
QUEUE_S = 50.0
FAILED = RuntimeError("decode says so")


def prefill_incarnation(number: int) -> bytes:
    """Return the incarnation of a prefill worker."""
    return bytes([number])


def events_about(attempt: bytes) -> tuple[on.RoutingEvent, ...]:
    """Return all events that workers report of an attempt here."""
    return (
        on.AdmitAccepted(attempt, True),
        on.AdmitRefused(attempt),
        on.AttemptUnknown(attempt),
        on.KvLost(attempt, ""),
        on.AttemptFinished(attempt),
        on.AttemptFailed(attempt, FAILED),
        on.PrefillSent(attempt),
        on.PrefillEnded(attempt, ""),
    )


class Routings(States[Routing]):
    """Every state of a request in the router. Attempts are named by their number in the request,
    workers by DECODE and `prefill_incarnation`.
    """

    def __init__(self, step: RequestStep, config: Config) -> None:
        super().__init__()
        self._step = step
        self._steps: dict[
            tuple[int, on.RoutingEvent, float], tuple[int, tuple[RoutingAction, ...]]
        ] = {}
        self._deaf: dict[tuple[int, int], bool] = {}
        self.stage: list[Stage] = []
        self.ended: list[bool] = []
        self.current: list[int] = []  # number of the current attempt, or -1
        self.first = [self._begin(config.tries(r)) for r in range(len(config.prompts))]

    def _begin(self, tries: int) -> int:
        """Begin a request with this many remaining tries."""
        tried = MAX_ATTEMPTS - tries
        times = {"deadline": DEADLINE, "queue_s": QUEUE_S, "queue_deadline": QUEUE_S}
        return self.number(Routing(num_attempts=tried, **times))

    def _added(self, state: Routing) -> None:
        self.stage.append(state.stage)
        self.ended.append(state.stage is Stage.ENDED)
        self.current.append(-1 if state.attempt is None else state.attempt.id[0])

    def step(
        self, number: int, event: on.RoutingEvent, now: float = 0.0
    ) -> tuple[int, tuple[RoutingAction, ...]]:
        key = number, event, now
        found = self._steps.get(key)
        if found is None:
            state, actions = self._step(self.all[number], event, now)
            found = self._steps[key] = self.number(_without_history(state)), actions
        return found

    def deaf(self, number: int, attempt: int) -> bool:
        """Return whether no message about the attempt changes anything."""
        key = number, attempt
        found = self._deaf.get(key)
        if found is None:
            events = events_about(bytes([attempt]))
            found = all(self.step(number, event) == (number, ()) for event in events)
            self._deaf[key] = found
        return found

    def passes_deadline(self, number: int) -> tuple[int, tuple[RoutingAction, ...]]:
        """Pass the deadline at the workers, too."""
        return self.step(number, on.TimePassed(), DEADLINE + OVERDUE_S)

    def passes_queue_deadline(self, number: int) -> tuple[int, tuple[RoutingAction, ...]]:
        """Pass the queue deadline: no worker has taken the request in time."""
        return self.step(number, on.TimePassed(), QUEUE_S)


def _without_history(state: Routing) -> Routing:
    state = replace(state, num_prefill_failures=0)
    if state.stage is Stage.ENDED:
        return Routing(stage=Stage.ENDED)
    if state.stage is Stage.QUEUED:
        state = replace(state, placed_attempt=b"", placed_decode=b"")
    return state
