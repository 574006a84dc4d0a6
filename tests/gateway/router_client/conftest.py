"""Fixtures: scripted routers over gRPC, and a client of the first."""

from collections.abc import AsyncIterator

import pytest
from fakes.scripted_router import Router, Served
from systems.cluster_secret import ACCESS

from pdserve.gateway.router_client import RouterClient


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
