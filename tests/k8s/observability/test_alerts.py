"""Every alert fires when its cause is made, and none while all is well: the rule that is deployed,
evaluated by promtool over what the real objects export."""

from pathlib import Path

import pytest
from alert_causes import CASES, healthy
from alerts_page import rules
from promtool import Pages, firing, needs_promtool

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def well(one_loop: None) -> Pages:
    return await healthy()


def test_every_alert_has_a_cause() -> None:
    assert CASES.keys() == rules().keys()


@needs_promtool()
@pytest.mark.parametrize("name", CASES)
async def test_an_alert_fires_by_its_cause_alone(
    name: str, well: Pages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = CASES[name]
    before, after = await case.cause(monkeypatch)
    others = {role: page for role, page in well.items() if role not in before}
    broken = others if after is None else others | after
    fine, fired = firing(others | before, broken, case.minutes, case.once, tmp_path)
    assert fine == set()
    assert fired == {name, *case.also}
