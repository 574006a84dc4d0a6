"""Workers and gateways of other releases at a router: neighbours are served, others are refused."""

import logging
from typing import Any

import pytest
from systems.cluster_secret import open_channel
from systems.eventually import eventually

from pdserve.engine.kv import KvSpec, encode_spec
from pdserve.protos import common_pb2 as pb
from pdserve.protos import router_pb2 as rpc
from pdserve.protos.fleet_pb2 import WorkerHello, WorkerReport
from pdserve.protos.fleet_pb2_grpc import FleetStub
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import PROTOCOL_VERSION

pytestmark = pytest.mark.anyio
PROMPT = list(range(20))
CARD = pb.ModelCard(name="tiny", kv_spec=encode_spec(KvSpec(16, ())))


def worker_hello(protocol: int) -> WorkerReport:
    """Return the hello of a decode worker whose port is closed."""
    hello = WorkerHello(role=2, incarnation=b"n" * 16, address="127.0.0.1:9", card=CARD)
    hello.protocol = protocol
    return WorkerReport(hello=hello)


async def first_of(call: Any) -> Any:
    return await anext(aiter(call))


@pytest.mark.parametrize("protocol", range(max(1, PROTOCOL_VERSION - 1), PROTOCOL_VERSION + 2))
async def test_neighbours_join_and_are_served(
    make_cluster: Any, expected: Any, protocol: int
) -> None:
    cluster = await make_cluster()
    await cluster.decode(protocol=protocol)
    gateway = await cluster.gateway(protocol=protocol)
    await gateway.start("r", PROMPT)
    assert isinstance(await gateway.end("r"), pb.Finished)
    assert gateway.ids("r") == expected(PROMPT, 8)
    assert gateway.router_protocol == PROTOCOL_VERSION


async def test_a_worker_that_is_too_new_is_refused_and_the_others_keep_serving(
    make_cluster: Any, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    cluster = await make_cluster()
    await cluster.decode()
    gateway = await cluster.gateway()
    async with open_channel(cluster.router.address) as channel:
        for again in range(3):
            call = FleetStub(channel).Join(iter([worker_hello(PROTOCOL_VERSION + 2)]))
            with pytest.raises(Exception) as caught:
                await first_of(call)
            error = ServiceError.from_rpc(caught.value)
            assert error.code == pb.INCOMPATIBLE_VERSION
            assert f"protocol version {PROTOCOL_VERSION} of the router" in error.message
            assert "upgrade the router" in error.message
            await gateway.start(f"r{again}", PROMPT)
            assert isinstance(await gateway.end(f"r{again}"), pb.Finished)
            assert gateway.ids(f"r{again}") == expected(PROMPT, 8)
    assert len(cluster.router.core.fleet.workers) == 1
    refused = [r for r in caplog.records if "worker 127.0.0.1:9" in r.message]
    assert len(refused) == 1, "it is logged once"


@pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION + 2])
async def test_peers_that_are_too_new_or_have_no_version_are_refused(
    make_cluster: Any, protocol: int
) -> None:
    cluster = await make_cluster()
    async with open_channel(cluster.router.address) as channel:
        session = RouterStub(channel).Session()
        hello = rpc.GatewayHello(incarnation=b"g" * 16, protocol=protocol)
        await session.write(rpc.GatewayMessage(hello=hello))
        join = FleetStub(channel).Join(iter([worker_hello(protocol)]))
        for call, peer in ((session, "gateway at 127.0.0.1"), (join, "worker 127.0.0.1:9")):
            with pytest.raises(Exception) as caught:
                await first_of(call)
            error = ServiceError.from_rpc(caught.value)
            assert error.code == pb.INCOMPATIBLE_VERSION
            assert f"does not match {protocol} of the {peer}" in error.message


async def test_the_router_sends_its_version_to_workers(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    await eventually(lambda: decode.of("hello"))
    (hello,) = decode.of("hello")
    assert hello.protocol == PROTOCOL_VERSION
    async with open_channel(cluster.router.address) as channel:
        call = FleetStub(channel).Join(iter([worker_hello(PROTOCOL_VERSION)]))
        assert (await first_of(call)).welcome.protocol == PROTOCOL_VERSION
