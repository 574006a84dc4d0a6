"""A router's answers to an endpoint picker, and the placement of the request that follows."""

from collections import Counter
from typing import Any

import grpc
import pytest
from systems.cluster_secret import open_channel
from systems.dispatcher_world import World

from pdserve.engine.kv import Mixing
from pdserve.protos import common_pb2 as pb
from pdserve.protos import router_pb2 as rpc
from pdserve.protos.fleet_pb2 import DECODE, PREFILL, Load, PrefixEvents
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import RequestProgress
from pdserve.services.router.fleet import PrefixIndex, Worker
from pdserve.services.router.placement import (
    FactsOfWorkers,
    PickedPrompts,
    PromisedChains,
    WorkerPool,
    prompt_key,
)
from pdserve.services.router.placement.facts import MAX_PICKS, PICKED_S
from pdserve.services.router.request import PickQuery

IDS = list(range(40))
HOSTS = frozenset(f"10.0.0.{number}" for number in range(1, 5))


def fleet(num: int = 4) -> tuple[World, list[Worker]]:
    world = World(Mixing(), "never")
    return world, [world.join(DECODE) for _ in range(num)]


def pick(
    world: World,
    ids: list[int] = IDS,
    hosts: Any = HOSTS,
    salt: bytes = b"",
    tokenizer: str = "",
) -> list[str]:
    request = PickQuery(WorkerPool("m", tokenizer), ids, salt, hosts)
    return [one.host for one in world.dispatcher.placer.pick(request, world.now)]


def cache(worker: Worker, ids: list[int], salt: bytes = b"") -> None:
    """Put the prompt's full blocks into the worker's cache."""
    facts = FactsOfWorkers([*ids, 0], salt, {}, PrefixIndex(1024), PromisedChains(), 0.0)
    chain = facts.chain(worker)
    worker.prefixes.apply(PrefixEvents(added=chain))


def submit(world: World, ids: list[int] = IDS, request: str = "r", salt: bytes = b"") -> str:
    """Submit a request; return the host of its decode worker."""
    start = pb.Start(
        request=request, model="m", params=pb.SamplingParams(n=1), cache_salt=salt, tenant=b"t"
    )
    world.dispatcher.submit(RequestProgress(start, ids), world, world.now)
    worker, admit = world.commands("admit")[-1]
    assert admit.start.request == request
    return worker.host


def test_the_worker_with_the_prefix_comes_first() -> None:
    world, workers = fleet()
    cache(workers[2], IDS)
    assert pick(world)[0] == "10.0.0.3"
    assert sorted(pick(world)) == sorted(HOSTS)
    world.now += PICKED_S
    assert pick(world, hosts={"10.0.0.1", "10.0.0.4"})[0] in ("10.0.0.1", "10.0.0.4")
    assert pick(world, hosts={"10.9.9.9"}) == []


def test_a_prefix_counts_only_with_its_salt() -> None:
    world, workers = fleet(2)
    cache(workers[0], IDS, b"mine")
    request = PickQuery(WorkerPool("m"), IDS, b"theirs", HOSTS)
    assert [one.cached_tokens for one in world.dispatcher.placer.pick(request, world.now)] == [0, 0]
    world.now += PICKED_S
    request = request._replace(cache_salt=b"mine")
    found = world.dispatcher.placer.pick(request, world.now)
    assert found[0] == ("10.0.0.1", 32)


def test_the_request_goes_to_the_picked_worker() -> None:
    for number in range(20):
        world, _ = fleet()
        picked = pick(world)[0]
        assert submit(world, request=f"r{number}") == picked
        assert len(world.dispatcher.placer.picks) == 0


def test_other_prompts_do_not_take_a_pick() -> None:
    world, _ = fleet()
    pick(world)
    submit(world, [*IDS, 1])
    submit(world, request="salted", salt=b"x")
    assert len(world.dispatcher.placer.picks) == 1


def test_a_request_whose_worker_has_gone_goes_elsewhere() -> None:
    world, workers = fleet(2)
    picked = pick(world)[0]
    world.die(next(worker for worker in workers if worker.host == picked))
    assert submit(world) != picked


