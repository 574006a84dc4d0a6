"""Routers found by a watch of EndpointSlices: readiness gates new requests, and no request with a
live worker is lost.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.kubernetes import in_pod
from systems.discovered import MAX_TOKENS, DiscoveredSystem
from systems.eventually import eventually

from pdserve.services.common import kubernetes

pytestmark = pytest.mark.anyio
CHANGES = 12


@pytest.fixture
async def system(
    anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[DiscoveredSystem]:
    monkeypatch.setattr(kubernetes, "WATCH_S", 1)
    monkeypatch.setattr(kubernetes, "SILENT_S", 0.2)
    with in_pod(tmp_path, monkeypatch) as api:
        made = DiscoveredSystem(api, seed=3, num_workers=2, num_gateways=2)
        await made.start(2)
        yield made
        await made.close()


async def test_readiness_gates_new_requests(system: DiscoveredSystem) -> None:
    """Workers join a router before it is ready; gateways use it from then on. While it is not
    ready again, it keeps its sessions and running requests but gets nothing new.
    """
    made = await system.add()
    await eventually(lambda: made.num_workers == len(system.workers))
    for number in range(6):
        await system.ask(number % 2, f"before-{number}")
    assert all(gateway.num_connected == 2 for gateway in system.gateways)
    assert made.num_answered == 0
    system.pods.set(made.pod, ready=True)
    await eventually(lambda: all(g.num_connected == 3 for g in system.gateways))
    system.begin_asking(6)
    await eventually(lambda: made.num_running > 0 and made.num_answered > 0)
    system.pods.set(made.pod, ready=True, terminating=True)
    seen = made.num_answered, system.num_right

    def gets_nothing() -> bool:
        """Check that a router gets no request while the others answer 20."""
        nonlocal seen
        if made.num_answered != seen[0]:
            seen = made.num_answered, system.num_right
        return made.num_running == 0 and system.num_right >= seen[1] + 20

    await eventually(gets_nothing)
    assert all(gateway.num_connected == 3 for gateway in system.gateways)
    await system.end_asking()
    assert system.wrong == []


async def test_without_a_ready_router_existing_sessions_continue(
    system: DiscoveredSystem, caplog: pytest.LogCaptureFixture
) -> None:
    for one in system.routers:
        system.pods.set(one.pod, ready=False)
    await eventually(lambda: caplog.text.count("grpc has no address") == len(system.gateways))
    await system.ask(0, "r")
    assert system.num_right == 1


async def test_no_request_is_lost(system: DiscoveredSystem) -> None:
    system.begin_asking(8)
    for _ in range(CHANGES):
        system.api.faults = 0.2
        await system.change()
        system.api.faults = 0.0
    await system.end_asking()
    assert system.wrong == []
    assert system.num_right > MAX_TOKENS
    assert len(system.counts) >= 4, system.counts
