"""A gateway with sharded routers, where each worker joins some of them: scripted, over real
gRPC."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from fakes.scripted_router import Router, Served, ids_of, start
from systems.cluster_secret import ACCESS
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.router_client import RouterClient, model_files
from pdserve.gateway.router_client import client as client_module
from pdserve.gateway.router_client.model_files import merged
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos.router_pb2 import FleetView, WorkerView
from pdserve.services.common.discovery import rendezvous_order

pytestmark = pytest.mark.anyio
ELSEWHERE = pb.Failed(failure=pb.Failure(code=pb.UNAVAILABLE, message="no worker"), elsewhere=True)
NOT_SERVED = pb.Failed(failure=pb.Failure(code=pb.MODEL_NOT_FOUND, message="not served"))


class Sharded:
    """Routers by address, and a client of all."""

    def __init__(self, routers: dict[str, Served], client: RouterClient) -> None:
        self.routers, self.client = routers, client

    def __getitem__(self, address: str) -> Router:
        return self.routers[address].router

    @property
    def started(self) -> list[str]:
        return [address for address in self.routers if self[address].starts]

    async def ask(self, request: str = "r", **fields):
        return await asyncio.wait_for(ids_of(self.client, start(request, **fields)), LIMIT_S)


@pytest.fixture
async def sharded(anyio_backend, monkeypatch) -> AsyncIterator[Sharded]:
    """Five routers; every worker joins two."""
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.05)
    monkeypatch.setattr(model_files, "MODELS_AGE_S", 0.0)
    monkeypatch.setattr(model_files, "OLDEST_S", LIMIT_S)
    monkeypatch.setattr(model_files, "REST_S", LIMIT_S)
    routers = {}
    for _ in range(5):
        served = Served(Router())
        served.router.join_routers = 2
        routers[await served.start()] = served
    client = RouterClient(list(routers), ACCESS, b"g" * 16)
    await client.start()
    await eventually(lambda: client.num_connected == len(routers))
    await client.models()  # as a gateway does for every request
    yield Sharded(routers, client)
    await client.close()
    for served in routers.values():
        await served.stop()


async def held_after_three(sharded):
    """A request that a router holds after three tokens: the incarnation of its worker, the client
    task, the router, and the other routers in the worker's order."""
    incarnation = os.urandom(16)
    for address in sharded.routers:
        sharded[address].decode_incarnation = incarnation
        sharded[address].hold_after = 3
    request = asyncio.create_task(sharded.ask())
    (first,) = await eventually(lambda: sharded.started)
    await eventually(lambda: sharded[first].hold_after is None)
    others = [a for a in rendezvous_order(incarnation, sharded.routers) if a != first]
    for address in others:
        sharded[address].hold_after = None
    return incarnation, request, first, others


@pytest.mark.parametrize("attempt", range(3))
async def test_a_placed_request_goes_to_the_routers_of_its_worker(sharded, attempt):
    """Try the first live router of the worker, then, if it refuses, the second."""
    incarnation, request, first, order = await held_after_three(sharded)
    sharded[order[0]].refuses = True
    await sharded.routers[first].stop()
    ids, last = await request
    assert last.WhichOneof("event") == "finished"
    assert ids == list(range(100, 106))
    assert sorted(sharded.started) == sorted([first, *order[:2]])
    again = sharded[order[1]].starts[0]
    assert again.placement.decode_incarnation == incarnation
    assert again.epoch == 2


async def test_a_worker_that_joined_all_routers_has_no_preferred_ones(sharded):
    """Route by conversation, as without sharding."""
    for address in sharded.routers:
        sharded[address].join_routers = 0
        sharded[address].decode_incarnation = os.urandom(16)
        sharded[address].hold_after = 3
    request = asyncio.create_task(sharded.ask())
    (first,) = await eventually(lambda: sharded.started)
    await eventually(lambda: sharded[first].hold_after is None)
    key = client_module.conversation(start())
    own, *others = rendezvous_order(key, sharded.routers)
    assert first == own
    for address in others:
        sharded[address].hold_after = None
    await sharded.routers[first].stop()
    await request
    assert sorted(sharded.started) == sorted([first, others[0]])


