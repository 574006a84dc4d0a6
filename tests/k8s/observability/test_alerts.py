"""Each alert fires when its cause occurs and stays silent otherwise. promtool evaluates the
deployed rules over the metrics that the real objects export."""

from pathlib import Path
from typing import Any

import pytest
from alerts_page import rules
from oracles.promtool import Pages, firing, needs_promtool
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from systems.alert_causes import CASES, healthy
from systems.dispatcher_world import World
from systems.watched import router_page

from pdserve.engine.kv import NO_MIXING
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.services.router.fleet.fleet import RETIRED_S

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def well(one_loop: None) -> Pages:
    return await healthy()


def test_every_alert_has_a_cause() -> None:
    assert CASES.keys() == rules().keys()


@needs_promtool()
@pytest.mark.parametrize("name", CASES)
async def test_only_the_expected_alerts_fire_for_a_cause(
    name: str, well: Pages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = CASES[name]
    before, after = await case.cause(monkeypatch)
    others = {role: page for role, page in well.items() if role not in before}
    broken = others if after is None else others | after
    fine, fired = firing(others | before, broken, case.minutes, case.once, tmp_path)
    assert fine == set()
    assert fired == {name, *case.also}


def router(*models: str, forgotten: str = "", since: float) -> dict[str, str]:
    """Return the metrics page of a router that started at time `since`."""
    world = World(NO_MIXING)
    for model in models:
        world.join(DECODE, name=model)
    if forgotten:
        world.leave(world.join(DECODE, name=forgotten))
        world.pass_time(RETIRED_S)
    registry = CollectorRegistry()
    Gauge("process_start_time_seconds", "of the process", registry=registry).set(since)
    return {"router": router_page(world.core) + generate_latest(registry).decode()}


@needs_promtool()
@pytest.mark.parametrize(
    ("since", "after", "fired"),
    [
        pytest.param(-7200.0, {"forgotten": "b", "since": -7200.0}, set(), id="retired"),
        pytest.param(-7200.0, {"since": 1200.0}, {"PdserveNoDecodeWorker"}, id="restarted"),
    ],
)
async def test_a_model_that_no_router_lists_any_more(
    since: float, after: dict[str, Any], fired: set[str], well: Pages, tmp_path: Path
) -> None:
    """Either the model was retired, or all routers restarted after its workers were lost."""
    before = {**well, **router("a", "b", since=since)}
    broken = {**well, **router("a", **after)}
    assert firing(before, broken, 10, True, tmp_path) == (set(), fired)
