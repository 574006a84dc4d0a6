"""Channels to other processes: how long a peer may take to accept a connection, and closing."""

import asyncio
import time

import pytest
from systems.cluster_secret import ACCESS, open_channel
from systems.eventually import LIMIT_S
from systems.fault_proxy import FaultProxy

from pdserve.protos.router_pb2 import GetFleetRequest
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common.rpc import may_be_closed
from pdserve.services.common.server import GrpcServer

pytestmark = pytest.mark.anyio
SLOW_S = 0.15  # each way: TCP's handshake is done at once, HTTP/2's settings are late


async def test_a_slow_peer_gets_its_connection() -> None:
    host = GrpcServer(ACCESS)
    port = host.listen("127.0.0.1:0")
    await host.start()
    try:
        with FaultProxy(f"127.0.0.1:{port}") as proxy:
            proxy.delay(SLOW_S)
            began = time.monotonic()
            async with open_channel(proxy.address) as channel:
                await asyncio.wait_for(channel.channel_ready(), LIMIT_S)
            assert time.monotonic() - began >= SLOW_S
            assert proxy.num_connections == 1, "the first attempt was not given up"
            assert proxy.hits["delayed"]
    finally:
        await host.stop(0)


async def test_a_call_on_a_closed_channel_is_a_connection_error() -> None:
    channel = open_channel("127.0.0.1:1")
    await channel.close()
    with pytest.raises(ConnectionError), may_be_closed():
        await RouterStub(channel).GetFleet(GetFleetRequest())