def test_a_burst_of_picks_spreads() -> None:
    world, _ = fleet()
    picked = Counter(pick(world, [number, *IDS])[0] for number in range(40))
    assert max(picked.values()) <= 14
    assert len(picked) == 4


def test_prompts_with_a_common_prefix_stay_together_in_a_burst() -> None:
    """The first one's KV is promised, though not computed yet."""
    world = World(Mixing())
    for role in (DECODE, DECODE, DECODE, PREFILL):
        world.join(role)
    ids = list(range(400))
    picked = {pick(world, [*ids, number])[0] for number in range(4)}
    assert len(picked) == 1


def test_a_pick_counts_for_a_moment_only() -> None:
    world, _ = fleet(2)
    for _ in range(10):
        pick(world)
    placer = world.dispatcher.placer
    assert len(placer.picks) == 10
    world.now += PICKED_S
    pick(world, [7, 8, 9])
    assert len(placer.picks) == 1
    assert len(set(placer.promised)) == 1


def test_picks_are_bounded() -> None:
    promised = PromisedChains()
    picks = PickedPrompts(promised)
    for number in range(MAX_PICKS + 10):
        picks.add(prompt_key("m", b"", [number]), b"incarnation", [b"x"], 1, 0.0)
    assert len(picks) == len(set(promised)) == MAX_PICKS
    for number in range(MAX_PICKS + 10):
        picks.take(prompt_key("m", b"", [number]), 0.0)
    assert len(picks) == 0
    assert promised.num_promised([b"x"]) == {}


def test_busy_workers_are_named_only_without_others() -> None:
    world, workers = fleet(2)
    for worker in workers:
        worker.busy_until = world.now + 10
    assert sorted(pick(world)) == ["10.0.0.1", "10.0.0.2"]
    workers[1].busy_until = 0.0
    assert pick(world) == ["10.0.0.2"]


def test_a_full_queue_refuses() -> None:
    world, workers = fleet(1)
    placer = world.dispatcher.placer
    assert not placer.refuses(WorkerPool("m"), b"t", world.now)
    workers[0].busy_until = world.now + 10
    for number in range(5):
        start = pb.Start(request=f"r{number}", model="m", params=pb.SamplingParams(n=1))
        start.tenant = b"t"
        world.dispatcher.submit(RequestProgress(start, IDS), world, world.now)
    assert placer.refuses(WorkerPool("m"), b"t", world.now)
    assert world.dispatcher.num_queued == 5


def test_load_counts() -> None:
    world, workers = fleet(2)
    workers[0].report(Load(running=20))
    assert {pick(world, [number, *IDS])[0] for number in range(8)} == {"10.0.0.2"}


# --- over gRPC


@pytest.mark.anyio
async def test_pick_over_grpc(make_cluster: Any) -> None:
    cluster = await make_cluster(api_keys=("a key",))
    await cluster.decode("m")
    (host,) = {worker.host for worker in cluster.router.core.fleet.workers.values()}
    request = rpc.PickRequest(model="m", prompt_ids=IDS, hosts=[host])
    async with open_channel(cluster.router.address) as channel:
        stub = RouterStub(channel)
        reply = await stub.Pick(request)
        assert [worker.host for worker in reply.workers] == [host]
        request.model = "other"
        reply = await stub.Pick(request)
        assert (list(reply.workers), reply.elsewhere) == ([], False)
        del request.hosts[:]
        assert (await stub.Pick(request)).elsewhere
        error = await failure_of(stub.Pick(rpc.PickRequest(model="m")))
        assert (error.code, error.param) == (pb.INVALID_ARGUMENT, "prompt_ids")
    async with open_channel(cluster.router.address, "a key") as channel:
        assert (await failure_of(RouterStub(channel).Pick(request))).code == pb.UNAUTHENTICATED
    assert not cluster.router.core.dispatcher.num_running


async def failure_of(call: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return ServiceError.from_rpc(caught.value)
