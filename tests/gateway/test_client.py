"""RouterClient over real gRPC against a scripted Router servicer."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from cluster_secret import ACCESS
from eventually import LIMIT_S, eventually

from pdserve.gateway.router_client import client as client_module
from pdserve.gateway.router_client.client import RouterClient
from pdserve.protos import common_pb2 as pb
from pdserve.protos import common_pb2_grpc, router_pb2, router_pb2_grpc
from pdserve.services.host.auth.secret import SecretAccess
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.rpc.fragments import IdsCollector
from pdserve.services.host.server import GrpcHost

pytestmark = pytest.mark.anyio
BLOB = b"x" * 500_000
Event = router_pb2.RequestEvent


class Router(router_pb2_grpc.RouterServicer, common_pb2_grpc.BlobsServicer):
    """Says `count` tokens to each request from where it stands; can hang up in between."""

    def __init__(self) -> None:
        self.starts: list[pb.Start] = []
        self.cancels: asyncio.Queue[router_pb2.Cancel] = asyncio.Queue()
        self.hang_up_after: int | None = None  # tokens of the next session
        self.silent = False
        self.hangs = False  # when it is asked for models, the fleet or a blob
        self.num_hanging = 0
        self.num_lists = 0  # it was asked for models
        self.refuses = False  # new requests
        self.hold_after: int | None = None  # tokens, once: then nothing more on that session
        self.hellos: list[bytes] = []
        self.blob_calls = 0
        self.wrong_blob = False

    async def Session(self, requests, context):
        ids = IdsCollector()
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "hello":
                self.hellos.append(message.hello.boot)
            elif kind == "ids_part":
                ids.add(message.ids_part)
            elif kind == "cancel":
                await self.cancels.put(message.cancel)
            elif kind == "start":
                start = message.start
                whole = ids.take(start.request, start.prompt_ids)
                del start.prompt_ids[:]
                start.prompt_ids.extend(whole)
                self.starts.append(start)
                if self.silent:
                    continue
                async for event in self._answer(start):
                    yield router_pb2.RouterMessage(events=[event])
                if self.hang_up_after is not None:
                    self.hang_up_after = None
                    return

    async def _answer(self, start):
        if self.refuses:
            failure = pb.Failure(code=pb.UNAVAILABLE, message="shutting down")
            failed = pb.Failed(request=start.request, epoch=start.epoch, failure=failure)
            yield Event(failed=failed)
            return
        placement = pb.Placement(attempt=bytes([start.epoch]) * 16, decode_address="d:1")
        yield Event(
            placed=router_pb2.Placed(request=start.request, epoch=start.epoch, placement=placement)
        )
        have = len(start.choices[0].generated_ids) if start.choices else 0
        for position in range(max(0, have - 1), 6):  # one token again: it must not count twice
            if position - have == self.hang_up_after:
                return
            if position - have == self.hold_after:
                self.hold_after = None
                await asyncio.Event().wait()
            yield Event(
                tokens=pb.Tokens(
                    request=start.request, epoch=start.epoch, position=position,
                    ids=[100 + position], finish=pb.LENGTH if position == 5 else 0,
                )
            )  # fmt: skip
        yield Event(finished=pb.Finished(request=start.request, epoch=start.epoch))

    async def _hang(self):
        if self.hangs:
            self.num_hanging += 1
            await asyncio.Event().wait()

    async def ListModels(self, request, context):
        self.num_lists += 1
        await self._hang()
        return router_pb2.ListModelsResponse(models=[pb.ModelCard(name="tiny")])

    async def GetFleet(self, request, context):
        await self._hang()
        return router_pb2.FleetView(prefill_local=7)

    async def GetBlob(self, request, context):
        await self._hang()
        self.blob_calls += 1
        data = b"other" if self.wrong_blob else BLOB
        for at in range(0, len(data), 190 << 10):
            yield pb.BlobChunk(data=data[at : at + (190 << 10)])


class Served:
    """A router process in miniature: start, stop, start again on the same port."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.port = 0

    async def start(self) -> str:
        self.host = GrpcHost(ACCESS)
        router_pb2_grpc.add_RouterServicer_to_server(self.router, self.host.server)
        common_pb2_grpc.add_BlobsServicer_to_server(self.router, self.host.server)
        self.port = self.host.listen(f"127.0.0.1:{self.port}")
        await self.host.start()
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self.host.stop(0)


