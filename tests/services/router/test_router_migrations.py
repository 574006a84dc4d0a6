"""The resume budget: what a dead decode worker had moves a share at a time; new work goes on."""

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from pdserve.protos import common_pb2 as pb
from pdserve.services.router.placement.recompute_budget import SHARE, RecomputeBudget


@dataclass(eq=False)
class Asked:
    ordinal: int


def test_at_most_a_share_of_the_running_is_under_way() -> None:
    waited = 0
    for seed in range(200):
        rng = Random(seed)
        migrations: RecomputeBudget[Asked] = RecomputeBudget()
        asked = [Asked(n) for n in range(rng.randrange(1, 60))]
        for request in asked:
            migrations.runs(request)
        lost = set(rng.sample(asked, rng.randrange(1, len(asked) + 1)))
        for request in rng.sample(sorted(lost, key=lambda r: r.ordinal), len(lost)):
            migrations.wait(request)
        under_way: list[Asked] = []
        begun: list[Asked] = []
        alive = len(asked)
        while lost:
            for request in migrations.take_waiting():
                if migrations.room:
                    migrations.begun(request)
                    under_way.append(request)
                    begun.append(request)
                else:
                    migrations.wait(request)
                    waited += 1
            assert 0 < migrations.num_under_way == len(under_way) <= max(1, int(SHARE * alive))
            request = under_way.pop(rng.randrange(len(under_way)))
            lost.discard(request)
            if rng.random() < 0.2:
                migrations.forget(request)
                alive -= 1
            else:
                migrations.runs(request)
        assert migrations.num_under_way == migrations.num_waiting == 0
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
    await gateway.start("new", [7, 8, 9])  # is not held up by those that wait
    await gateway.until(lambda: len(gateway.ids("new")) == 3)
    dispatcher = cluster.router.core.dispatcher
    assert dispatcher.migrations.num_under_way == 3
    assert dispatcher.migrations.num_waiting == dispatcher.num_queued == 12
    assert len(survivor.of("admit")) == 4
    survivor.released.set()
    for name in names:
        assert isinstance(await gateway.end(name), pb.Finished)
        assert gateway.ids(name) == expected(SHORT, 8)
    assert dispatcher.migrations.num_under_way == dispatcher.num_queued == 0


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
    await wait_for(lambda: dispatcher.migrations.num_waiting == 1)
    await gateway.cancel("r")
    assert (await gateway.end("r")).failure.code == pb.CANCELLED
    assert dispatcher.migrations.num_waiting == 0
