"""Requests of a draining decode worker continue on another one, or where they were."""

import asyncio
import itertools
from typing import Any

import pytest
from fakes.memory_tracer import CLIENT, MemoryTracer
from fakes.router_workers import FakeDecode
from systems.dispatcher_world import World
from systems.eventually import eventually

from pdserve.engine.kv import Mixing
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.services.common.tracing import NO_TRACER, Tracer
from pdserve.services.router.placement import RecomputeBudget
from pdserve.services.router.request.migrations import (
    MIN_REMAINING,
    MIN_WINDOWS,
    WINDOW_S,
    Pressure,
    Running,
    drain_order,
    relief_order,
)
from pdserve.services.router.request.state import MAX_FAILED_MIGRATIONS, Beginning, FirstToken

pytestmark = pytest.mark.anyio
SHORT = list(range(20))


class Drained:
    """A request on a worker that drains, and another worker."""

    def __init__(self, make_cluster: Any, expected: Any, wait_for: Any) -> None:
        self.make_cluster, self.expected, self.wait_for = make_cluster, expected, wait_for

    async def begin(self, tracer: Tracer = NO_TRACER, **start: Any) -> None:
        self.cluster = await self.make_cluster(tracer)
        self.leaving = await self.cluster.decode()
        self.leaving.hold_at = 5
        self.leaving.cached_tokens = 7
        self.gateway = await self.cluster.gateway()
        await self.gateway.start("r", SHORT, max_tokens=12, **start)
        await self.gateway.until(lambda: len(self.gateway.ids("r")) == 5)
        self.target: FakeDecode = await self.cluster.decode()
        self.leaving.peers.append(self.target)
        self.target.membership.report(self.load())
        core = self.cluster.router.core
        known = core.fleet.get(self.target.incarnation)
        await self.wait_for(lambda: known.load.blocks_free > 0)
        self.migrations = core.dispatcher.migrations

    @staticmethod
    def load() -> Any:
        return fleet_pb2.Load(blocks_free=100, blocks_total=100)

    def drain(self) -> None:
        self.leaving.membership.announce_drain()

    async def moving(self) -> wire.Move:
        """Begin, and drain until the source has the Move command; it does not answer."""
        await self.begin()
        said: list[wire.Move] = []
        self.leaving.move = said.append  # type: ignore[method-assign]
        self.drain()
        await self.leaving.until(lambda: bool(self.leaving.of("move")))
        return said[0]

    async def answer(self) -> pb.Finished:
        finished = await self.gateway.end("r")
        assert isinstance(finished, pb.Finished)
        assert self.gateway.ids("r") == self.expected(SHORT, 12)
        assert not self.migrations.num_under_way
        assert self.cluster.router.core.view().retries == 0
        return finished


@pytest.fixture
def drained(make_cluster: Any, expected: Any, wait_for: Any) -> Drained:
    return Drained(make_cluster, expected, wait_for)


async def test_a_request_continues_at_another_worker(drained: Drained) -> None:
    await drained.begin()
    said: list[wire.Move] = []

    def move(command: wire.Move) -> None:
        said.append(command)
        moved = wire.Moved(attempt=command.attempt, to=command.to, sent_bytes=1000)
        drained.leaving.put(wire.DecodeEvent(moved=moved))

    drained.leaving.move = move  # type: ignore[method-assign]
    drained.drain()
    await drained.wait_for(lambda: drained.migrations.num_done == 1)
    drained.target.arrived[said[0].to].set()
    finished = await drained.answer()
    assert (finished.cached_tokens, finished.transport) == (7, "first"), (
        "the phases of its first attempt"
    )
    (admit,) = drained.target.of("admit")
    assert admit.prefill_incarnation == drained.leaving.incarnation
    assert list(admit.start.choices[0].generated_ids) == drained.expected(SHORT, 5)
    first, second = drained.gateway.of("r", "placed")
    assert first.placement.decode_incarnation == drained.leaving.incarnation
    assert second.placement.decode_incarnation == drained.target.incarnation
    assert second.placement.attempt == admit.attempt
    view = drained.cluster.router.core.view()
    assert (view.moves, view.moves_failed, view.moved_bytes) == (1, 0, 1000)
    assert view.moved_tokens == len(SHORT) + 4
    assert not drained.leaving.cancelled, "it has ended there by itself"