@pytest.fixture
async def served(anyio_backend) -> AsyncIterator[Served]:
    served = Served(Router())
    await served.start()
    yield served
    await served.stop()


@pytest.fixture
async def another(anyio_backend) -> AsyncIterator[Served]:
    another = Served(Router())
    await another.start()
    yield another
    await another.stop()


@pytest.fixture
async def client(served: Served) -> AsyncIterator[RouterClient]:
    client = RouterClient([f"127.0.0.1:{served.port}"], ACCESS, b"g" * 16)
    await client.start()
    yield client
    await client.close()


def start(request: str = "r", **fields) -> pb.Start:
    values = {"prompt_ids": [1, 2, 3], "remaining_ms": 60_000, "queue_remaining_ms": 9_000}
    return pb.Start(request=request, model="tiny", **(values | fields))


async def ids_of(client: RouterClient, asked: pb.Start) -> tuple[list[int], Event]:
    ids: list[int] = []
    last = Event()
    async for event in client.open(asked):
        ids += event.tokens.ids
        last = event
    return ids, last


async def connected(client: RouterClient) -> None:
    await eventually(lambda: client.num_connected)


async def test_a_request_from_start_to_end(client, served):
    ids, last = await ids_of(client, start())
    assert ids == list(range(100, 106))
    assert last.WhichOneof("event") == "finished"
    assert served.router.hellos == [b"g" * 16]
    assert served.router.cancels.empty()


async def test_long_prompts_travel_in_parts(client, served):
    prompt = list(range(100_000))
    await ids_of(client, start(prompt_ids=prompt))
    assert list(served.router.starts[0].prompt_ids) == prompt


@pytest.mark.parametrize("after", [0, 1, 4])
async def test_a_lost_session_is_continued(client, served, after):
    served.router.hang_up_after = after
    asked = start(seed=5)
    ids, last = await ids_of(client, asked)
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
    """Whichever has the request hangs up; it goes on at once, not necessarily elsewhere."""
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


async def test_a_router_that_comes_later_gets_requests(served, another, monkeypatch):
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.02)
    addresses = [f"127.0.0.1:{served.port}"]
    monkeypatch.setattr(client_module, "resolve", lambda name: list(addresses))
    client = RouterClient(["routers:1"], ACCESS, b"g" * 16)
    await client.start()
    await ids_of(client, start("first"))
    addresses.append(f"127.0.0.1:{another.port}")
    await eventually(lambda: client.num_connected == 2)
    for number in range(10):
        await ids_of(client, start(f"r{number}"))
    await client.close()
    assert len(another.router.starts) >= 4  # the other one takes at most 1.1 * 11 / 2, rounded up


async def test_a_name_that_leads_nowhere_yet(served, another, monkeypatch, caplog):
    """Once it does, each router has one session: more would be more than its share."""
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.02)
    name = f"localhost:{served.port}"  # gRPC itself would find an address for it
    addresses: list[str] = []
    asked: list[str] = []

    def resolve(name: str) -> list[str]:
        asked.append(name)
        return list(addresses)

    monkeypatch.setattr(client_module, "resolve", resolve)
    client = RouterClient([name], ACCESS, b"g" * 16)
    await client.start()
    try:
        await eventually(lambda: len(asked) > 3)
        assert client.num_connected == 0
        assert caplog.text.count(f"router {name} has no address; trying again") == 1
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
    asked: list[str] = []

    def resolve(name: str) -> list[str]:
        asked.append(name)
        return addresses

    monkeypatch.setattr(client_module, "resolve", resolve)
    client = RouterClient(["routers:1"], ACCESS, b"g" * 16)
    await client.start()
    try:
        served.router.silent = other.router.silent = True
        waiting = asyncio.create_task(ids_of(client, start()))
        await eventually(lambda: served.router.starts or other.router.starts)
        (gone,) = [address for address, one in replicas.items() if one.router.starts]
        addresses.remove(gone)  # as its pod is
        (left,) = [replicas[address] for address in addresses]
        left.router.silent = False
        await replicas[gone].stop()
        ids, _ = await asyncio.wait_for(waiting, LIMIT_S)
    finally:
        await client.close()
        await other.stop()
    assert ids == list(range(100, 106))
    assert len(left.router.starts) == 1
    assert set(asked) == {"routers:1"}


