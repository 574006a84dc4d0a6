"""Running requests that go from one decode worker to another; synchronous, time is an argument.

    HOLDING ---Held---> ADMITTING ---Admitted---> SENDING ---Moved---> over: it runs at the target
       |                    |                        |  (or the target's first words, or the source
       |                    |                        |   is lost: the target has all, or says so)
       +--------------------+------------------------+ Stayed, Busy, Failed, HandoffLost, Gone,
                            |                          a lost target, no answer within MOVE_S
                            v
                          over: it runs at the source (Stay), as if nothing had been

The source stops and says its last ids (Held); the target admits the request with all of them, as it
would after a lost worker, but with the source as the one who sends the KV. So nothing is computed
again, and no step of the source falls between its last id and the KV that it sends.

Invariant: whose tokens are passed on says `RoutedRequest.attempt`, the source's until the one
switch to the target's; either side ends by itself when the other is lost, and what it still says is
stale.
"""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.services.router.fleet.fleet import Fleet, State, Worker
from pdserve.services.router.placement.rebalance import Pressure, Running, drain_order, relief_order
from pdserve.services.router.placement.recompute_budget import RecomputeBudget
from pdserve.services.router.requests.adoption import leave_out_aborted
from pdserve.services.router.requests.effects import Attempt, Effects, Stage

if TYPE_CHECKING:
    from pdserve.services.router.fleet.compatibility import KvCompatibility
    from pdserve.services.router.requests.request import RoutedRequest

MOVE_S = 3.0  # from Hold to the switch; a source gives the hand-off itself up after 2 s
WORD_S = 1.5  # after a source's death: decode finds a silent sender in 1 s
AGAIN_S = 0.5  # after a move that failed
MAX_FAILED = 3  # in a row; then it ends where it is
FIRST_WORDS = ("tokens", "prompt_logprobs", "finished")
OF_SOURCE = ("held", "moved", "stayed")


class MigrationStep(Enum):
    """How far a move is."""

    HOLDING = "holding"
    ADMITTING = "admitting"
    SENDING = "sending"


@dataclass(eq=False, slots=True)
class Migration:
    """One move of one flow."""

    source: Attempt
    target: Worker
    began: float
    step: MigrationStep = MigrationStep.HOLDING
    attempt: Attempt | None = None  # at the target
    parted: bool = False  # the session with the target broke meanwhile: it is parked there
    so_far: pb.Finished | None = None


class MigrationEffects(Effects, Protocol):
    """What Migrations needs of the dispatcher."""

    kinship: "KvCompatibility"
    migrations: "RecomputeBudget[RoutedRequest]"
    fleet: Fleet

    def flows(self) -> "Iterable[RoutedRequest]":
        """All of them."""

    def leaving(self) -> list[Worker]:
        """Decode workers that drain."""

    def place_for(self, flow: "RoutedRequest", now: float) -> Worker | None:
        """Another decode worker that can take a running request with its KV."""

    def answered(self, attempt: Attempt) -> None:
        """Its Admit was."""


