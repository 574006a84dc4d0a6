"""Embeddings through a real router to fake workers: one for each request, whichever worker dies;
in a fleet where only some workers embed, they go to those alone."""

import asyncio
from typing import Any

import pytest
from systems.dispatcher_world import CARD, World

from pdserve.engine.kv import Mixing
from pdserve.protos import common_pb2 as pb
from pdserve.protos.fleet_pb2 import DECODE, Load, PrefixEvents, WorkerHello
from pdserve.protos.worker_pb2 import Busy, DecodeEvent
from pdserve.services.router.dispatcher import BUSY_S, YOUNG_S
from pdserve.services.router.fleet import COMPATIBLE_WORKER_WAIT_S, PrefixIndex
from pdserve.services.router.placement import FactsOfWorkers, PromisedChains, WorkerPool
from pdserve.services.router.request import PickQuery

pytestmark = pytest.mark.anyio
LONG = list(range(600))
VALUES = [0.0, 600.0]


async def test_an_embedding_stays_local_and_comes_before_the_end(make_cluster: Any) -> None:
    cluster = await make_cluster(remote_prefill="always")
    await cluster.decode()
    prefill = await cluster.prefill()
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, pool=True)
    finished = await gateway.end("r")
    assert isinstance(finished, pb.Finished)
    assert not finished.remote
    kinds = [event.WhichOneof("event") for event in gateway.events["r"]]
    assert kinds == ["placed", "embedding", "finished"]
    (embedding,) = gateway.of("r", "embedding")
    assert list(embedding.values) == VALUES
    assert not prefill.ids
    assert cluster.router.core.view().prefill_local == 1


@pytest.mark.parametrize("said", [False, True], ids=["before it is said", "after it was said"])
async def test_a_worker_that_dies(make_cluster: Any, said: bool) -> None:
    cluster = await make_cluster()
    dying = await cluster.decode()
    dying.hold_at = int(said)
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, pool=True)
    await dying.until(lambda: bool(dying.said))
    if said:
        await gateway.until(lambda: bool(gateway.of("r", "embedding")))
    other = await cluster.decode()
    await dying.kill()
    assert isinstance(await gateway.end("r"), pb.Finished)
    (embedding,) = gateway.of("r", "embedding")
    assert list(embedding.values) == VALUES
    assert len(other.of("admit")) == int(not said), "it is computed again only if it was lost"
    assert cluster.router.core.dispatcher.num_running == 0


async def test_an_embedding_is_delivered_once_over_a_broken_session(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 1
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, pool=True)
    await gateway.until(lambda: bool(gateway.of("r", "embedding")))
    decode.outboxes[-1].close()
    await decode.until(lambda: bool(decode.of("resume")))
    decode.released.set()
    assert isinstance(await gateway.end("r"), pb.Finished)
    assert len(gateway.of("r", "embedding")) == 1
    assert len(decode.of("admit")) == 1


async def test_several_choices_are_refused(make_cluster: Any) -> None:
    cluster = await make_cluster()
    await cluster.decode()
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, pool=True, n=2)
    failed = await gateway.end("r")
    assert failed.failure.code == pb.INVALID_ARGUMENT
    assert failed.failure.param == "n"


def mixed(*pools: str) -> World:
    """Return a router with one decode worker for each of these values of --pool."""
    world = World(Mixing(), "never")
    for pool in pools:
        world.join(DECODE, pool=pool)
    return world


def embed(world: World, request: str, pooling: str = "last") -> None:
    world.submit(request, pool=True, pooling=pooling)


def placed(world: World) -> list[tuple[str, str]]:
    """Return the requests with Admits, and the pooling of their workers."""
    return [(admit.start.request, w.pooling) for w, admit in world.commands("admit")]


def failures(world: World) -> dict[str, pb.Failure]:
    return {e.failed.request: e.failed.failure for e in world.events if e.HasField("failed")}


def busy(world: World, pool: str, seconds: float) -> None:
    for worker in world.fleet.workers.values():
        if worker.pooling == pool:
            worker.busy_until = world.now + seconds


def test_embeddings_go_to_workers_with_their_pooling() -> None:
    world = mixed("", "last", "mean", "")
    for number in range(6):
        embed(world, f"last {number}")
        embed(world, f"mean {number}", "mean")
        world.submit(f"text {number}")
    for request, pooling in placed(world):
        assert request.startswith("text") or request.split()[0] == pooling
    assert len(placed(world)) == 18
    assert "" in {pooling for request, pooling in placed(world) if request.startswith("text")}


def test_workers_busy_with_embeddings_delay_no_text() -> None:
    world = mixed("", "last")
    busy(world, "last", 1.0)
    embed(world, "e")
    world.submit("text")
    assert placed(world) == [("text", "")], "at once, not in a later turn"
    world.pass_time(1.0)
    assert placed(world)[1:] == [("e", "last")]


def test_text_does_not_overtake_an_embedding_that_can_begin() -> None:
    world = mixed("last")
    busy(world, "last", 1.0)
    embed(world, "e")
    busy(world, "last", 0.0)
    world.submit("text")
    world.pass_time(0.1)
    assert [request for request, _ in placed(world)] == ["e", "text"]