@pytest.mark.parametrize("how", ["keep", "busy", "break_moves", "gone"])
async def test_a_failed_move_changes_nothing(drained: Drained, how: str) -> None:
    await drained.begin()
    if how == "busy":
        drained.target.busy = 1000
    elif how != "gone":
        setattr(drained.leaving, how, "test")
    if how == "gone":  # it dies with the KV in flight
        drained.leaving.move = lambda move: None  # type: ignore[method-assign]
    drained.drain()
    if how == "gone":
        await drained.target.until(lambda: bool(drained.target.of("admit")))
        await drained.leaving.until(lambda: bool(drained.leaving.of("move")))
        await drained.target.kill()
    await drained.wait_for(lambda: drained.migrations.failed.total() > 0)
    drained.leaving.released.set()
    drained.leaving.hold_at = None
    await drained.answer()
    assert drained.migrations.num_done == 0
    assert 1 <= drained.migrations.failed.total() <= MAX_FAILED_MIGRATIONS
    steps = {"keep": "holding", "busy": "admitting", "break_moves": "sending", "gone": "sending"}
    assert set(drained.migrations.failed) == {steps[how]}
    (placed,) = drained.gateway.of("r", "placed")
    assert placed.placement.decode_incarnation == drained.leaving.incarnation


async def test_a_source_that_does_not_answer_keeps_the_request(
    drained: Drained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.services.router.request.migration_machine.MIGRATION_S", 0.2)
    await drained.begin()
    drained.leaving.silent = True
    drained.drain()
    await drained.wait_for(lambda: drained.migrations.failed["holding"] > 0)
    await drained.leaving.until(lambda: bool(drained.leaving.of("stay")))
    drained.leaving.released.set()
    await drained.answer()


async def test_a_source_that_dies_with_all_sent_has_moved(drained: Drained) -> None:
    """The target has every block; only the source's Moved is missing."""
    move = await drained.moving()
    await drained.leaving.kill()
    await drained.wait_for(lambda: drained.migrations.num_done == 1)
    drained.target.arrived[move.to].set()
    finished = await drained.answer()
    assert finished.cached_tokens == 7


async def test_broken_sessions_wait_for_the_other_side(drained: Drained) -> None:
    """Source and target live; both sessions break while the KV is in flight."""
    move = await drained.moving()
    drained.leaving.said.clear()  # it has moved: Gone
    for worker in (drained.target, drained.leaving):
        worker.outboxes[-1].close()
    drained.target.arrived[move.to].set()
    await drained.target.until(lambda: bool(drained.target.of("resume")))
    finished = await drained.gateway.end("r")
    assert isinstance(finished, pb.Finished)
    assert drained.gateway.ids("r") == drained.expected(SHORT, 12)
    assert (drained.migrations.num_done, drained.migrations.failed.total()) == (1, 0)


async def test_a_source_that_dies_before_the_move_is_an_ordinary_loss(drained: Drained) -> None:
    move = await drained.moving()
    await drained.leaving.kill()
    await drained.wait_for(lambda: drained.migrations.num_done == 1)
    drained.target.tasks.pop(move.to).cancel()
    lost = wire.HandoffLost(attempt=move.to, reason="connection")
    drained.target.put(wire.DecodeEvent(handoff_lost=lost))
    finished = await drained.gateway.end("r")
    assert isinstance(finished, pb.Finished)
    assert drained.gateway.ids("r") == drained.expected(SHORT, 12)
    again = drained.target.of("admit")[-1]
    assert again.prefill_incarnation == b""


async def test_a_source_that_dies_before_its_claim_is_not_waited_for(
    drained: Drained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has reached the target, so it does not wait for anything."""
    monkeypatch.setattr("pdserve.services.router.request.machine.SENDER_S", 0.2)
    move = await drained.moving()
    await drained.leaving.kill()
    finished = await drained.gateway.end("r")
    assert isinstance(finished, pb.Finished)
    assert drained.gateway.ids("r") == drained.expected(SHORT, 12)
    assert drained.target.cancelled == [(move.to, ())]
    assert drained.target.of("admit")[-1].prefill_incarnation == b""


async def test_the_target_s_first_tokens_count_as_the_move(drained: Drained) -> None:
    """The source's Moved may come later than they do, or never."""
    await drained.begin()
    moves: list[wire.Move] = []
    drained.leaving.move = moves.append  # type: ignore[method-assign]
    drained.drain()
    await drained.leaving.until(lambda: bool(drained.leaving.of("move")))
    source = drained.leaving.of("admit")[0].attempt
    drained.target.arrived[moves[0].to].set()
    await drained.answer()
    await drained.leaving.until(lambda: drained.leaving.cancelled == [(source, ())])


async def test_a_cancel_ends_both_sides(drained: Drained) -> None:
    await drained.begin()
    drained.leaving.move = lambda move: None  # type: ignore[method-assign]
    drained.drain()
    await drained.leaving.until(lambda: bool(drained.leaving.of("move")))
    await drained.gateway.cancel("r")
    failed = await drained.gateway.end("r")
    assert failed.failure.code == pb.CANCELLED
    (admit,) = drained.target.of("admit")
    source = drained.leaving.of("admit")[0].attempt
    await drained.target.until(lambda: drained.target.cancelled == [(admit.attempt, ())])
    await drained.leaving.until(lambda: drained.leaving.cancelled == [(source, ())])
    assert not drained.migrations.num_under_way


async def test_a_cancelled_migration_is_in_the_span_of_its_request(drained: Drained) -> None:
    tracer = MemoryTracer()
    await drained.begin(tracer, trace_parent=CLIENT)
    drained.leaving.silent = True
    drained.drain()
    await drained.leaving.until(lambda: bool(drained.leaving.of("hold")))
    await drained.gateway.cancel("r")
    await drained.gateway.end("r")
    begun, failed = (e for e in tracer.spans()["route"].events if "migration" in e.name)
    assert (begun.name, failed.name) == ("migration begun", "migration failed")
    assert failed.attributes["step"] == "", "the request left the source"
    assert drained.migrations.failed.total() == 0


async def test_several_unfinished_choices_stay(drained: Drained) -> None:
    await drained.begin(n=2)
    drained.drain()
    await asyncio.sleep(0.3)  # several ticks of the router
    assert drained.migrations.num_begun == 0
    drained.leaving.released.set()
    await drained.answer()
    assert drained.gateway.ids("r", 1) == drained.expected(SHORT, 12, choice=1)


async def test_without_room_elsewhere_a_request_stays(drained: Drained) -> None:
    await drained.begin()
    from pdserve.protos import fleet_pb2

    drained.target.membership.report(fleet_pb2.Load(blocks_free=1, blocks_total=100))
    known = drained.cluster.router.core.fleet.get(drained.target.incarnation)
    await drained.wait_for(lambda: known.load.blocks_free == 1)
    drained.drain()
    await asyncio.sleep(0.3)
    assert drained.migrations.num_begun == 0
    drained.leaving.released.set()
    await drained.answer()


def test_the_request_that_may_run_longest_moves_first() -> None:
    requests = [Running(1, 10, 5), Running(2, 10, None), Running(3, 10, 90), Running(4, 10, 90)]
    assert [r.ordinal for r in drain_order(requests)] == [2, 3, 4, 1]


def test_only_a_worker_that_keeps_preempting_is_under_pressure() -> None:
    pressure = Pressure()
    a, b = b"a", b"b"
    counts = [(0, 5), (1, 5), (1, 5), (2, 6), (3, 6), (4, 6), (5, 7), (6, 8), (7, 9)]
    found = []
    for second, (of_a, of_b) in enumerate(counts):
        found += [
            (second, incarnation)
            for incarnation in pressure.look({a: of_a, b: of_b}, float(second))
        ]
        assert pressure.look({a: 100, b: 100}, second + 0.5) == [], "within the window"
    assert found == [(4, a), (6, a), (7, b), (8, a)]
    assert pressure.calm(a)
    assert not pressure.calm(b)
    assert pressure.look({b: 10}, 20.0) == [b]
    assert pressure.look({a: 50, b: 10}, 30.0) == [], "another incarnation of it"


@pytest.mark.parametrize("roomy", [True, False])
@pytest.mark.parametrize("calm", [True, False])
def test_a_preempting_worker_moves_requests_only_to_one_with_room_that_does_not_preempt(
    roomy: bool, calm: bool
) -> None:
    world = World(Mixing(), "never")
    world.join(DECODE)
    world.submit("r", params=pb.SamplingParams(n=1, max_tokens=100))
    giving = world.begin("r")
    taking = world.join(DECODE)
    blocks = 20 if roomy else 4  # 140 tokens in blocks of 16; what it has already fits in 4
    for window in range(MIN_WINDOWS + 1):
        giving.report(fleet_pb2.Load(preemptions=window))
        preemptions = 0 if calm else window // MIN_WINDOWS  # in the last window
        taking.report(fleet_pb2.Load(blocks_free=blocks, preemptions=preemptions))
        world.pass_time(WINDOW_S)
    assert world.dispatcher.migrations.num_begun == (roomy and calm)


def test_a_request_that_ends_soon_or_is_costly_to_copy_stays() -> None:
    requests = [
        Running(1, 100, MIN_REMAINING - 1),
        Running(2, 100, MIN_REMAINING),
        Running(3, 100, None),
        Running(4, 64 * 40, 40),
        Running(5, 64 * 40 + 1, 40),
    ]
    assert [r.ordinal for r in relief_order(requests)] == [4, 3, 2]


async def test_a_preempting_worker_moves_a_request(
    drained: Drained, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdserve.protos import fleet_pb2

    monkeypatch.setattr("pdserve.services.router.request.migrations.WINDOW_S", 0.1)
    monkeypatch.setattr("pdserve.services.router.request.migrations.MIN_REMAINING", 1)
    await drained.begin()
    counts = itertools.count(1)

    def migrated() -> int:
        load = fleet_pb2.Load(running=1, preemptions=next(counts))
        drained.leaving.membership.report(load)  # at most 20 of them a second are sent
        return int(drained.migrations.num_done)

    await eventually(migrated)
    finished = await drained.answer()
    assert finished.cached_tokens == 7
    assert (drained.migrations.num_done, drained.migrations.failed.total()) == (1, 0)


def test_migrations_count_among_changes_of_the_worker() -> None:
    requests = [Running(n, 0, 0) for n in range(10)]
    budget: RecomputeBudget[Running] = RecomputeBudget()
    for request in requests:
        budget.runs(request)
    budget.migration_begun(requests[0])
    assert budget.has_room
    budget.recompute_begun(requests[1])
    assert not budget.has_room
    budget.runs(requests[0])
    assert not budget.has_room, "its tokens come from the source"
    budget.migration_over(requests[0])
    assert budget.has_room


def test_the_first_attempt_decides_a_request_s_first_phases() -> None:
    """Times: submitted at 10, an Admit at 10.5, the first token at 13.5, then two moves."""
    beginning = Beginning(FirstToken(10.0))
    beginning.token.record(b"one", 10.5, 13.5)
    beginning.token.record(b"two", 14.0, 15.0)
    first = pb.Finished(cached_tokens=3, phases=pb.Phases(queue_s=1.0, prefill_s=2.0))
    beginning.migrated(first, 1, b"one")
    again = pb.Finished(cached_tokens=50, remote=True, phases=pb.Phases(queue_s=9.0))
    beginning.migrated(again, 1, b"two")
    last = pb.Finished(cached_tokens=60, remote=True, transport="tcp")
    beginning.complete(last, 1, b"three")
    assert (last.cached_tokens, last.remote, last.transport) == (3, False, "")
    assert (last.phases.queue_s, last.phases.prefill_s) == (1.5, 2.0)


def test_a_lost_attempt_contributes_only_the_time_to_its_first_token() -> None:
    beginning = Beginning(FirstToken(10.0))
    beginning.token.record(b"one", 10.5, 13.5)
    last = pb.Finished(phases=pb.Phases(queue_s=7.0, prefill_s=8.0, first_token_s=1.0))
    beginning.complete(last, 2, b"two")
    assert last.phases == pb.Phases(queue_s=0.5, route_s=0.5, prefill_s=3.0)


def test_tries_that_were_lost_before_the_first_token_count_as_queueing() -> None:
    beginning = Beginning(FirstToken(10.0))
    beginning.token.record(b"two", 14.0, 15.0)
    last = pb.Finished(phases=pb.Phases(queue_s=0.25, prefill_s=0.5, first_token_s=0.25))
    beginning.complete(last, 2, b"two")
    assert last.phases == pb.Phases(queue_s=4.25, route_s=4.0, prefill_s=0.5, first_token_s=0.25)
