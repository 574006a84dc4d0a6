"""Models, fleet and blobs that a gateway requests from its routers, over real gRPC."""

import asyncio
import hashlib

import pytest
from fakes.scripted_router import BLOB, connected, ids_of, start
from systems.cluster_secret import ACCESS
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.router_client import RouterClient
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError

pytestmark = pytest.mark.anyio


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
    assert [card.name for card in await client.models()] == ["tiny"]  # cached


async def test_a_hanging_router_does_not_delay_the_model_list(served, another, monkeypatch):
    """The lists of other routers stay fresh as well."""
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
            assert [card.name for card in await client.models()] == ["tiny"], (
                "the list must come from the cache"
            )
        served.router.hangs = another.router.hangs = False
        await client.close()
        monkeypatch.setattr("pdserve.gateway.router_client.model_files.MODELS_AGE_S", 1.0)


async def test_a_hanging_router_does_not_hide_the_fleet(served, another, monkeypatch):
    monkeypatch.setattr("pdserve.gateway.router_client.model_files.LIST_S", 0.2)
    client = RouterClient([f"127.0.0.1:{one.port}" for one in (served, another)], ACCESS, b"g" * 16)
    await client.start()
    await eventually(lambda: client.num_connected == 2)
    for hanging in (served, another):
        hanging.router.hangs = True
        assert (await client.fleet()).prefill_local == 7
        hanging.router.hangs = False
    assert served.router.num_hanging + another.router.num_hanging, (
        "one request must have gone to the hanging router first"
    )
    served.router.hangs = another.router.hangs = True
    with pytest.raises(ServiceError, match="does not answer"):
        await client.fleet()
    await client.close()


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


@pytest.mark.parametrize("call", ["models", "fleet", "blob"])
async def test_a_call_to_a_lost_router_fails(client, served, call):
    """Raise an error, not a cancellation: gRPC cancels the waiting task, but the caller has not
    given up."""
    await connected(client)
    served.router.hangs = True
    calls = {"models": client.models, "fleet": client.fleet, "blob": lambda: client.blob("00" * 32)}
    waiting = asyncio.create_task(calls[call]())
    await eventually(lambda: served.router.num_hanging)
    served.router.hang_up_after = 0  # ends the session, and its connection
    ids, _ = await ids_of(client, start())
    assert ids == list(range(100, 106))
    await asyncio.wait([waiting], timeout=LIMIT_S)
    assert not waiting.cancelled()
    error = waiting.exception()
    assert isinstance(error, ServiceError)
    assert error.code == pb.UNAVAILABLE


async def test_a_caller_of_a_router_can_cancel(client, served):
    await connected(client)
    served.router.hangs = True
    waiting = asyncio.create_task(client.fleet())
    await eventually(lambda: served.router.num_hanging)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
