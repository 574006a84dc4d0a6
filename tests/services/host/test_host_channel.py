"""Channels to other processes: how long a peer may take to answer a connection."""

import asyncio
import time

import pytest
from eventually import LIMIT_S
from fault_proxy import FaultProxy

from pdserve.services.host.channel import open_channel
from pdserve.services.host.server import GrpcHost

pytestmark = pytest.mark.anyio
SLOW_S = 0.15  # each way: TCP's handshake is over at once, HTTP/2's settings are late


async def test_a_slow_peer_is_connected_to() -> None:
    host = GrpcHost("127.0.0.1:0", "secret")
    port = await host.start()
    try:
        with FaultProxy(f"127.0.0.1:{port}") as proxy:
            proxy.delay(SLOW_S)
            began = time.monotonic()
            async with open_channel(proxy.address, "secret") as channel:
                await asyncio.wait_for(channel.channel_ready(), LIMIT_S)
            assert time.monotonic() - began >= SLOW_S
            assert proxy.num_connections == 1, "the first attempt was not given up"
            assert proxy.hits["delayed"]
    finally:
        await host.stop(0)
