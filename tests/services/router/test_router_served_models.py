"""The models that a router reports as served: those whose workers may return, not retired ones."""

import pytest
from systems.dispatcher_world import World

from pdserve.engine.kv import NO_MIXING
from pdserve.protos import common_pb2 as pb
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.services.router.fleet.fleet import RETIRED_S
from pdserve.services.router.metrics import RouterMetrics


@pytest.fixture
def world() -> World:
    made = World(NO_MIXING)
    made.join(DECODE)
    return made


def live(world: World) -> dict[str, float]:
    """Return the number of live decode workers by model, as the router exports them."""
    (family,) = [
        f for f in RouterMetrics(world.core).collect() if f.name == "pdserve_router_workers"
    ]
    return {
        sample.labels["model_name"]: sample.value
        for sample in family.samples
        if (sample.labels["role"], sample.labels["state"]) == ("decode", "live")
    }


def test_a_retired_model_is_forgotten_after_a_while(world: World) -> None:
    old = world.join(DECODE, name="old")
    assert live(world) == {"m": 1, "old": 1}
    world.leave(old)
    world.pass_time(RETIRED_S - 1)
    assert live(world) == {"m": 1, "old": 0}
    world.pass_time(1)
    assert live(world) == {"m": 1}


def test_a_model_whose_last_worker_crashed_stays(world: World) -> None:
    """The model stays whether or not other workers had left in order before."""
    workers = [world.join(DECODE, name="lost") for _ in range(2)]
    world.leave(workers[0])
    world.die(workers[1])
    world.pass_time(10 * RETIRED_S)
    assert live(world) == {"m": 1, "lost": 0}


def test_in_a_sharded_fleet_a_successor_may_join_other_routers(world: World) -> None:
    world.die(world.join(DECODE, {"join_routers": 2}, name="lost"))
    world.pass_time(RETIRED_S - 1)
    assert live(world) == {"m": 1, "lost": 0}
    world.pass_time(1)
    assert live(world) == {"m": 1}


def test_a_restart_resets_the_time(world: World) -> None:
    world.leave(world.join(DECODE, name="again"))
    world.pass_time(RETIRED_S - 1)
    world.join(DECODE, name="again")
    world.pass_time(RETIRED_S)
    assert live(world) == {"m": 1, "again": 1}


def test_a_forgotten_model_is_not_served(world: World) -> None:
    """While the model is known, its requests wait."""
    (only,) = world.fleet.workers.values()
    world.join(DECODE, name="other")
    world.leave(only)
    world.submit("waits", queue_remaining_ms=10_000)
    assert world.events == []
    world.pass_time(RETIRED_S)
    world.submit("refused")
    assert world.events[-1].failed.failure.code == pb.MODEL_NOT_FOUND
