"""A worker joins every router, stays joined, and its prefix state arrives whole."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from systems.cluster_secret import ACCESS
from systems.eventually import LIMIT_S, eventually

from pdserve.protos import fleet_pb2 as pb
from pdserve.protos.common_pb2 import INCOMPATIBLE_VERSION
from pdserve.protos.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server
from pdserve.services.common import discovery
from pdserve.services.common.discovery import rendezvous_order
from pdserve.services.common.errors import ServiceError, abort
from pdserve.services.common.rpc import PROTOCOL_VERSION
from pdserve.services.common.server import GrpcServer
from pdserve.services.worker import membership
from pdserve.services.worker.membership import (
    HASHES_PER_EVENT,
    HEARTBEAT_S,
    LOAD_INTERVAL_S,
    STEADY_INTERVAL_S,
    Membership,
)

pytestmark = pytest.mark.anyio


class Lease:
    def __init__(self) -> None:
        self.reports: list[tuple[float, pb.WorkerReport]] = []
        self.cut = asyncio.Event()

    def of(self, kind: str) -> list[Any]:
        return [getattr(r, kind) for _, r in self.reports if r.WhichOneof("report") == kind]

    def hashes(self) -> set[bytes]:
        """Return the hashes that the events add up to; asserts that their sequence has no gap."""
        known: set[bytes] = set()
        following = None
        for event in self.of("prefixes"):
            assert event.reset or event.sequence == following
            if event.reset:
                known.clear()
            known |= set(event.added)
            known -= set(event.removed)
            following = event.sequence + len(event.added) + len(event.removed)
        return known


class Router(FleetServicer):
    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.echoes = True
        self.protocol = PROTOCOL_VERSION
        self.refuses = False
        self.welcomed = 0.0

    async def start(self, port: int = 0) -> str:
        self.host = GrpcServer(ACCESS)
        add_FleetServicer_to_server(self, self.host.server)
        self.address = f"127.0.0.1:{self.host.listen(f'127.0.0.1:{port}')}"
        await self.host.start()
        return self.address

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.JoinReply]:
        lease = Lease()
        self.leases.append(lease)
        if self.refuses:
            await abort(context, ServiceError(INCOMPATIBLE_VERSION, "upgrade the router first"))
        self.welcomed = time.monotonic()
        yield pb.JoinReply(welcome=pb.Welcome(router_incarnation=b"r", protocol=self.protocol))
        async for report in request_iterator:
            lease.reports.append((time.monotonic(), report))
            if report.HasField("heartbeat") and self.echoes:
                yield pb.JoinReply(echo=pb.HeartbeatEcho())
            if lease.cut.is_set():
                return


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    routers: list[Router] = []
    members: list[Membership] = []

    async def build(num_routers: int = 1, join: int = 0) -> tuple[list[Router], Membership]:
        """Build a worker. `join`: the number of routers that it joins, the first by rendezvous
        hash, in whose order the routers are.
        """
        addresses = []
        for _ in range(num_routers):
            routers.append(Router())
            addresses.append(await routers[-1].start())
        hello = pb.WorkerHello(
            role=pb.DECODE, incarnation=b"b" * 16, address="127.0.0.1:9", join_routers=join
        )
        if join:
            routers.sort(
                key=lambda r: rendezvous_order(hello.incarnation, addresses).index(r.address)
            )
        steps = iter(range(1_000_000))
        members.append(Membership(hello, addresses, ACCESS, liveness=lambda: (next(steps), True)))
        return routers, members[-1]

    yield build
    for member in members:
        await asyncio.to_thread(member.close)
    for router in routers:
        await router.host.stop(0)


async def test_hello_state_load_heartbeats(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []  # requested by leases

    class Recorded(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None and not threading.current_thread().name.startswith("join"):
                pauses.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(
        membership,
        "threading",
        SimpleNamespace(Event=Recorded, Lock=threading.Lock, Thread=threading.Thread),
    )
    (router,), member = await make()
    member.prefixes([b"1" * 16, b"2" * 16], [])
    member.prefixes([], [b"1" * 16])
    member.report(pb.Load(running=1))
    member.start()
    await eventually(lambda: bool(router.leases) and len(router.leases[0].of("heartbeat")) >= 5)
    (lease,) = router.leases
    kinds = [r.WhichOneof("report") for _, r in lease.reports]
    assert kinds[0] == "hello"
    assert lease.of("prefixes")[0].reset
    assert lease.hashes() == {b"2" * 16}
    assert lease.of("load") == [pb.Load(running=1)]
    times = [at for at, r in lease.reports if r.HasField("heartbeat")]
    assert (times[-1] - times[0]) / (len(times) - 1) > HEARTBEAT_S / 2
    assert len(pauses) >= 4
    assert HEARTBEAT_S / 2 < max(pauses) <= HEARTBEAT_S, "no heartbeat is delayed for longer"
    steps = [beat.step for beat in lease.of("heartbeat")]
    assert steps == sorted(set(steps))


async def test_loads_are_the_newest_and_at_most_twenty_a_second(make: Any) -> None:
    (router,), member = await make()
    member.start()
    await eventually(lambda: bool(router.leases))
    began = time.monotonic()
    for running in range(1, 301):
        member.report(pb.Load(running=running))
        await asyncio.sleep(0.001)
    await eventually(lambda: bool(router.leases[0].of("load")[-1:]) and
                router.leases[0].of("load")[-1].running == 300)  # fmt: skip
    loads = router.leases[0].of("load")
    assert 1 < len(loads) <= (time.monotonic() - began) / LOAD_INTERVAL_S + 2
    assert [x.running for x in loads] == sorted({x.running for x in loads})


async def test_a_router_that_reads_heartbeats_gets_them_in_loads(make: Any) -> None:
    (router,), member = await make()
    member.start()
    await eventually(lambda: bool(router.leases) and bool(router.leases[0].of("heartbeat")))
    await asyncio.sleep(0.1)
    (lease,) = router.leases
    alone = len(lease.of("heartbeat"))
    for running in range(1, 41):
        member.report(pb.Load(running=running))
        await asyncio.sleep(0.05)
    await eventually(lambda: sum(r.HasField("load_beat") for _, r in lease.reports) >= 5)
    assert len(lease.of("heartbeat")) <= alone + 2, "except for delays by the machine"
    steps = [r.load_beat.step for _, r in lease.reports if r.HasField("load_beat")]
    assert steps == sorted(set(steps))


async def test_steady_loads_are_sent_ten_times_a_second(make: Any) -> None:
    (router,), member = await make()
    member.start()
    await eventually(lambda: bool(router.leases))
    for blocks in range(600):
        member.report(pb.Load(running=1 + blocks // 300, blocks_free=blocks))
        await asyncio.sleep(0.001)
    await eventually(lambda: any(x.blocks_free == 599 for x in router.leases[0].of("load")))
    loads = [(at, r.load) for at, r in router.leases[0].reports if r.HasField("load")]
    steady: list[float] = []
    for (at, load), (later, following) in pairwise(loads):
        if load.running == following.running:
            steady.append(later - at)
    assert len(steady) >= 3
    assert median(steady) > (LOAD_INTERVAL_S + STEADY_INTERVAL_S) / 2


async def test_closing_does_not_wait_for_a_name_lookup(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    request = threading.Event()

    def resolve(name: str) -> list[str]:
        request.set()
        answer.wait()
        return [name]

    (router,), member = await make()
    monkeypatch.setattr(discovery, "resolve", resolve)
    member.start()
    assert await asyncio.to_thread(request.wait, LIMIT_S)
    try:
        await asyncio.wait_for(asyncio.to_thread(member.close, 0.2), LIMIT_S)
    finally:
        answer.set()
    await asyncio.sleep(0.3)
    assert not router.leases


async def test_a_worker_rejoins_after_a_cut_with_the_whole_state(make: Any) -> None:
    (router,), member = await make()
    member.prefixes([bytes([i]) * 16 for i in range(5)], [])
    member.start()
    await eventually(lambda: bool(router.leases) and len(router.leases[0].hashes()) == 5)
    router.leases[0].cut.set()
    member.prefixes([b"x" * 16], [bytes(16)])
    await eventually(lambda: len(router.leases) == 2 and bool(router.leases[1].of("prefixes")))
    member.prefixes([b"y" * 16], [])
    expected = {*(bytes([i]) * 16 for i in range(1, 5)), b"x" * 16, b"y" * 16}
    await eventually(lambda: router.leases[1].hashes() == expected)
    assert router.leases[1].of("hello")[0].incarnation == b"b" * 16


async def test_a_large_state_is_split(make: Any) -> None:
    (router,), member = await make()
    hashes = [i.to_bytes(16) for i in range(20_000)]
    member.prefixes(hashes, [])
    member.start()
    await eventually(lambda: bool(router.leases) and len(router.leases[0].hashes()) == 20_000)
    sizes = [event.ByteSize() for event in router.leases[0].of("prefixes")]
    assert len(sizes) == -(-20_000 // HASHES_PER_EVENT)
    assert max(sizes) < 256 << 10
    member.prefixes(hashes[:1], [])
    await eventually(lambda: len(router.leases[0].of("prefixes")) == len(sizes) + 1)
    assert router.leases[0].hashes() == set(hashes)


async def test_a_worker_joins_every_router_and_one_that_returns(make: Any) -> None:
    routers, member = await make(2)
    address = routers[0].address
    member.start()
    await eventually(lambda: all(r.leases for r in routers))
    second = Router()
    await routers[0].host.stop(0)
    await eventually(lambda: len(routers[1].leases[0].of("heartbeat")) >= 2)
    await second.start(int(address.rpartition(":")[2]))
    routers.append(second)
    await eventually(lambda: bool(second.leases) and bool(second.leases[0].of("heartbeat")))
    assert len(routers[1].leases) == 1


async def test_goodbye_reaches_routers_now_and_later(make: Any) -> None:
    (router,), member = await make()
    member.start()
    await eventually(lambda: bool(router.leases))
    member.announce_drain("upgrade")
    await eventually(lambda: [g.reason for g in router.leases[0].of("goodbye")] == ["upgrade"])
    router.leases[0].cut.set()
    await eventually(lambda: len(router.leases) == 2 and bool(router.leases[1].of("goodbye")))


async def test_a_router_gets_the_goodbye_before_the_lease_ends(make: Any) -> None:
    routers, member = await make(4)
    member.start()
    await eventually(lambda: all(r.leases and r.leases[0].of("heartbeat") for r in routers))
    member.announce_drain("upgrade")
    await asyncio.to_thread(member.wait_announced)
    await asyncio.sleep(0.05)
    await asyncio.to_thread(member.close)
    for router in routers:
        assert [g.reason for g in router.leases[0].of("goodbye")] == ["upgrade"]


async def test_a_router_that_echoes_nothing_is_joined_again(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("pdserve.services.worker.membership.SILENT_S", 3 * HEARTBEAT_S)
    (router,), member = await make()
    router.echoes = False
    member.start()
    await eventually(lambda: len(router.leases) >= 2)
    router.echoes = True
    await eventually(lambda: len(router.leases[-1].of("heartbeat")) >= 3)
    num_leases = len(router.leases)
    await asyncio.sleep(4 * HEARTBEAT_S)
    assert len(router.leases) == num_leases


async def test_an_unreachable_router_is_logged_once(
    make: Any, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(membership, "REJOIN_S", 0.01)
    caplog.set_level(logging.INFO, logger=membership.__name__)
    tries: list[str] = []
    tell = Membership.note
    monkeypatch.setattr(
        Membership, "note", lambda self, at, why: (tries.append(why), tell(self, at, why))
    )
    (router,), member = await make()
    member.start()
    await eventually(lambda: bool(router.leases) and bool(router.leases[0].of("heartbeat")))
    await router.host.stop(0)
    await eventually(lambda: len(tries) > 4)
    second = Router()
    await second.start(int(router.address.rpartition(":")[2]))
    await eventually(lambda: bool(second.leases) and bool(second.leases[0].of("heartbeat")))
    await eventually(lambda: tries[-1] == "")
    said = [record.levelname for record in caplog.records if router.address in record.message]
    assert said == ["INFO", "WARNING", "INFO"]
    await asyncio.to_thread(member.close)
    await second.host.stop(0)


@pytest.mark.parametrize(
    ("who_refuses", "protocol"),
    [("router", PROTOCOL_VERSION + 2), ("worker", PROTOCOL_VERSION + 2), ("worker", 0)],
)
async def test_a_router_of_another_version_is_retried_with_growing_pauses(
    who_refuses: str, protocol: int, make: Any, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(membership, "REJOIN_S", 0.01)
    monkeypatch.setattr(membership, "RESOLVE_S", 0.02)
    monkeypatch.setattr(membership, "REFUSED_S", 0.05)
    monkeypatch.setattr(membership, "MAX_REFUSED_S", 0.4)
    caplog.set_level(logging.INFO, logger=membership.__name__)
    routers, member = await make(2)
    (far, near), tried = routers, []
    far.protocol = protocol
    far.refuses = who_refuses == "router"
    near.protocol = PROTOCOL_VERSION + 1
    refused = Membership.refused

    def noted(self: Membership, address: str) -> None:
        tried.append(time.monotonic())
        refused(self, address)

    monkeypatch.setattr(Membership, "refused", noted)
    member.start()
    await eventually(lambda: len(tried) >= 6)
    pauses = [later - at for at, later in pairwise(tried)]
    assert all(p >= least for p, least in zip(pauses, (0.05, 0.1, 0.2, 0.4, 0.4), strict=False))
    assert len(near.leases) == 1, "the other router has the worker all the time"
    said = [r for r in caplog.records if far.address in r.message]
    assert [r.levelname for r in said] == ["WARNING"], "it is logged once"
    assert "upgrade the" in said[0].message
    far.refuses, far.protocol = False, PROTOCOL_VERSION
    await eventually(lambda: far.leases and far.leases[-1].of("heartbeat"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("REJOIN_S", 0.01),
        ("RESOLVE_S", 0.02),
        ("REFUSED_S", 0.05),
        ("MAX_REFUSED_S", 0.1),
        ("ABSENT_S", 0.3),
        ("SETTLED_S", 0.3),
    ):
        monkeypatch.setattr(membership, name, seconds)


def joined(router: Router) -> bool:
    """Return whether the router has a lease that continues."""
    return bool(router.leases) and bool(router.leases[-1].of("heartbeat"))


async def looks(router: Router, num: int) -> None:
    """Wait while the worker checks its leases repeatedly."""
    (lease,) = router.leases
    beats = len(lease.of("heartbeat"))
    await eventually(lambda: len(lease.of("heartbeat")) >= beats + num)


async def test_a_worker_joins_only_the_first_routers(make: Any, quick: None) -> None:
    routers, member = await make(4, join=2)
    member.start()
    await eventually(lambda: all(map(joined, routers[:2])))
    assert routers[0].leases[0].of("hello")[0].join_routers == 2
    await looks(routers[0], 3)
    assert [len(router.leases) for router in routers] == [1, 1, 0, 0]


async def test_fewer_routers_than_the_worker_would_join(make: Any, quick: None) -> None:
    routers, member = await make(2, join=4)
    member.start()
    await eventually(lambda: all(map(joined, routers)))


@pytest.mark.parametrize("how", ["away", "another version"])
async def test_a_router_that_refuses_the_worker_does_not_count(
    make: Any, quick: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The next one is joined, and left once the first one accepts the worker after all."""
    routers, member = await make(4, join=2)
    first, second, third, fourth = routers
    if how == "away":
        await first.host.stop(0)
    else:
        first.refuses = True
    member.start()
    await eventually(lambda: joined(second) and joined(third))
    assert not fourth.leases
    if how == "away":
        await first.start(int(first.address.rpartition(":")[2]))
    else:
        first.refuses = False
    await eventually(lambda: third.leases[0].of("goodbye"))
    ((left, _),) = [(at, r) for at, r in third.leases[0].reports if r.HasField("goodbye")]
    assert third.leases[0].of("goodbye")[0].leaves
    assert first.welcomed
    assert left >= first.welcomed + membership.SETTLED_S, "not at fewer than two meanwhile"
    await looks(third, 2)  # the lease continues until the router ends it
    assert len(third.leases[0].of("goodbye")) == 1
    third.leases[0].cut.set()
    await looks(second, 3)
    assert len(third.leases) == 1, "it is not joined again"
    assert not second.leases[0].of("goodbye")


