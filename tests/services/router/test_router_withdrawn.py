"""Answers of withdrawn weights: which of them wait for a worker that may return, and how long."""

from systems.dispatcher_world import WEIGHTS, World

from pdserve.engine.kv import Mixing
from pdserve.protos import common_pb2 as pb
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.services.router.fleet import COMPATIBLE_WORKER_WAIT_S
from pdserve.services.router.placement import Rules


def test_withdrawn_weights_are_not_waited_for() -> None:
    """The pool left in order and other weights have its name: no worker will continue the
    answer.
    """
    world = World(Mixing(), "never", Rules().resuming)
    first = world.join(DECODE)
    world.submit("r")
    world.begin("r")
    world.join(DECODE, **WEIGHTS)
    world.leave(first)
    world.pass_time(0.05)
    failed = world.events[-1].failed
    assert failed.failure.code == pb.UNAVAILABLE
    assert "weights that generated the beginning" in failed.failure.message
    back = world.join(DECODE)
    world.submit("s")
    world.submit("t")
    world.die(back)
    world.pass_time(0.05)
    assert world.events[-1].WhichOneof("event") != "failed", "it may start again"


def test_the_successor_of_the_only_worker_is_waited_for_a_while() -> None:
    """The departure may be a restart; if no worker of the model joins, the answer ends."""
    world = World(Mixing(), "never", Rules().resuming)
    first = world.join(DECODE)
    world.submit("r")
    world.begin("r")
    world.leave(first)
    world.pass_time(COMPATIBLE_WORKER_WAIT_S - 1)
    back = world.join(DECODE)
    assert world.begin("r") is back
    world.leave(back)
    world.pass_time(COMPATIBLE_WORKER_WAIT_S - 1)
    assert not world.events[-1].HasField("failed")
    world.pass_time(1.0)
    failed = world.events[-1].failed
    assert failed.failure.code == pb.UNAVAILABLE
    assert "weights that generated the beginning" in failed.failure.message


def test_a_crashed_worker_of_withdrawn_weights_may_come_back() -> None:
    world = World(Mixing(), "never", Rules().resuming)
    crashes, drains = world.join(DECODE), world.join(DECODE)
    crashes.busy_until = world.now + 1.0
    world.submit("r")
    assert world.begin("r") is drains
    world.join(DECODE, **WEIGHTS)
    world.die(crashes)
    world.leave(drains)
    assert not world.events[-1].HasField("failed")
    world.pass_time(COMPATIBLE_WORKER_WAIT_S / 2)
    back = world.join(DECODE)
    assert world.commands("admit")[-1][0] is back


def test_withdrawn_weights_are_given_up_when_no_crashed_worker_returned() -> None:
    world = World(Mixing(), "never", Rules().resuming)
    crashes, drains = world.join(DECODE), world.join(DECODE)
    crashes.busy_until = world.now + 1.0
    world.submit("r")
    assert world.begin("r") is drains
    world.die(crashes)
    world.join(DECODE, **WEIGHTS)
    world.pass_time(COMPATIBLE_WORKER_WAIT_S - 1)
    world.leave(drains)
    assert not world.events[-1].HasField("failed")
    world.pass_time(1.0)
    assert world.events[-1].failed.failure.code == pb.UNAVAILABLE


def test_tenants_take_turns_at_the_recompute_budget() -> None:
    world = World(Mixing(), "never")
    first = world.join(DECODE)
    for request in ("a1", "a2", "a3", "b1"):
        world.submit(request, tenant=request[:1].encode())
        world.begin(request)
    world.die(first)
    world.join(DECODE)
    for _ in range(3):
        world.begin(world.commands("admit")[-1][1].start.request)
        world.pass_time(0.05)
    order = [admit.start.request for _, admit in world.commands("admit")[4:]]
    assert "b1" in order[:2], "not behind all of the other tenant"
    assert [request for request in order if request != "b1"] == ["a1", "a2", "a3"]