class SlowToClose:
    """Access whose channels to one address close only when they are told."""

    def __init__(self) -> None:
        self.address = ""
        self.closing = asyncio.Event()  # one is
        self.cut_off = False  # whoever closed it was cancelled

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


async def test_a_session_that_is_given_up_while_it_closes_loses_no_request(
    served, another, monkeypatch
):
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.02)
    replicas = {f"127.0.0.1:{one.port}": one for one in (served, another)}
    addresses = list(replicas)
    monkeypatch.setattr(client_module, "resolve", lambda name: list(addresses))
    access = SlowToClose()
    client = RouterClient(["routers:1"], access, b"g" * 16)
    await client.start()
    try:
        await eventually(lambda: client.num_connected == 2)
        served.router.silent = another.router.silent = True
        waiting = asyncio.create_task(ids_of(client, start()))
        await eventually(lambda: served.router.starts or another.router.starts)
        (access.address,) = [address for address, one in replicas.items() if one.router.starts]
        addresses.remove(access.address)  # as at a drain
        (left,) = [replicas[address] for address in addresses]
        left.router.silent = False
        await replicas[access.address].stop()
        ids, _ = await asyncio.wait_for(waiting, LIMIT_S)
        assert ids == list(range(100, 106))
        assert access.closing.is_set()
        await eventually(lambda: access.cut_off)
    finally:
        await client.close()


async def test_names_that_lead_nowhere_fail_requests_after_the_grace(anyio_backend, monkeypatch):
    monkeypatch.setattr(client_module, "GRACE_S", 0.05)
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.02)
    monkeypatch.setattr(client_module, "resolve", lambda name: [])
    client = RouterClient(["routers:1"], ACCESS, b"g" * 16)
    await client.start()
    try:
        _, last = await asyncio.wait_for(ids_of(client, start()), LIMIT_S)
    finally:
        await client.close()
    assert last.failed.failure.code == pb.UNAVAILABLE
    assert "no router can be reached" in last.failed.failure.message


async def test_a_request_that_ran_waits_for_a_router_until_its_deadline(
    client, served, monkeypatch
):
    monkeypatch.setattr(client_module, "GRACE_S", 0.05)
    monkeypatch.setattr(client_module, "LATE_S", 0.1)
    served.router.hold_after = 2
    events = client.open(start("ran"))
    got = [await anext(events) for _ in range(3)]
    await served.stop()
    _, never = await ids_of(client, start("new"))
    assert never.failed.failure.code == pb.UNAVAILABLE, "the grace is over"
    await served.start()
    got += [event async for event in events]
    assert [i for event in got for i in event.tokens.ids] == list(range(100, 106))
    served.router.hold_after = 2
    short = client.open(start("short", remaining_ms=1500))
    got = [await anext(short) for _ in range(3)]
    await served.stop()
    got += [event async for event in short]
    assert got[-1].failed.failure.code == pb.DEADLINE_EXCEEDED


async def test_leaving_cancels(client, served):
    served.router.silent = True
    async with aclosing(client.open(start())) as events:
        waiting = asyncio.ensure_future(anext(events))
        await eventually(lambda: served.router.starts)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    cancel = await asyncio.wait_for(served.router.cancels.get(), LIMIT_S)
    assert (cancel.request, list(cancel.choices)) == ("r", [])


async def test_single_choices_are_cancelled_and_stay_so(client, served):
    served.router.silent = True
    asked = start(params=pb.SamplingParams(n=2))
    waiting = asyncio.create_task(ids_of(client, asked))
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


async def test_closing_fails_what_is_open(client, served):
    served.router.silent = True
    waiting = asyncio.create_task(ids_of(client, start()))
    await eventually(lambda: served.router.starts)
    await client.close()
    _, last = await waiting
    assert last.failed.failure.code == pb.UNAVAILABLE


async def test_models_fleet_and_blobs(client, served):
    await connected(client)
    assert [card.name for card in await client.models()] == ["tiny"]
    assert (await client.fleet()).prefill_local == 7
    digest = hashlib.sha256(BLOB).hexdigest()
    assert await client.blob(digest) == BLOB
    assert await client.blob(digest) == BLOB
    assert served.router.blob_calls == 1
    served.router.wrong_blob = True
    with pytest.raises(ServiceError, match="digest"):
        await client.blob("00" * 32)
    await served.stop()
    assert [card.name for card in await client.models()] == ["tiny"]  # remembered


