"""Routers of which each worker joins two of three.

A lost or returning router costs no stream a token, and models and figures are those of the whole
fleet.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from systems.eventually import eventually
from systems.sharded import K, ShardedSystem, Stream
from systems.worker_kit import expected

from pdserve.gateway.router_client import client as client_module
from pdserve.gateway.router_client import model_files
from pdserve.protos.router_pb2 import PickRequest
from pdserve.services.common import discovery
from pdserve.services.common.errors import ServiceError
from pdserve.services.worker import membership

pytestmark = pytest.mark.anyio
LONG = 200  # tokens: more than two seconds, or twenty while the system is slow


@pytest.fixture
async def system(
    anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ShardedSystem]:
    """Run three routers a, b and c; b knows no worker of the model "other"."""
    made = ShardedSystem(tmp_path, monkeypatch)
    monkeypatch.setattr(discovery, "resolve", lambda name: made.addresses)
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.1)
    monkeypatch.setattr(model_files, "MODELS_AGE_S", 0.05)
    monkeypatch.setattr(membership, "RESOLVE_S", 0.05)
    monkeypatch.setattr(membership, "ABSENT_S", 0.5)
    monkeypatch.setattr(membership, "SETTLED_S", 0.5)
    a, b, c = [await made.add_router() for _ in range(3)]
    await made.add_worker("tiny-ab", "tiny", left_out=c)
    await made.add_worker("tiny-bc", "tiny", left_out=a)
    await made.add_worker("other-ac", "other", left_out=b)
    await made.add_worker("other-ca", "other", left_out=b)
    await made.begin()
    await eventually(lambda: sum(len(made.knows(router)) for router in (a, b, c)) == 4 * K)
    await eventually(lambda: has_both_models(made))
    yield made
    await made.close()


async def has_both_models(system: ShardedSystem) -> bool:
    """Return whether the gateway knows both models."""
    try:
        return [card.name for card in await system.client.models()] == ["other", "tiny"]
    except ServiceError:
        return False


def streams(system: ShardedSystem, num: int, max_tokens: int, first: int = 0) -> list[Stream]:
    models = ("tiny", "other")
    numbers = range(first, first + num)
    return [Stream(system.client, n, models[n % 2], max_tokens) for n in numbers]


async def under_way(request: list[Stream]) -> None:
    await eventually(lambda: all(len(stream.ids) > 3 for stream in request))


async def answered(request: list[Stream], max_tokens: int) -> None:
    for stream in request:
        await stream.task
        assert stream.end.DESCRIPTOR.name == "Finished", stream.end
        assert stream.ids == expected(stream.prompt, max_tokens=max_tokens)[0]


async def test_each_worker_joins_some_routers_and_together_they_cover_the_fleet(
    system: ShardedSystem,
) -> None:
    a, b, c = system.addresses
    assert system.knows(a).keys() == {"tiny-ab", "other-ac", "other-ca"}
    assert system.knows(b).keys() == {"tiny-ab", "tiny-bc"}
    assert system.knows(c).keys() == {"tiny-bc", "other-ac", "other-ca"}
    requests = streams(system, 12, 8)
    await answered(requests, 8)
    retries = [router.core.dispatcher.num_retries for router in system.routers.values()]
    assert retries == [0, 0, 0]

    incarnations = sorted(worker.incarnation for worker in system.workers.values())
    ran = {incarnation for stream in requests for incarnation in stream.decode_incarnations}
    assert ran <= set(incarnations)
    view = await system.client.fleet()
    assert sorted(worker.hello.incarnation for worker in view.workers) == incarnations, "each once"
    assert {worker.state for worker in view.workers} == {"live"}
    assert view.prefill_local == len(requests), "by any router"


@pytest.mark.parametrize("name", ["tiny-ab", "tiny-bc", "other-ac"])
async def test_a_pick_comes_from_a_router_that_knows_a_worker_there(
    system: ShardedSystem, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hosts are one here, so the worker is made to report another."""
    host = f"host-of-{name}"
    incarnation = system.workers[name].incarnation
    for router in system.routers.values():
        known = router.core.fleet.get(incarnation)
        if known is not None:
            known.address = f"{host}:{known.address.rpartition(':')[2]}"
    model = name.partition("-")[0]
    for number in range(6):  # of several conversations
        request = PickRequest(model=model, prompt_ids=[number] * 8, hosts=[host])
        reply = await system.client.pick(request)
        assert [worker.host for worker in reply.workers] == [host]
    nowhere = await system.client.pick(PickRequest(model=model, prompt_ids=[1], hosts=["nowhere"]))
    assert nowhere.elsewhere