async def test_models_of_all_routers_are_listed_and_requests_follow_them(sharded):
    there = list(sharded.routers)[3]
    sharded[there].models = ["tiny", "rare"]
    sharded[list(sharded.routers)[1]].models = []
    assert [card.name for card in await sharded.client.models()] == ["rare", "tiny"]
    for number in range(6):
        await sharded.ask(f"r{number}", prompt_ids=[number], model="rare")
    assert sharded.started == [there]
    sharded[there].models = ["tiny"]
    assert [card.name for card in await sharded.client.models()] == ["tiny"]


async def test_a_model_embeds_if_workers_at_one_router_do(sharded):
    for address in sharded.routers:
        sharded[address].pool = "mean"
        assert [card.pool for card in await sharded.client.models()] == ["mean"]
        sharded[address].pool = ""


async def test_routers_with_different_pooling(sharded):
    """Every gateway takes the same, whichever router it prefers."""
    for own in sharded.routers:
        for address in sharded.routers:
            sharded[address].pool = "last" if address == own else "mean"
        assert [card.pool for card in await sharded.client.models()] == ["last"]


async def test_the_model_list_of_a_hanging_router_expires(sharded, monkeypatch):
    there = list(sharded.routers)[3]
    sharded[there].models = ["rare"]
    assert [card.name for card in await sharded.client.models()] == ["rare", "tiny"]
    monkeypatch.setattr(model_files, "OLDEST_S", 0.05)
    monkeypatch.setattr(model_files, "REST_S", 0.2)
    sharded[there].hangs = True
    assert [card.name for card in await sharded.client.models()] == ["rare", "tiny"]
    await eventually(lambda: sharded[there].num_hanging)
    monkeypatch.setattr(model_files, "OLD_S", 0.0)
    assert [card.name for card in await sharded.client.models()] == ["tiny"]


@pytest.mark.parametrize("lacks", [ELSEWHERE, NOT_SERVED])
async def test_a_router_without_a_worker_is_skipped(sharded, lacks):
    own, *_, has = rendezvous_order(client_module.conversation(start()), sharded.routers)
    for address in sharded.routers:
        sharded[address].lacks = None if address == has else lacks
    _, last = await sharded.ask()
    assert last.WhichOneof("event") == "finished"
    assert {own, has} <= set(sharded.started)


async def test_a_model_that_no_router_serves(sharded):
    for address in sharded.routers:
        sharded[address].lacks = NOT_SERVED
    _, last = await sharded.ask()
    assert last.failed.failure.code == pb.MODEL_NOT_FOUND
    assert [len(sharded[address].starts) for address in sharded.routers] == [1] * 5


async def test_a_request_refused_by_all_is_retried(sharded):
    for address in sharded.routers:
        sharded[address].lacks = ELSEWHERE
    request = asyncio.create_task(sharded.ask())
    await eventually(lambda: all(len(sharded[a].starts) > 1 for a in sharded.routers))
    assert not request.done()
    sharded[next(iter(sharded.routers))].lacks = None
    ids, last = await request
    assert last.WhichOneof("event") == "finished"
    assert ids == list(range(100, 106))
    assert all(start.queue_remaining_ms for start in sharded[sharded.started[0]].starts)


async def test_a_request_refused_by_all_fails_in_the_end(sharded, monkeypatch):
    monkeypatch.setattr(client_module, "GIVEN_BACK_S", 0.3)
    for address in sharded.routers:
        sharded[address].lacks = ELSEWHERE
    _, last = await sharded.ask()
    assert last.failed.failure.code == pb.UNAVAILABLE
    assert all(len(sharded[address].starts) > 1 for address in sharded.routers)


def view(*workers: tuple[bytes, str, float], retries: int = 0, join_routers: int = 2) -> FleetView:
    return FleetView(
        retries=retries,
        workers=[
            WorkerView(
                hello=fleet_pb2.WorkerHello(incarnation=incarnation, join_routers=join_routers),
                state=state,
                silent_s=silent_s,
            )
            for incarnation, state, silent_s in workers
        ],
    )


