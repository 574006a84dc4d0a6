"""The recompute budget: requests of a dead decode worker move a share at a time; new work
continues.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from pdserve.protos import common_pb2 as pb
from pdserve.services.router.placement import (
    RecomputeBudget,
    WaitingQueue,
    WaitReason,
    WorkerPool,
)
from pdserve.services.router.placement.waiting import SHARE

POOL = WorkerPool("m")


@dataclass(eq=False)
class FakeRequest:
    ordinal: int
    pool: WorkerPool = POOL
    tenant: bytes = b""

    @property
    def rank(self) -> tuple[int, int]:
        return 0, self.ordinal


def test_at_most_a_share_of_the_running_requests_moves_at_once() -> None:
    waited = 0
    for seed in range(200):
        rng = Random(seed)
        budget: RecomputeBudget[FakeRequest] = RecomputeBudget()
        waiting: WaitingQueue[FakeRequest] = WaitingQueue()
        requests = [FakeRequest(n) for n in range(rng.randrange(1, 60))]
        for request in requests:
            budget.runs(request)
        lost = set(rng.sample(requests, rng.randrange(1, len(requests) + 1)))
        for request in rng.sample(sorted(lost, key=lambda r: r.ordinal), len(lost)):
            waiting.add(request, WaitReason.BUDGET, 0.0)
        under_way: list[FakeRequest] = []
        begun: list[FakeRequest] = []
        alive = len(requests)
        while lost:
            for request in waiting.of(WaitReason.BUDGET):
                if budget.has_room:
                    waiting.remove(request)
                    budget.recompute_begun(request)
                    under_way.append(request)
                    begun.append(request)
                else:
                    waited += 1
            assert 0 < budget.num_under_way == len(under_way) <= max(1, int(SHARE * alive))
            request = under_way.pop(rng.randrange(len(under_way)))
            lost.discard(request)
            if rng.random() < 0.2:
                budget.forget(request)
                alive -= 1
            else:
                budget.runs(request)
        assert budget.num_under_way == len(waiting) == 0
        assert [r.ordinal for r in begun] == sorted(r.ordinal for r in begun), "the oldest first"
    assert waited > 1000


pytestmark = pytest.mark.anyio
SHORT = list(range(20))


async def test_a_dead_worker_s_requests_move_a_share_at_a_time(
    make_cluster: Any, expected: Any
) -> None:
    cluster = await make_cluster()
    dying = await cluster.decode(hold_at=3)
    gateway = await cluster.gateway()
    names = [f"r{n}" for n in range(15)]
    for name in names:
        await gateway.start(name, SHORT)
    await gateway.until(lambda: all(len(gateway.ids(name)) == 3 for name in names))
    survivor = await cluster.decode(hold_at=3)
    await dying.kill()
    await survivor.until(lambda: len(survivor.of("admit")) >= 3)
    await gateway.start("new", [7, 8, 9])  # those that wait do not delay it
    await gateway.until(lambda: len(gateway.ids("new")) == 3)
    dispatcher = cluster.router.core.dispatcher
    placer = dispatcher.placer
    assert placer.budget.num_under_way == 3
    assert placer.waiting.num(WaitReason.BUDGET) == dispatcher.num_queued == 12
    assert len(survivor.of("admit")) == 4
    survivor.released.set()
    for name in names:
        assert isinstance(await gateway.end(name), pb.Finished)
        assert gateway.ids(name) == expected(SHORT, 8)
    assert placer.budget.num_under_way == dispatcher.num_queued == 0


async def test_a_request_that_waits_to_move_can_be_cancelled(
    make_cluster: Any, wait_for: Any
) -> None:
    cluster = await make_cluster()
    dying = await cluster.decode(hold_at=3)
    gateway = await cluster.gateway()
    await gateway.start("r", SHORT)
    await gateway.until(lambda: len(gateway.ids("r")) == 3)
    await dying.kill()
    dispatcher = cluster.router.core.dispatcher
    placer = dispatcher.placer
    await wait_for(lambda: placer.waiting.num(WaitReason.BUDGET) == 1)
    await gateway.cancel("r")
    assert (await gateway.end("r")).failure.code == pb.CANCELLED
    assert placer.waiting.num(WaitReason.BUDGET) == 0