async def test_a_router_that_hangs_holds_up_no_list_of_models(served, another, monkeypatch):
    """Nor does it make those of others old."""
    monkeypatch.setattr("pdserve.gateway.router_client.model_files.LIST_S", 10 * LIMIT_S)
    addresses = [f"127.0.0.1:{one.port}" for one in (served, another)]
    for hanging in (served, another):
        client = RouterClient(addresses, ACCESS, b"g" * 16)
        await client.start()
        await eventually(lambda client=client: client.num_connected == 2)
        hanging.router.hangs = True
        async with asyncio.timeout(LIMIT_S):
            assert [card.name for card in await client.models()] == ["tiny"]
        num_asked = served.router.num_lists + another.router.num_lists
        assert [card.name for card in await client.models()] == ["tiny"]
        assert served.router.num_lists + another.router.num_lists == num_asked
        monkeypatch.setattr("pdserve.gateway.router_client.model_files.MODELS_AGE_S", 0.0)
        served.router.hangs = another.router.hangs = True
        async with asyncio.timeout(LIMIT_S):
            assert [card.name for card in await client.models()] == ["tiny"], "remembered"
        served.router.hangs = another.router.hangs = False
        await client.close()
        monkeypatch.setattr("pdserve.gateway.router_client.model_files.MODELS_AGE_S", 1.0)


async def test_a_blob_comes_from_any_router(served, another):
    addresses = [f"127.0.0.1:{one.port}" for one in (served, another)]
    digest = hashlib.sha256(BLOB).hexdigest()
    for wrong in (served, another):
        client = RouterClient(addresses, ACCESS, b"g" * 16)
        await client.start()
        await eventually(lambda client=client: client.num_connected == 2)
        wrong.router.wrong_blob = True
        assert await client.blob(digest) == BLOB
        wrong.router.wrong_blob = False
        await client.close()


@pytest.mark.parametrize("asked", ["models", "fleet", "blob"])
async def test_what_is_asked_of_a_router_that_is_lost_meanwhile_fails(client, served, asked):
    """gRPC cancels the task that waits; whoever asked has not given up, though."""
    await connected(client)
    served.router.hangs = True
    calls = {"models": client.models, "fleet": client.fleet, "blob": lambda: client.blob("00" * 32)}
    waiting = asyncio.create_task(calls[asked]())
    await eventually(lambda: served.router.num_hanging)
    served.router.hang_up_after = 0  # the session ends, and with it the connection
    ids, _ = await ids_of(client, start())
    assert ids == list(range(100, 106))
    await asyncio.wait([waiting], timeout=LIMIT_S)
    assert not waiting.cancelled()
    error = waiting.exception()
    assert isinstance(error, ServiceError)
    assert error.code == pb.UNAVAILABLE


async def test_whoever_asks_a_router_can_give_up(client, served):
    await connected(client)
    served.router.hangs = True
    waiting = asyncio.create_task(client.fleet())
    await eventually(lambda: served.router.num_hanging)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_an_id_in_use_is_refused(client, served):
    served.router.silent = True
    waiting = asyncio.create_task(ids_of(client, start()))
    await eventually(lambda: served.router.starts)
    with pytest.raises(ServiceError, match="in use"):
        await ids_of(client, start())
    waiting.cancel()


async def test_a_router_that_takes_nothing_new_is_left_for_the_next(served, another):
    served.router.refuses = another.router.refuses = True
    routers = [f"127.0.0.1:{served.port}", f"127.0.0.1:{another.port}"]
    client = RouterClient(routers, ACCESS, b"g" * 16)
    await client.start()
    await eventually(lambda: served.router.hellos and another.router.hellos)
    try:
        _, last = await asyncio.wait_for(ids_of(client, start()), LIMIT_S)
        assert last.failed.failure.code == pb.UNAVAILABLE  # both have said so
        assert [len(s.router.starts) for s in (served, another)] == [1, 1]
        another.router.refuses = False
        ids, last = await asyncio.wait_for(ids_of(client, start()), LIMIT_S)
        assert last.WhichOneof("event") == "finished"
        assert ids
    finally:
        await client.close()