class Migrations:
    """All moves of a router, and their counters."""

    def __init__(self, floor: MigrationEffects) -> None:
        self.num_begun = 0
        self.num_done = 0
        self.failed: Counter[str] = Counter()  # by how far they were
        self.num_bytes = 0
        self.num_tokens = 0  # whose KV has moved
        self._floor = floor
        self._pressure = Pressure()
        self._under_way: dict[RoutedRequest, Migration] = {}
        self._awaited: dict[
            RoutedRequest, tuple[Attempt, float]
        ] = {}  # whose source died, and when

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    # --- what moves

    def tick(self, now: float) -> None:
        """Give up what takes too long, and begin what is due: drains, then reliefs."""
        for flow, move in list(self._under_way.items()):
            if now - move.began >= MOVE_S:
                self._fail(flow, "no answer", now)
        for flow, (attempt, since) in list(self._awaited.items()):
            if flow.attempt is not attempt or attempt.produced:
                del self._awaited[flow]
            elif now - since >= WORD_S:
                del self._awaited[flow]
                flow.retry("nothing was sent before the source died", now)
        leaving = self._floor.leaving()
        if leaving:
            self._empty(leaving, now)
        self._relieve(now)

    def _relieve(self, now: float) -> None:
        """A worker that preempts gives one request to one that has room for all of it."""
        workers = self._floor.fleet.workers
        preemptions = {
            boot: w.load.preemptions for boot, w in workers.items() if w.hello.role == DECODE
        }
        for boot in self._pressure.look(preemptions, now):
            found = {
                running(flow): flow
                for flow in self._floor.flows()
                if flow.attempt is not None
                and flow.attempt.decode.boot == boot
                and not flow.num_stuck
                and may_move(flow, now)
            }
            for one in relief_order(found):
                target = self._floor.place_for(found[one], now)
                if target is None or not self._floor.migrations.room:
                    break
                roomy = target.free_tokens >= one.num_tokens + (one.left or one.num_tokens)
                if roomy and self._pressure.calm(target.boot):
                    self.begin(found[one], target, now)
                    break

    def _empty(self, leaving: list[Worker], now: float) -> None:
        """What runs on workers that drain goes elsewhere, as far as there is room."""
        candidates: dict[Running, RoutedRequest] = {}
        for flow in self._floor.flows():
            attempt = flow.attempt
            if attempt is not None and attempt.decode in leaving and may_move(flow, now):
                candidates[running(flow)] = flow
        for one in drain_order(candidates):
            if not self._floor.migrations.room:
                return
            flow = candidates[one]
            target = self._floor.place_for(flow, now)
            if target is not None:
                self.begin(flow, target, now)

    def begin(self, flow: "RoutedRequest", target: Worker, now: float) -> None:
        """Move a request that `may_move`."""
        source = flow.attempt
        assert source is not None  # it runs
        flow.move = self._under_way[flow] = Migration(source, target, now)
        self.num_begun += 1
        self._floor.migrations.moves(flow)
        hold = wire.Hold(attempt=source.id)
        self._floor.to_decode(source.decode, wire.DecodeCommand(hold=hold))

    # --- what workers say

    def took(
        self, flow: "RoutedRequest", worker: Worker, kind: str, message: Any, now: float
    ) -> bool:
        """Whether an event of a decode worker was a move's alone; else it is the flow's."""
        move, attempt = flow.move, flow.attempt
        if move is not None and move.attempt is not None and message.attempt == move.attempt.id:
            if worker is not move.target:
                return False
            return self._of_target(flow, move, move.attempt, kind, message, now)
        if attempt is None or attempt.decode is not worker:
            return False
        if move is not None and kind == "resumed":  # over a new session: there it has stayed
            self._fail(flow, "resumed", now, told=True)
        elif (
            move is not None
            and kind == "gone"
            and move.step is MigrationStep.SENDING
            and move.attempt
        ):
            attempt.decode_over = True
            self._switch(flow, move, move.attempt, now)
            return True
        if kind not in OF_SOURCE:
            return False
        if kind == "moved":
            self._moved(flow, attempt, message, now)
        elif move is not None and kind == "stayed":
            self._fail(flow, message.reason, now, told=True)
        elif move is not None and move.step is MigrationStep.HOLDING:
            self._held(flow, move, message, now)
        return True

    def _held(self, flow: "RoutedRequest", move: Migration, held: wire.Held, now: float) -> None:
        ids = flow.answer.prefix_ids()[:-1]
        if held.tokens != len(ids):
            self._fail(flow, "ids are missing", now)
            return
        move.so_far = held.so_far
        move.step = MigrationStep.ADMITTING
        move.attempt = Attempt(os.urandom(16), move.target, None, ids, now, now, moves=True)
        self._floor.opened(flow, move.attempt, now)
        flow.admit(move.attempt, move.source.decode, 0, now)

    def _of_target(
        self,
        flow: "RoutedRequest",
        move: Migration,
        attempt: Attempt,
        kind: str,
        message: Any,
        now: float,
    ) -> bool:
        if not attempt.answered:
            self._floor.answered(attempt)
        if kind in FIRST_WORDS:
            self._switch(flow, move, attempt, now)
            return False
        if kind == "admitted" and not message.HasField("ticket"):
            self._fail(flow, "target: no ticket", now)
        elif kind == "admitted" and move.step is MigrationStep.ADMITTING:
            move.step = MigrationStep.SENDING
            identity = pb.KvIdentity(**move.target.identity.parts())
            command = wire.Move(
                attempt=move.source.id, to=attempt.id, ticket=message.ticket, kv_identity=identity
            )
            self._floor.to_decode(move.source.decode, wire.DecodeCommand(move=command))
        elif kind in ("busy", "failed", "gone", "handoff_lost"):
            attempt.decode_over = True
            self._fail(flow, f"target: {kind}", now)
        return True

    def _moved(self, flow: "RoutedRequest", source: Attempt, moved: wire.Moved, now: float) -> None:
        source.decode_over = True
        move = flow.move
        if move is not None and move.attempt is not None and move.attempt.id == moved.to:
            self._switch(flow, move, move.attempt, now)
        else:
            flow.retry("it has moved to where it has ended", now)

    def worker_lost(self, flow: "RoutedRequest", worker: Worker, dead: bool, now: float) -> None:
        """A worker died or froze, or only the session to it broke: while the KV is on its way the
        other side still says what has become of it."""
        move = flow.move
        if move is None or worker not in (move.target, move.source.decode):
            return
        dead = dead or self._floor.fleet.get(worker.boot) is not worker  # also one that has drained
        sending = move.step is MigrationStep.SENDING
        if worker is move.target and sending and not dead:
            move.parted = True
        elif worker is move.target:
            if move.attempt is not None:
                move.attempt.decode_over = True
            self._fail(flow, "target lost", now)
        elif not sending:
            self._fail(flow, "source lost", now, told=True)
        elif dead and move.attempt is not None:
            move.source.decode_over = True
            self._switch(flow, move, move.attempt, now)  # it has the KV, or will say HandoffLost;
            self._awaited[flow] = (move.attempt, now)  # but not if no Claim has reached it

    # --- ends

    def _switch(self, flow: "RoutedRequest", move: Migration, attempt: Attempt, now: float) -> None:
        """From here on the target's tokens count."""
        source = move.source
        self._over(flow)
        self.num_done += 1
        self.num_tokens += len(attempt.ids)
        flow.num_stuck = 0
        if move.so_far is not None:
            flow.beginning.moved(move.so_far, flow.num_attempts, source.id)
        if not source.decode_over:
            cancel = wire.CancelAttempt(attempt=source.id)
            self._floor.to_decode(source.decode, wire.DecodeCommand(cancel=cancel))
        source.lost = "moved"
        self._floor.closed(source)
        self._floor.kinship.admitted(flow, attempt)
        flow.attempt, flow.stage, flow.sought = attempt, Stage.RUNNING, now
        if move.parted:
            flow.stage = Stage.SEEKING
        flow.place_at(attempt)
        leave_out_aborted(flow, attempt)

    def _fail(self, flow: "RoutedRequest", reason: str, now: float, told: bool = False) -> None:
        """It goes on at the source; `told`: which has said so."""
        move = self._under_way[flow]
        self.failed[move.step.value] += 1
        flow.num_stuck += 1
        flow.stays_until = now + AGAIN_S
        self.drop(flow, reason)
        if not told:
            stay = wire.Stay(attempt=move.source.id)
            self._floor.to_decode(move.source.decode, wire.DecodeCommand(stay=stay))

    def drop(self, flow: "RoutedRequest", reason: str) -> None:
        """Forget the move, and end its attempt at the target; the source is another's to tell."""
        move = flow.move
        if move is None:
            return
        self._over(flow)
        attempt = move.attempt
        if attempt is None:
            return
        if not attempt.decode_over:
            cancel = wire.CancelAttempt(attempt=attempt.id)
            self._floor.to_decode(move.target, wire.DecodeCommand(cancel=cancel))
        attempt.lost = reason
        self._floor.closed(attempt)

    def _over(self, flow: "RoutedRequest") -> None:
        flow.move = None
        del self._under_way[flow]
        self._floor.migrations.moved(flow)


def may_move(flow: "RoutedRequest", now: float) -> bool:
    """Whether it generates, and its KV is one chain: with several unfinished choices it stays."""
    return (
        flow.stage is Stage.RUNNING
        and flow.move is None
        and flow.answer.begun
        and flow.answer.may_go_remote
        and flow.answer.num_unfinished == 1
        and flow.num_stuck < MAX_FAILED
        and now >= flow.stays_until
    )


def running(flow: "RoutedRequest") -> Running:
    """What the choice of what moves needs of it."""
    generated = sum(len(c.generated_ids) for c in flow.answer.choices if not c.finish)
    most = flow.answer.start.params.max_tokens
    left = max(0, most - generated) if most else None
    return Running(flow.ordinal, len(flow.answer.prompt_ids) + generated, left)


def leaving(workers: Iterable[Worker]) -> list[Worker]:
    """Those that drain and can be talked to."""
    return [w for w in workers if w.state is State.DRAINING and w.connected]
