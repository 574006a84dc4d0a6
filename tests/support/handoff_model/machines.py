"""The real machine.step and lease.step, as tables that fill up on demand.

Both are pure functions, so a state is a small number and each step is computed once. Time is
abstracted: whatever happens happens at 0, and a bound may be found exceeded whenever the world
allows it, by a step at that bound. Times and reasons, which no later step reads, are forgotten.
"""

from dataclasses import replace
from typing import Generic, TypeVar

from handoff_model.rules import HandoffStep, LeaseStep
from pdserve.engine.handoff import lease
from pdserve.engine.handoff.lease import PARK_S, Lease
from pdserve.engine.handoff.protocol.machine import (
    FROZEN_S,
    SILENCE_S,
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

DEADLINE = 100.0  # after every other bound
StateT = TypeVar("StateT")

# What can happen to a hand-off: events and when, told one after the other.
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
        (PeerProgress(FROZEN_S, -1, True), FROZEN_S),
        (Tick(), FROZEN_S),
    ),
    "alive": ((Heard(SILENCE_S), SILENCE_S), (PeerProgress(FROZEN_S, 0, True), 0.0), (Tick(), 0.5)),
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
        """A state that was not there before."""


class Handoffs(States[Handoff]):
    """Every state of the machine that any attempt reaches. Number 0: no such attempt here."""

    def __init__(self, step: HandoffStep) -> None:
        super().__init__()
        self._step = step
        self._steps: dict[tuple[int, str], tuple[int, tuple[Action, ...]]] = {}
        self.over: list[bool] = []  # final, and no event changes it or asks for more than Gone
        self.final: list[bool] = []
        self.live: list[bool] = []
        self.holds: list[bool] = []
        self.promised: list[bool] = []
        self.linked: list[bool] = []
        nobody = Handoff(Side.SEND, DEADLINE, Phase.RELEASED, reason="no such attempt")
        self.number(nobody)
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
        """The state after a happening, and all actions of it."""
        key = number, name
        found = self._steps.get(key)
        if found is None:
            state, done = self.all[number], []
            for event, now in HANDOFF_EVENTS[name]:
                state, actions = self._step(state, event, now)
                done += actions
            state = replace(state, heard=0.0, moved=0.0, steps=-1, reason="")
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
        """`late`: at the end of its time."""
        key = number, event, late
        found = self._steps.get(key)
        if found is None:
            state, actions = self._step(self.all[number], event, PARK_S if late else 0.0)
            if state.until != float("inf"):
                state = replace(state, until=PARK_S)
            found = self._steps[key] = self.number(state), actions
        return found
