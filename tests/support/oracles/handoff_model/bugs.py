"""Seeded bugs: each is a plausible wrong version of one rule, and a run that must find it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from oracles.handoff_model.config import A, Config
from oracles.handoff_model.rules import Rules
from pdserve.engine.handoff.protocol import (
    Action,
    Bitmap,
    Handoff,
    HandoffEnded,
    Phase,
    Side,
    machine,
)
from pdserve.engine.kv import BlockCopy
from pdserve.engine.scheduling import BlockTables
from pdserve.engine.scheduling import Sequence as Tokens
from pdserve.services.decode import lease_machine as lease
from pdserve.services.decode.lease_machine import Lease
from pdserve.services.router.request import machine as request_machine
from pdserve.services.router.request.actions import (
    CancelAtDecode,
    CancelAtPrefill,
    LogLoss,
    RoutingAction,
)
from pdserve.services.router.request.events import (
    AttemptBegun,
    DecodeEvent,
    PrefillEvent,
    RoutingEvent,
)
from pdserve.services.router.request.state import Routing


@dataclass(frozen=True)
class Bug:
    """A wrong rule, and the invariant that it breaks (the start of the violation's message)."""

    name: str
    rules: Rules
    config: Config
    breaks: str


def takes_every_frame(state: Handoff) -> bool:
    """Bug: prefill writes into the granted blocks, whatever has become of the attempt since."""
    return True


def first_of_the_request(served: Sequence[int], attempt: int) -> int | None:
    """Bug: a Cancel ends any served attempt of its request (two per request)."""
    return next((one for one in served if one // 2 == attempt // 2), None)


def done_is_complete(bitmap: Bitmap, computed: bool) -> bool:
    """Bug: prefill reports that it is done, so everything counts as arrived."""
    return computed or bitmap.complete


class CountedMatch(BlockTables):
    """Bug: a prefix match counts the cached blocks, wherever they are in the prompt."""

    def _found(self, hashes: Sequence[bytes]) -> list[bytes]:
        return [h for h in hashes if self.pools[0].find(h) is not None]

    def match(self, hashes: Sequence[bytes], limit: int) -> int:
        return min(len(self._found(hashes)) * self.block_size, limit)

    def open(
        self,
        sequence: Tokens,
        hashes: Sequence[bytes],
        num_cached: int,
        spare: int = 0,
        reserved: bool = False,
    ) -> list[BlockCopy] | None:
        found = self._found(hashes)
        return super().open(sequence, found or hashes, num_cached, spare, reserved)


class EarlyCache(BlockTables):
    """Bug: the blocks of a reservation can be found as soon as it is made."""

    def open(self, sequence: Tokens, *args: Any, **named: Any) -> list[BlockCopy] | None:
        copies = super().open(sequence, *args, **named)
        if copies is not None and named.get("reserved", args[-1:] == (True,)):
            self.advance(sequence, len(sequence.ids) - 1)
            sequence.num_computed = 0
        return copies


def frees_for_the_reaper(
    state: Handoff, event: machine.Event, now: float
) -> tuple[Handoff, machine.Actions]:
    """Bug: a dead peer returns the blocks at once, and the deadline ends the attempt."""
    after, actions = machine.step(state, event, now)
    died = isinstance(event, HandoffEnded) and event.reason.startswith("connection")
    if died and Action.FREE_BLOCKS in actions:
        return state, (Action.FREE_BLOCKS,)
    return after, actions


def adopts_what_expired(
    state: Lease, event: lease.Event, now: float
) -> tuple[Lease, lease.Actions]:
    """Bug: a Resume finds the attempt, although its time has passed."""
    if isinstance(event, lease.Resumed) and state.phase is lease.LeasePhase.GIVEN_UP:
        return Lease(event.epoch), (lease.LeaseAction.HAND_OVER, lease.LeaseAction.COUNT_ADOPTED)
    return lease.step(state, event, now)


def keeps_the_promise(
    state: Handoff, event: machine.Event, now: float
) -> tuple[Handoff, machine.Actions]:
    """Bug: a claim that is refused, or ended while it waits, does not return its promise."""
    after, actions = machine.step(state, event, now)
    if state.side is Side.RECEIVE and state.phase is Phase.CLAIMED and after.final:
        actions = tuple(a for a in actions if a is not Action.GIVE_BACK_PROMISE)
    return after, actions


def retries_without_a_cancel(
    state: Routing, event: RoutingEvent, now: float
) -> tuple[Routing, tuple[RoutingAction, ...]]:
    """Bug: an attempt that is given up is not cancelled, on the assumption that its workers
    notice.
    """
    after, actions = request_machine.step(state, event, now)
    if any(isinstance(action, LogLoss) for action in actions):
        cancels = CancelAtDecode | CancelAtPrefill
        actions = tuple(action for action in actions if not isinstance(action, cancels))
    return after, actions


def hears_every_attempt(
    state: Routing, event: RoutingEvent, now: float
) -> tuple[Routing, tuple[RoutingAction, ...]]:
    """Bug: a worker's message counts for the current attempt, whichever it names."""
    if isinstance(event, DecodeEvent | PrefillEvent) and state.attempt is not None:
        event = replace(event, attempt=state.attempt.id)
    return request_machine.step(state, event, now)


def counts_no_try(
    state: Routing, event: RoutingEvent, now: float
) -> tuple[Routing, tuple[RoutingAction, ...]]:
    """Bug: a try that begins is not counted."""
    after, actions = request_machine.step(state, event, now)
    if isinstance(event, AttemptBegun):
        after = replace(after, num_attempts=state.num_attempts)
    return after, actions


REAL = Rules()
BUGS = (
    Bug(
        "a retry reuses blocks under a frozen writer",
        replace(REAL, takes_frames=takes_every_frame),
        Config("frozen writer", (A,), ("freeze prefill",), 1),
        "a late frame is written into a block of request 0 attempt 1",
    ),
    Bug(
        "cancel by request id",
        replace(REAL, named=first_of_the_request),
        Config("late cancel", (A,), ("cut",), 1),
        "request 0 is never answered",
    ),
    Bug(
        'commit on "done" instead of the bitmap',
        replace(REAL, is_complete=done_is_complete),
        Config("no fault", (A,)),
        "a request joins the batch",
    ),
    Bug(
        "count instead of position in a prefix match",
        replace(REAL, tables=CountedMatch),
        Config("equal prompts", (A, A), ("evict",), 1),
        "a request joins the batch on keys and values (2, 2), not (1, 2)",
    ),
    Bug(
        "a block cached before verification",
        replace(REAL, tables=EarlyCache),
        Config("no fault", (A,)),
        "block 1 is cached with 0 in it",
    ),
    Bug(
        "double release on crash + deadline",
        replace(REAL, step=frees_for_the_reaper),
        Config("crash, then deadline", (A,), ("crash prefill", "deadline"), 2),
        "blocks are freed that are not reserved any more",
    ),
    Bug(
        "adopt after the park expired",
        replace(REAL, lease_step=adopts_what_expired),
        Config("lost session", (A,), ("lose session",), 1),
        "decode serves an attempt of which it has nothing",
    ),
    Bug(
        "promise not returned on refusal",
        replace(REAL, step=keeps_the_promise),
        Config("refused claim", (A,), ("refuse claim",), 1),
        "3 blocks are promised, 0 of live attempts",
    ),
    Bug(
        "a retry does not cancel the lost attempt",
        replace(REAL, request_step=retries_without_a_cancel),
        Config("refused dial", (A,), ("refuse dial",), 1),
        "a promise was never given back",
    ),
    Bug(
        "an attempt that is over still has a say",
        replace(REAL, request_step=hears_every_attempt),
        Config("cut connection", (A,), ("cut",), 1),
        "a promise was never given back",
    ),
    Bug(
        "a try is never counted",
        replace(REAL, request_step=counts_no_try),
        Config("two lost tries", (A,), ("refuse dial", "slow prefill"), 2),
        "request 0 is to be tried more than 2 times",
    ),
)