def test_an_embedding_waits_for_a_worker_that_returns() -> None:
    world = mixed("", "last")
    (_, lost) = world.fleet.workers.values()
    embed(world, "e")
    world.leave(lost)
    world.pass_time(1.0)
    assert [request for request, _ in placed(world)] == ["e"], "the other worker cannot embed"
    world.join(DECODE, pool="last")
    assert placed(world)[1:] == [("e", "last")]
    embed(world, "never", "mean")
    world.pass_time(1.0)
    world.pass_time(COMPATIBLE_WORKER_WAIT_S + 1.0)
    failed = failures(world)["never"]
    assert failed.code == pb.UNAVAILABLE
    assert "by pooling 'mean'" in failed.message


ONLY_POOL: list[dict[str, Any]] = [{"pooling": "mean"}, {"scores_pairs": True}]


def test_text_goes_to_workers_that_generate() -> None:
    world = mixed()
    for card in ONLY_POOL:
        world.join(DECODE, **card)
    both = world.join(DECODE, pool="mean")
    for number in range(3):
        world.submit(f"text {number}")
    embed(world, "s", "score")
    texts = [w for w, admit in world.commands("admit") if admit.start.request.startswith("text")]
    assert texts == [both] * 3
    assert placed(world)[-1] == ("s", "score")
    world.leave(both)
    world.submit("waits")
    world.join(DECODE, pool="mean")
    assert placed(world)[-1] == ("waits", "mean")


def test_text_is_refused_if_no_worker_ever_generated() -> None:
    world = mixed()
    world.now = 0.0  # start of the router
    world.join(DECODE, pooling="mean")
    world.submit("waits")
    world.pass_time(YOUNG_S)
    world.submit("refused")
    assert failures(world)["refused"].code == pb.INVALID_ARGUMENT
    assert failures(world)["refused"].param == "model"
    assert "waits" not in failures(world), "a worker that generates may still be joining"
    world.pass_time(COMPATIBLE_WORKER_WAIT_S + 1.0)
    assert failures(world)["waits"].code == pb.UNAVAILABLE
    assert "that generates text" in failures(world)["waits"].message
    sharded = mixed()
    sharded.join(DECODE, {"join_routers": 2}, pooling="mean")
    sharded.submit("elsewhere")
    sharded.pass_time(0.1)
    sharded.pass_time(2.0)
    assert "elsewhere" in {e.failed.request for e in sharded.events if e.failed.elsewhere}


def test_an_earlier_gateway_names_no_pooling() -> None:
    world = mixed()
    world.join(DECODE, scores_pairs=True)
    world.join(DECODE, pooling="mean")
    for number in range(4):
        embed(world, f"e{number}", "")
    assert {pooling for _, pooling in placed(world)} == {"mean"}
    assert len(placed(world)) == 4


def test_a_worker_that_refuses_a_request_is_not_sent_it_all_the_time() -> None:
    world = mixed("last")
    embed(world, "e")
    for number in range(1, 6):
        assert len(placed(world)) == number
        worker, admit = world.commands("admit")[-1]
        event = DecodeEvent(busy=Busy(attempt=admit.attempt))
        world.dispatcher.on_decode(worker, event, world.now)
        world.pass_time(BUSY_S / 2)
        assert len(placed(world)) == number
        world.pass_time(BUSY_S)


def test_pooling_of_all_tokens_counts_no_cached_tokens() -> None:
    for pooling, cached in (("last", 32), ("score", 32), ("mean", 0)):
        world = mixed()
        card = {"scores_pairs": True} if pooling == "score" else {"pool": pooling}
        for _ in range(2):
            world.join(DECODE, **card)
        has_prefix, idle = world.fleet.workers.values()
        ids = list(range(40))
        facts = FactsOfWorkers(ids, b"e", {}, PrefixIndex(1024), PromisedChains(), world.now)
        has_prefix.prefixes.apply(PrefixEvents(added=facts.chain(has_prefix)))
        has_prefix.report(Load(running=2))
        pool, placer = WorkerPool("m", "", pooling), world.dispatcher.placer
        embed(world, "e", pooling)
        ((worker, _),) = world.commands("admit")
        assert worker is (has_prefix if cached else idle)
        hosts = {has_prefix.host, idle.host}
        picked = placer.pick(PickQuery(pool, ids, b"e", hosts), world.now)
        assert {one.host: one.cached_tokens for one in picked}[has_prefix.host] == cached


async def test_the_card_says_that_some_workers_embed(make_cluster: Any) -> None:
    core = (await make_cluster()).router.core
    found = []
    for number, pool in enumerate(("", "mean", "last", "")):
        card = pb.ModelCard(**CARD, pool=pool, context_len=number, hidden_size=number)
        hello = WorkerHello(
            role=DECODE, incarnation=bytes([number]) * 16, address=f"10.0.0.1:{number + 1}"
        )
        hello.card.CopyFrom(card)
        core.fleet.join(hello, asyncio.get_running_loop().time())
        found += [(one.pool, one.hidden_size, one.context_len) for one in core.models()]
    # Only what concerns embeddings is of the worker that embeds.
    assert found == [("", 0, 0), ("mean", 1, 0), ("last", 2, 0), ("last", 2, 0)]