async def test_streams_continue_with_another_router_of_their_workers(system: ShardedSystem) -> None:
    a, b, c = system.addresses
    dispatcher = system.routers[a].core.dispatcher
    with system.slow():
        requests = streams(system, 10, LONG)
        await under_way(requests)
        num_there = dispatcher.num_running
        assert num_there > 0
        await system.kill_router(a)
        assert not any(stream.task.done() for stream in requests)
    await answered(requests, LONG)
    left = [system.routers[router].core.dispatcher for router in (b, c)]
    assert sum(one.num_adopted for one in left) == num_there, "none was computed again"
    assert [one.num_retries for one in left] == [0, 0]
    assert all(len(set(stream.decode_incarnations)) == 1 for stream in requests)
    await eventually(lambda: len(system.knows(b)) == len(system.knows(c)) == 4)


async def test_a_returning_router_gets_its_workers_and_no_stream_ends(
    system: ShardedSystem,
) -> None:
    a, b, c = system.addresses
    await system.kill_router(a)
    await eventually(lambda: len(system.knows(b)) == len(system.knows(c)) == 4)
    left = [system.routers[router].core for router in (b, c)]
    with system.slow():
        requests: list[Stream] = []
        num_asked = 0
        # Streams run by a router that their worker will leave: among ten there nearly always are
        # some.
        while not (system.uses(b) & {"other-ac", "other-ca"} or "tiny-ab" in system.uses(c)):
            for stream in requests:  # the workers run no more than these at once
                stream.task.cancel()
            await asyncio.gather(*(stream.task for stream in requests), return_exceptions=True)
            await eventually(lambda: not any(map(system.uses, (b, c))))
            requests = streams(system, 10, LONG, first=num_asked)
            num_asked += len(requests)
            await under_way(requests)
        await system.add_router(a)
        await eventually(
            lambda: any(
                system.knows(router).get(name) == "leaving"
                for router in (b, c)
                for name in system.uses(router)
            ),
            lambda: f"{[(system.knows(router), system.uses(router)) for router in (a, b, c)]}",
        )
        assert not any(stream.task.done() for stream in requests)
        view = await system.client.fleet()
        assert {w.state for w in view.workers} == {"live"}, "with the routers that they keep"
    await answered(requests, LONG)
    await eventually(lambda: sum(len(system.knows(router)) for router in (a, b, c)) == 4 * K)
    assert system.knows(b).keys() == {"tiny-ab", "tiny-bc"}
    assert system.knows(a).keys() == {"tiny-ab", "other-ac", "other-ca"}
    assert [core.dispatcher.num_retries for core in left] == [0, 0]
    assert not any(sum(core.deaths.values()) for core in left), "leaving is not dying"
    await answered(streams(system, 6, 8), 8)


async def test_a_stream_of_a_dead_worker_goes_to_a_router_that_has_another(
    system: ShardedSystem,
) -> None:
    """Its own router has no remaining worker of the model, and none will join."""
    a = system.addresses[0]
    incarnation = system.workers["tiny-ab"].incarnation
    dispatcher = system.routers[a].core.dispatcher
    with system.slow():
        requests = [Stream(system.client, number, "tiny", LONG) for number in range(12)]
        await under_way(requests)
        assert system.uses(a)
        moved = [stream for stream in requests if stream.decode_incarnations[-1] == incarnation]
        await system.kill_worker("tiny-ab")
        assert not any(stream.task.done() for stream in requests)
    await answered(requests, LONG)
    other = system.workers["tiny-bc"].incarnation
    assert all(stream.decode_incarnations[-1] == other for stream in requests)
    assert moved
    assert dispatcher.outcomes["UNAVAILABLE"] > 0, "it has given them back"
    assert not dispatcher.num_running
