"""A router in a sharded fleet, where each worker joins some routers.

Requests that wait in vain are given back, and a worker that leaves takes no requests along.
"""

import pytest
from systems.dispatcher_world import NUMERICS, World

from pdserve.engine.kv import NO_MIXING
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.fleet_pb2 import DECODE, PREFILL
from pdserve.services.router.dispatcher import YOUNG_S
from pdserve.services.router.request.placer import WITHOUT_WORKER_S

SHARDED = {"join_routers": 2}


def sharded() -> World:
    return World(NO_MIXING, prefill="never")


def pass_time(world: World, of_left_alone: float) -> None:
    for _ in range(round(of_left_alone * 10)):
        world.pass_time(WITHOUT_WORKER_S / 10)


def given_back(world: World) -> list[str]:
    failed = [e.failed for e in world.events if e.HasField("failed")]
    assert all(f.elsewhere and not f.attempt for f in failed)
    assert all(f.failure.code == pb.UNAVAILABLE for f in failed)
    return [f.request for f in failed]


@pytest.mark.parametrize("hello", [SHARDED, {}])
def test_requests_without_a_worker_are_given_back_if_the_fleet_is_sharded(
    hello: dict[str, int],
) -> None:
    world = sharded()
    worker = world.join(DECODE, hello)
    assert world.fleet.sharded == bool(hello)
    world.submit("a")
    world.begin("a")
    world.die(worker)
    world.submit("b")
    for _ in range(9):
        pass_time(world, 0.1)
        assert given_back(world) == []
    pass_time(world, 0.3)
    assert sorted(given_back(world)) == (["a", "b"] if hello else [])


def test_a_worker_that_joins_in_time_takes_waiting_requests() -> None:
    world = sharded()
    worker = world.join(DECODE, SHARDED)
    world.submit("a")
    world.begin("a")
    world.die(worker)
    pass_time(world, 0.9)
    again = world.join(DECODE, SHARDED)
    assert world.begin("a") is again
    pass_time(world, 1.8)
    assert given_back(world) == []


def test_a_request_that_only_a_busy_worker_may_take_waits() -> None:
    world = sharded()
    worker = world.join(DECODE, SHARDED)
    worker.busy_until = world.now + 1e6
    world.submit("a")
    for _ in range(20):
        world.pass_time(WITHOUT_WORKER_S / 5)
    assert given_back(world) == []
    assert world.dispatcher.num_queued == 1


def test_workers_of_other_numerics_do_not_count() -> None:
    """The request's worker had other numerics, and another router may have such a worker."""
    world = sharded()
    worker = world.join(DECODE, SHARDED)
    world.submit("a")
    world.begin("a")
    world.join(DECODE, SHARDED, **NUMERICS)
    world.die(worker)
    pass_time(world, 1.2)
    assert given_back(world) == ["a"]


def test_running_requests_of_a_leaving_worker_stay_and_waiting_ones_are_given_back() -> None:
    world = sharded()
    worker = world.join(DECODE, SHARDED)
    world.submit("a")
    world.begin("a")
    assert world.dispatcher.workers_in_use() == {worker}
    world.fleet.deregister(worker, leaves=True)
    world.submit("b")
    pass_time(world, 1.2)
    assert given_back(world) == ["b"]
    assert not world.commands("hold"), "it is not moved"
    assert world.dispatcher.workers_in_use() == {worker}
    attempt = world.commands("admit")[-1][1].attempt
    done = wire.DecodeEvent(finished=pb.Finished(attempt=attempt))
    world.dispatcher.on_decode(worker, done, world.now)
    assert world.events[-1].HasField("finished")
    assert not world.dispatcher.workers_in_use()


def test_prefill_workers_are_used_and_make_no_fleet_sharded() -> None:
    world = World(NO_MIXING)
    prefill, decode = world.join(PREFILL, SHARDED), world.join(DECODE)
    assert not world.fleet.sharded
    world.submit("a")
    assert world.commands("admit")[-1][1].prefill_incarnation == prefill.incarnation
    assert world.dispatcher.workers_in_use() == {decode, prefill}


def test_requests_of_a_frozen_worker_are_given_back() -> None:
    """A frozen worker takes no requests, and other routers may have live workers."""
    world = sharded()
    worker = world.join(DECODE, SHARDED)
    worker.frozen = True
    worker.set_state()
    world.submit("a")
    pass_time(world, 1.2)
    assert given_back(world) == ["a"]


def test_a_request_given_back_before_is_given_back_at_once() -> None:
    world = sharded()
    world.die(world.join(DECODE, SHARDED))
    world.submit("a", given_back=True)
    world.submit("b")
    world.pass_time(0.05)
    assert given_back(world) == ["a"]


def test_a_request_whose_worker_others_may_know_is_given_back_at_once() -> None:
    world = sharded()
    here = world.join(DECODE, SHARDED)
    world.pass_time(YOUNG_S)
    world.submit("a", placement=pb.Placement(attempt=b"a" * 16, decode_incarnation=b"x" * 16))
    assert given_back(world) == ["a"]
    world.submit(
        "b", placement=pb.Placement(attempt=b"b" * 16, decode_incarnation=here.incarnation)
    )
    assert given_back(world) == ["a"]


def test_the_next_router_learns_of_the_workers_that_a_request_crashed() -> None:
    world = sharded()
    first = world.join(DECODE, SHARDED)
    world.submit("a")
    world.begin("a")
    world.die(first)
    pass_time(world, 1.2)
    assert given_back(world) == ["a"]
    assert world.events[-1].failed.crash_count == 1