def test_a_merged_view_has_each_worker_once() -> None:
    """Prefer the router that the worker stays with, then the one that heard from it last."""
    whole = merged(
        [
            view((b"1", "leaving", 0.0), (b"2", "suspect", 1.5), retries=3),
            view((b"1", "live", 0.3), (b"3", "leaving", 0.1), retries=4),
            view((b"2", "live", 0.1), (b"1", "suspect", 1.2)),
        ]
    )
    states = {worker.hello.incarnation: (worker.state, worker.silent_s) for worker in whole.workers}
    assert states == {b"1": ("live", 0.3), b"2": ("live", 0.1), b"3": ("leaving", 0.1)}
    assert whole.retries == 7


@pytest.mark.parametrize(("join_routers", "routers"), [(2, 5), (0, 1)])
async def test_all_routers_are_queried_for_the_fleet_only_if_sharded(
    sharded, join_routers, routers
):
    for number, address in enumerate(sharded.routers):
        incarnations = bytes([number]), bytes([number + 1])
        workers = view(
            *((incarnation, "live", 0.0) for incarnation in incarnations), join_routers=join_routers
        )
        sharded[address].workers = list(workers.workers)
        sharded[address].join_routers = join_routers
    await sharded.client.models()
    whole = await sharded.client.fleet()
    assert (
        len({worker.hello.incarnation for worker in whole.workers})
        == len(whole.workers)
        == routers + 1
    )
    assert whole.prefill_local == 7 * routers


async def test_the_fleet_without_an_unresponsive_router(sharded, monkeypatch):
    monkeypatch.setattr(model_files, "LIST_S", 0.2)
    for number, address in enumerate(sharded.routers):
        sharded[address].workers = list(view((bytes([number]), "live", 0.0)).workers)
    for address in sharded.routers:
        sharded[address].hangs = True
        assert len((await sharded.client.fleet()).workers) == 4
        sharded[address].hangs = False
        assert sharded[address].num_hanging


async def test_an_unknown_model_on_one_router_does_not_fail_a_request_refused_by_another(sharded):
    addresses = list(sharded.routers)
    for address in addresses:
        sharded[address].lacks = NOT_SERVED
    sharded[addresses[2]].lacks = ELSEWHERE
    request = asyncio.create_task(sharded.ask())
    await eventually(lambda: all(len(sharded[a].starts) > 1 for a in addresses))
    assert not request.done()
    assert sharded[addresses[2]].starts[-1].given_back
    sharded[addresses[4]].lacks = None
    ids, last = await request
    assert last.WhichOneof("event") == "finished"
    assert ids == list(range(100, 106))


async def test_the_crash_count_is_sent_to_the_next_router(sharded):
    for address in sharded.routers:
        sharded[address].lacks = pb.Failed(crash_count=1)
        sharded[address].lacks.MergeFrom(ELSEWHERE)
    request = asyncio.create_task(sharded.ask())
    await eventually(lambda: len(sharded.started) == 5)
    for address in sharded.routers:
        sharded[address].lacks = None
    await request
    counts = sorted(start.crash_count for a in sharded.routers for start in sharded[a].starts)
    assert counts[0] == 0
    assert set(counts[1:]) == {1}


async def test_a_request_whose_worker_is_unknown_starts_over(sharded):
    incarnation, request, first, others = await held_after_three(sharded)
    for address in others[:2]:
        sharded[address].lacks = ELSEWHERE
    await sharded.routers[first].stop()
    ids, last = await request
    assert last.WhichOneof("event") == "finished"
    assert ids == list(range(100, 106))
    assert all(sharded[a].starts[0].placement.decode_incarnation == incarnation for a in others[:2])
    (third,) = [a for a in others[2:] if sharded[a].starts]
    assert not sharded[third].starts[0].HasField("placement")
    assert sharded[third].starts[0].choices[0].generated_ids == [100, 101, 102]


async def test_a_router_that_knows_all_workers_does_not_hide_models_of_others(sharded):
    """Cover workers that join all routers next to workers that join some."""
    first, *others = sharded.routers
    sharded[first].join_routers = 0
    sharded[others[3]].models = ["rare"]
    for _ in range(3):
        assert [card.name for card in await sharded.client.models()] == ["rare", "tiny"]


async def test_in_a_full_mesh_the_answer_of_one_router_is_final(sharded):
    for address in sharded.routers:
        sharded[address].join_routers = 0
        sharded[address].lacks = NOT_SERVED
    await sharded.client.models()
    _, last = await sharded.ask()
    assert last.failed.failure.code == pb.MODEL_NOT_FOUND
    assert len(sharded.started) == 1