@pytest.mark.parametrize("found", [0, 1])
async def test_no_router_is_left_while_too_few_are_resolved(
    make: Any, quick: None, monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    """The names may have no addresses for a while."""
    routers, member = await make(2, join=2)
    member.start()
    await eventually(lambda: all(map(joined, routers)))
    addresses = [router.address for router in routers[:found]]
    looked = []

    def resolve(name: str) -> list[str]:
        looked.append(name)
        return addresses

    monkeypatch.setattr(discovery, "resolve", resolve)
    await eventually(lambda: len(looked) > 60)
    assert [len(router.leases) for router in routers] == [1, 1]
    assert not any(router.leases[0].of("goodbye") for router in routers)


async def test_a_router_that_is_wanted_again_is_joined_again(make: Any, quick: None) -> None:
    routers, member = await make(3, join=2)
    port = int(routers[0].address.rpartition(":")[2])
    await routers[0].host.stop(0)
    member.start()
    await eventually(lambda: joined(routers[2]))
    await routers[0].start(port)
    await eventually(lambda: routers[2].leases[0].of("goodbye"))
    await routers[0].host.stop(0)
    await eventually(lambda: len(routers[2].leases) == 2 and joined(routers[2]))
    assert not routers[2].leases[1].of("goodbye")


async def test_a_draining_worker_leaves_no_router(make: Any, quick: None) -> None:
    routers, member = await make(3, join=2)
    await routers[0].host.stop(0)
    member.start()
    await eventually(lambda: joined(routers[2]))
    member.announce_drain("upgrade")
    await routers[0].start(int(routers[0].address.rpartition(":")[2]))
    await eventually(lambda: joined(routers[0]) and routers[2].leases[0].of("goodbye"))
    await looks(routers[2], 3)
    assert [g.leaves for g in routers[2].leases[0].of("goodbye")] == [False]
