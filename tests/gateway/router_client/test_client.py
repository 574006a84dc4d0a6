"""RouterClient over real gRPC: requests, sessions, and routers that start and stop."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest
from fakes.scripted_router import Router, Served, connected, ids_of, start
from systems.cluster_secret import ACCESS
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.router_client import RouterClient
from pdserve.gateway.router_client import client as client_module
from pdserve.protos import common_pb2 as pb
from pdserve.protos.router_pb2 import PickRequest
from pdserve.services.common import discovery
from pdserve.services.common.auth.access import SecretAccess
from pdserve.services.common.errors import ServiceError

pytestmark = pytest.mark.anyio


async def test_a_request_from_start_to_end(client, served):
    ids, last = await ids_of(client, start())
    assert ids == list(range(100, 106))
    assert last.WhichOneof("event") == "finished"
    assert served.router.hellos == [b"g" * 16]
    assert served.router.cancels.empty()


async def test_long_prompts_are_sent_in_parts(client, served):
    prompt = list(range(100_000))
    await ids_of(client, start(prompt_ids=prompt))
    assert list(served.router.starts[0].prompt_ids) == prompt


@pytest.mark.parametrize("after", [0, 1, 4])
async def test_a_lost_session_is_continued(client, served, after):
    served.router.hang_up_after = after
    request = start(seed=5)
    ids, last = await ids_of(client, request)
    assert ids == list(range(100, 106))
    assert last.WhichOneof("event") == "finished"
    first, second = served.router.starts
    assert (first.epoch, second.epoch) == (0, 1)
    generated = list(second.choices[0].generated_ids) if after else []
    assert generated == list(range(100, 100 + after))
    assert second.placement.attempt == b"\0" * 16
    assert second.placement.decode_address == "d:1"
    assert second.seed == 5
    assert 0 < second.remaining_ms < 60_000
    assert (second.queue_remaining_ms == 0) == bool(after)


async def test_another_router_takes_over(served, another):
    """Disconnect the router that has the request; the request continues at once, possibly on the
    same router."""
    client = RouterClient(
        [f"127.0.0.1:{served.port}", f"127.0.0.1:{another.port}"], ACCESS, b"g" * 16
    )
    await client.start()
    await eventually(lambda: served.router.hellos and another.router.hellos)
    for one in (served, another):
        one.router.silent = True
    waiting = asyncio.create_task(ids_of(client, start()))
    await eventually(lambda: served.router.starts or another.router.starts)
    first, second = (served, another) if served.router.starts else (another, served)
    second.router.silent = False
    await first.stop()
    ids, _ = await asyncio.wait_for(waiting, LIMIT_S)
    await client.close()
    await first.start()
    assert ids == list(range(100, 106))
    assert [len(s.router.starts) for s in (first, second)] == [1, 1]


async def test_requests_are_spread(served, another):
    client = RouterClient(
        [f"127.0.0.1:{served.port}", f"127.0.0.1:{another.port}"], ACCESS, b"g" * 16
    )
    await client.start()
    await eventually(lambda: client.num_connected == 2)
    for number in range(40):
        await ids_of(client, start(f"r{number}"))
    await client.close()
    counts = [len(s.router.starts) for s in (served, another)]
    assert sum(counts) == 40
    assert max(counts) <= 1.2 * 20


async def test_a_router_added_later_gets_requests(served, another, monkeypatch):
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.02)
    addresses = [f"127.0.0.1:{served.port}"]
    monkeypatch.setattr(discovery, "resolve", lambda name: list(addresses))
    client = RouterClient(["routers:1"], ACCESS, b"g" * 16)
    await client.start()
    await ids_of(client, start("first"))
    addresses.append(f"127.0.0.1:{another.port}")
    await eventually(lambda: client.num_connected == 2)
    for number in range(10):
        await ids_of(client, start(f"r{number}"))
    await client.close()
    # the other router takes at most 1.1 * 11 / 2, rounded up
    assert len(another.router.starts) >= 4


async def test_a_router_removed_from_the_addresses_gets_no_new_requests(
    served, another, monkeypatch
):
    """Keep its session; if no other router is left, it gets requests and picks as before."""
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.02)
    here, there = (f"127.0.0.1:{one.port}" for one in (served, another))
    addresses, looks = [here, there], []

    def resolve(name: str) -> list[str]:
        looks.append(name)
        return list(addresses)

    async def ask(first: int) -> None:
        for number in range(first, first + 20):
            await ids_of(client, start(f"r{number}", prompt_ids=[number]))
            await client.pick(PickRequest(model="tiny", prompt_ids=[number]))

    monkeypatch.setattr(discovery, "resolve", resolve)
    client = RouterClient(["routers:1"], ACCESS, b"g" * 16)
    await client.start()
    await eventually(lambda: client.num_connected == 2)
    await ask(0)
    requests = len(another.router.starts), another.router.num_picks
    assert all(requests)
    addresses.remove(there)
    seen = len(looks)
    await eventually(lambda: len(looks) > seen + 1)
    await ask(20)
    assert (len(another.router.starts), another.router.num_picks) == requests
    assert client.num_connected == 2
    await served.stop()
    await eventually(lambda: client.num_connected == 1)
    await ask(40)
    await client.close()
    assert (len(another.router.starts), another.router.num_picks) == tuple(n + 20 for n in requests)


async def test_a_name_that_does_not_resolve_yet(served, another, monkeypatch, caplog):
    """Open one session per router once the name resolves; more would exceed its share."""
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.02)
    name = f"localhost:{served.port}"  # gRPC itself would resolve it
    addresses: list[str] = []
    requests: list[str] = []

    def resolve(name: str) -> list[str]:
        requests.append(name)
        return list(addresses)

    monkeypatch.setattr(discovery, "resolve", resolve)
    client = RouterClient([name], ACCESS, b"g" * 16)
    await client.start()
    try:
        await eventually(lambda: len(requests) > 3)
        assert client.num_connected == 0
        assert caplog.text.count(f"router {name} has no address; retrying") == 1
        addresses += [f"127.0.0.1:{served.port}", f"127.0.0.1:{another.port}"]
        await eventually(lambda: client.num_connected == 2)
        await ids_of(client, start("first"))
    finally:
        await client.close()
    assert [len(s.router.hellos) for s in (served, another)] == [1, 1]


async def test_a_router_restarts_on_its_port(client, served):
    await ids_of(client, start("one"))
    served.router.silent = True
    waiting = asyncio.create_task(ids_of(client, start("two")))
    await eventually(lambda: len(served.router.starts) == 2)
    await served.stop()
    served.router.silent = False
    await served.start()
    ids, _ = await waiting
    assert ids == list(range(100, 106))


async def test_another_replica_of_the_same_name_takes_over(served, monkeypatch):
    other = Served(Router())
    replicas = {f"127.0.0.1:{served.port}": served, await other.start(): other}
    addresses = list(replicas)
    requests: list[str] = []

    def resolve(name: str) -> list[str]:
        requests.append(name)
        return addresses

    monkeypatch.setattr(discovery, "resolve", resolve)
    client = RouterClient(["routers:1"], ACCESS, b"g" * 16)
    await client.start()
    try:
        served.router.silent = other.router.silent = True
        waiting = asyncio.create_task(ids_of(client, start()))
        await eventually(lambda: served.router.starts or other.router.starts)
        (gone,) = [address for address, one in replicas.items() if one.router.starts]
        addresses.remove(gone)  # like the address of its pod
        (left,) = [replicas[address] for address in addresses]
        left.router.silent = False
        await replicas[gone].stop()
        ids, _ = await asyncio.wait_for(waiting, LIMIT_S)
    finally:
        await client.close()
        await other.stop()
    assert ids == list(range(100, 106))
    assert len(left.router.starts) == 1
    assert set(requests) == {"routers:1"}


class SlowToClose:
    """Access whose channels to one address close only when released."""

    def __init__(self) -> None:
        self.address = ""
        self.closing = asyncio.Event()  # set while a channel is closing
        self.cut_off = False  # whether the task that closed it was cancelled

    @asynccontextmanager
    async def open_channel(self, address, to):
        async with ACCESS.open_channel(address, to) as channel:
            try:
                yield channel
            finally:
                if address == self.address:
                    self.closing.set()
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        self.cut_off = True
                        raise


async def test_a_session_abandoned_while_closing_loses_no_request(served, another, monkeypatch):
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.02)
    replicas = {f"127.0.0.1:{one.port}": one for one in (served, another)}
    addresses = list(replicas)
    monkeypatch.setattr(discovery, "resolve", lambda name: list(addresses))
    access = SlowToClose()
    client = RouterClient(["routers:1"], access, b"g" * 16)
    await client.start()
    try:
        await eventually(lambda: client.num_connected == 2)
        served.router.silent = another.router.silent = True
        waiting = asyncio.create_task(ids_of(client, start()))
        await eventually(lambda: served.router.starts or another.router.starts)
        (access.address,) = [address for address, one in replicas.items() if one.router.starts]
        addresses.remove(access.address)  # as during a drain
        (left,) = [replicas[address] for address in addresses]
        left.router.silent = False
        await replicas[access.address].stop()
        ids, _ = await asyncio.wait_for(waiting, LIMIT_S)
        assert ids == list(range(100, 106))
        assert access.closing.is_set()
        await eventually(lambda: access.cut_off)
    finally:
        await client.close()


async def test_requests_fail_after_the_grace_if_no_name_resolves(anyio_backend, monkeypatch):
    monkeypatch.setattr(client_module, "GRACE_S", 0.05)
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.02)
    monkeypatch.setattr(discovery, "resolve", lambda name: [])
    client = RouterClient(["routers:1"], ACCESS, b"g" * 16)
    await client.start()
    try:
        _, last = await asyncio.wait_for(ids_of(client, start()), LIMIT_S)
    finally:
        await client.close()
    assert last.failed.failure.code == pb.UNAVAILABLE
    assert "no router can be reached" in last.failed.failure.message


async def test_a_started_request_waits_for_a_router_until_its_deadline(client, served, monkeypatch):
    monkeypatch.setattr(client_module, "GRACE_S", 0.05)
    monkeypatch.setattr(client_module, "LATE_S", 0.1)
    served.router.hold_after = 2
    events = client.open(start("ran"))
    got = [await anext(events) for _ in range(3)]
    await served.stop()
    _, never = await ids_of(client, start("new"))
    assert never.failed.failure.code == pb.UNAVAILABLE, "a request must fail after the grace"
    await served.start()
    got += [event async for event in events]
    assert [i for event in got for i in event.tokens.ids] == list(range(100, 106))
    served.router.hold_after = 2
    short = client.open(start("short", remaining_ms=1500))
    got = [await anext(short) for _ in range(3)]
    await served.stop()
    got += [event async for event in short]
    assert got[-1].failed.failure.code == pb.DEADLINE_EXCEEDED


async def test_a_disconnect_cancels(client, served):
    served.router.silent = True
    async with aclosing(client.open(start())) as events:
        waiting = asyncio.ensure_future(anext(events))
        await eventually(lambda: served.router.starts)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    cancel = await asyncio.wait_for(served.router.cancels.get(), LIMIT_S)
    assert (cancel.request, list(cancel.choices)) == ("r", [])


async def test_a_cancelled_choice_stays_cancelled(client, served):
    served.router.silent = True
    request = start(params=pb.SamplingParams(n=2))
    waiting = asyncio.create_task(ids_of(client, request))
    await eventually(lambda: served.router.starts)
    client.cancel("r", [1])
    cancel = await asyncio.wait_for(served.router.cancels.get(), LIMIT_S)
    assert list(cancel.choices) == [1]
    await served.stop()
    await served.start()
    await eventually(lambda: len(served.router.starts) == 2)
    assert [choice.finish for choice in served.router.starts[1].choices] == [0, pb.ABORTED]
    waiting.cancel()


async def test_a_router_past_the_deadline(client, served, monkeypatch):
    monkeypatch.setattr(client_module, "LATE_S", 0.05)
    await connected(client)
    served.router.silent = True
    _, last = await ids_of(client, start(remaining_ms=50))
    assert last.failed.failure.code == pb.DEADLINE_EXCEEDED
    assert (await asyncio.wait_for(served.router.cancels.get(), LIMIT_S)).request == "r"


async def test_no_router(monkeypatch, anyio_backend):
    monkeypatch.setattr(client_module, "GRACE_S", 0.1)
    client = RouterClient(["127.0.0.1:1"], ACCESS, b"g" * 16)
    await client.start()
    try:
        _, last = await ids_of(client, start())
        assert last.failed.failure.code == pb.UNAVAILABLE
        assert last.failed.failure.retry_after_ms
        for call in (client.models(), client.fleet(), client.blob("ab")):
            with pytest.raises(ServiceError) as caught:
                await call
            assert caught.value.code == pb.UNAVAILABLE
    finally:
        await client.close()


async def test_a_wrong_secret_gets_nothing(served, monkeypatch):
    monkeypatch.setattr(client_module, "GRACE_S", 0.1)
    client = RouterClient([f"127.0.0.1:{served.port}"], SecretAccess(("wrong" * 8,)), b"g" * 16)
    await client.start()
    try:
        _, last = await asyncio.wait_for(ids_of(client, start()), LIMIT_S)
    finally:
        await client.close()
    assert last.failed.failure.code == pb.UNAVAILABLE
    assert served.router.hellos == []


async def test_closing_fails_open_requests(client, served):
    served.router.silent = True
    waiting = asyncio.create_task(ids_of(client, start()))
    await eventually(lambda: served.router.starts)
    await client.close()
    _, last = await waiting
    assert last.failed.failure.code == pb.UNAVAILABLE


async def test_an_id_in_use_is_refused(client, served):
    served.router.silent = True
    waiting = asyncio.create_task(ids_of(client, start()))
    await eventually(lambda: served.router.starts)
    with pytest.raises(ServiceError, match="in use"):
        await ids_of(client, start())
    waiting.cancel()


async def test_a_refusing_router_is_skipped(served, another):
    served.router.refuses = another.router.refuses = True
    routers = [f"127.0.0.1:{served.port}", f"127.0.0.1:{another.port}"]
    client = RouterClient(routers, ACCESS, b"g" * 16)
    await client.start()
    await eventually(lambda: served.router.hellos and another.router.hellos)
    try:
        _, last = await asyncio.wait_for(ids_of(client, start()), LIMIT_S)
        assert last.failed.failure.code == pb.UNAVAILABLE  # both have refused
        assert [len(s.router.starts) for s in (served, another)] == [1, 1]
        another.router.refuses = False
        ids, last = await asyncio.wait_for(ids_of(client, start()), LIMIT_S)
        assert last.WhichOneof("event") == "finished"
        assert ids
    finally:
        await client.close()
