"""Routers of other releases: neighbouring releases are used, others are retried after pauses."""

import asyncio
import logging

import pytest
from fakes.scripted_router import connected, ids_of, start
from systems.cluster_secret import ACCESS
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.router_client import RouterClient
from pdserve.gateway.router_client import client as client_module
from pdserve.gateway.router_client import session as session_module
from pdserve.gateway.router_client.session import RouterConnection
from pdserve.services.common.rpc import PROTOCOL_VERSION

pytestmark = pytest.mark.anyio
ANSWER = list(range(100, 106))


@pytest.mark.parametrize("protocol", range(max(1, PROTOCOL_VERSION - 1), PROTOCOL_VERSION + 2))
async def test_a_router_of_a_neighbouring_release_is_used_and_recorded(
    served, protocol, monkeypatch
):
    made = []

    class Noted(RouterConnection):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(client_module, "RouterConnection", Noted)
    served.router.protocol = protocol
    served.router.checks_version = True
    client = RouterClient([f"127.0.0.1:{served.port}"], ACCESS, b"g" * 16)
    await client.start()
    await connected(client)
    ids, _ = await ids_of(client, start())
    assert ids == ANSWER
    assert [connection.protocol for connection in made] == [protocol]
    await client.close()


@pytest.mark.parametrize(
    ("who_refuses", "protocol"),
    [("router", PROTOCOL_VERSION + 2), ("gateway", PROTOCOL_VERSION + 2), ("gateway", 0)],
)
async def test_a_router_of_no_neighbouring_release_is_retried_with_pauses_until_replaced(
    served, another, who_refuses, protocol, caplog, monkeypatch
):
    caplog.set_level(logging.WARNING, logger=session_module.__name__)
    pauses = []
    sleep = asyncio.sleep

    async def noted(seconds):
        if seconds >= session_module.FIRST_BACKOFF_S:
            pauses.append(seconds)
        await sleep(min(seconds, 0.05))

    monkeypatch.setattr(session_module.asyncio, "sleep", noted)
    new = another.router
    new.protocol = protocol
    new.checks_version = who_refuses == "router"
    addresses = [f"127.0.0.1:{one.port}" for one in (served, another)]
    client = RouterClient(addresses, ACCESS, b"g" * 16)
    await client.start()
    await eventually(lambda: len(new.hellos) >= 8 and client.num_connected == 1)
    for number in range(8):
        ids, _ = await asyncio.wait_for(ids_of(client, start(f"r{number}")), LIMIT_S)
        assert ids == ANSWER, "the other router must keep serving"
    assert not new.starts
    assert max(pauses) == session_module.MAX_REFUSED_S
    refusals = [r.message for r in caplog.records if f"router {addresses[1]}:" in r.message]
    assert len(refusals) == 1, "the refusal must be logged once"
    assert refusals[0].endswith("retrying")
    new.protocol = PROTOCOL_VERSION + 1
    await eventually(lambda: client.num_connected == 2)
    await client.close()
