"""Priorities from the HTTP API through a router to its workers, after all have been busy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fakes import router_workers
from fakes.router import served
from fakes.router_workers import FakeBlobs
from fakes.scripted_service import scripted_service
from systems.cluster_secret import ACCESS
from systems.dispatcher_world import World
from systems.eventually import LIMIT_S, eventually

from pdserve.engine.kv import KvSpec, Mixing, encode_spec
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.app import create_app
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.router_client import RouterClient
from pdserve.protos import common_pb2 as pb
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.services.common.tenants import ApiKeys

pytestmark = pytest.mark.anyio
LIMITS = HttpLimits(1 << 16, 1 << 18, 5.0, 1 << 16, 5.0)
ONE, TWO = "sk-one", "sk-two"
CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# Key, path, priority; in the order of arrival.
REQUEST: tuple[tuple[str, str, int | None], ...] = (
    (ONE, PLAIN, 3),
    (ONE, CHAT, None),
    (TWO, PLAIN, None),
    (ONE, RESPONSES, -2),
    (ONE, PLAIN, 3),
    (ONE, RESPONSES, -(2**31)),
    (TWO, CHAT, -1),
    (ONE, CHAT, 2**31 - 1),
)


@pytest.fixture
def served_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the workers a model that a gateway can use."""
    card, blobs = served()
    card.kv_spec = encode_spec(KvSpec(16, ()))

    async def get_blob(self: FakeBlobs, request: Any, context: Any) -> AsyncIterator[pb.BlobChunk]:
        yield pb.BlobChunk(data=blobs[request.digest])

    monkeypatch.setattr(FakeBlobs, "GetBlob", get_blob)
    monkeypatch.setattr(router_workers, "card", lambda *_: card)
    monkeypatch.setattr(router_workers, "token", lambda *_: 65)  # of its vocabulary


@asynccontextmanager
async def gateway_of(address: str) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of the HTTP application of a gateway with that router."""
    upstream = RouterClient([address], ACCESS, b"g" * 16)
    await upstream.start()
    await eventually(lambda: upstream.num_connected)
    service = scripted_service(upstream)  # type: ignore[arg-type]
    apis = [OpenAiApi(service, LIMITS, BodyReader(LIMITS))]
    readiness = Readiness(upstream, service.catalog)
    app = create_app(apis, service, readiness, ApiKeys((ONE, TWO)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
    await upstream.close()


def body_of(path: str, number: int, priority: int | None) -> dict[str, Any]:
    text = f"prompt {number}"
    prompts: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
        PLAIN: {"prompt_token_ids": [65 + number] * 9, "max_tokens": 2},
        RESPONSES: {"input": text, "store": False, "max_output_tokens": 2},
    }
    return {"model": "tiny", "priority": priority, **prompts[path]}


async def test_a_full_fleet_takes_the_requests_of_each_key_by_priority(
    make_cluster: Any, served_workers: None
) -> None:
    cluster = await make_cluster(remote_prefill="always")
    decode = await cluster.decode()
    prefill = await cluster.prefill()
    dispatcher = cluster.router.core.dispatcher
    decode.busy = 1 << 30
    async with gateway_of(cluster.router.address) as client:
        waiting = []
        for number, (key, path, priority) in enumerate(REQUEST):
            body = body_of(path, number, priority)
            shown = {"authorization": f"Bearer {key}"}
            waiting.append(asyncio.create_task(client.post(path, json=body, headers=shown)))
            await eventually(lambda number=number: dispatcher.num_running == number + 1)
        await eventually(lambda: dispatcher.num_queued == len(REQUEST))
        refused = len(decode.of("admit"))
        decode.busy = 0  # all of them wait in the router at this moment
        replies = await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)
    assert [reply.status_code for reply in replies] == [200] * len(REQUEST)
    assert refused
    taken = [admit.start for admit in decode.of("admit")[refused:]]
    assert len(taken) == len(REQUEST)
    tenants = {start.tenant for start in taken}
    orders = sorted([s.priority for s in taken if s.tenant == tenant] for tenant in tenants)
    assert orders == sorted([[-(2**31), -2, 0, 3, 3, 2**31 - 1], [-1, 0]])
    turns = [start.tenant for start in taken[:4]]
    assert turns[0] == turns[2] != turns[1] == turns[3], (
        "the two keys take turns, as without priorities"
    )
    sent = [start.priority for start in prefill.of("start")]
    assert sorted(sent) == sorted(start.priority for start in taken)


async def test_a_new_request_passes_those_of_its_tenant_with_a_higher_value() -> None:
    world = World(Mixing(), "never")
    decode = world.join(DECODE)
    decode.busy_until = world.now + 1.0
    world.submit("late", priority=1)
    decode.busy_until = 0.0  # the router has not yet checked its waiting requests
    world.submit("later", priority=2)
    world.submit("another's", tenant=b"other", priority=-9)
    assert not world.commands("admit")
    world.submit("soon", priority=0)
    world.pass_time(0.1)
    began = [admit.start.request for _, admit in world.commands("admit")]
    assert began == ["soon", "late", "another's", "later"]
