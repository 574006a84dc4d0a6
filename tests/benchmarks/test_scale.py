"""The scale harness: one real router between fakes, its lines and plot, and the arithmetic."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from scale import arithmetic, one_router, share, whole
from scale.arithmetic import REPORT, Costs, System, busiest, least_routers, mesh_limit
from scale.lines import fit, svg
from scale.one_router import measure
from scale.shape import BLOCK, IDENTITY, Shape, held_by, prompts

from pdserve.engine.kv import cache_seed, chain_hashes

SMALL = Shape(workers=10, streams=50, gateways=2, hashes=1_000, answer_len=20)
DOC = Path(__file__).parents[2] / "docs/scale.md"


@pytest.mark.extended
def test_one_router_at_a_small_share_loses_and_repeats_no_token() -> None:
    found = measure(SMALL, window_s=1.0, finish=True, nice=0)
    counts = found["counts"]
    assert found["exact"], found
    assert counts["ended"] == counts["starts"] > SMALL.streams
    assert found["core"] > 0
    assert found["isolated_s_after_settling"] == []
    assert found["placing_cpu_ms"]["mean"] > 0
    assert found["sent_to_admit_ms"]["p50"] >= found["sent_to_placing_ms"]["p50"]


@pytest.mark.extended
def test_idle_workers_send_only_heartbeats() -> None:
    found = measure(replace(SMALL, workers=5, streams=0), window_s=2.0, nice=0)
    assert found["exact"], found
    assert 1 * 5 <= found["reports_s"] <= 3 * 5, "idle workers must send only heartbeats"


@pytest.mark.extended
def test_a_small_system_over_http_is_exact() -> None:
    found = whole.measure(whole.Whole(workers=4, streams=12, num_tokens=20, nice=0))
    assert found["ok"], found


@pytest.fixture(autouse=True)
def nothing_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "measured", {})
    monkeypatch.setattr(share, "not_carried", [])


GOOD = {"core": 0.02, "rss_mib": 300.0, "joined_mib": 80.0, "carried": 1.0, "exact": True}
PLACED = {"placing_ms": {"p99": 1.5}, "placing_cpu_ms": {"mean": 0.4}}


@pytest.mark.parametrize("part", ["share", "idle", "index", "streams"])
def test_a_part_whose_router_is_late_has_no_cost(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(shape: Shape, window_s: float) -> dict[str, Any]:
        raise TimeoutError("100 workers are late")

    monkeypatch.setattr(one_router, "measure", late)
    found = share.PARTS[part]()
    assert "core" not in found
    assert found.get("line") is None
    assert "bytes_a_hash" not in found


def test_one_disturbed_try_does_not_change_the_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[Shape] = set()

    def canned(shape: Shape, window_s: float) -> dict[str, Any]:
        disturbed = shape.streams == 500 and shape not in seen
        seen.add(shape)
        return GOOD | PLACED | {"core": 0.0001 * shape.streams + 0.3 * disturbed}

    monkeypatch.setattr(one_router, "measure", canned)
    found = share.PARTS["streams"]()
    assert found["line"] is not None
    assert [point["core"] for point in found["points"]] == [0.05, 0.1, 0.15, 0.2]
    assert max(found["points"][0]["tries"]) == pytest.approx(0.35)


def test_an_overloaded_measurement_is_repeated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [
        *({"carried": 0.9}, {"carried": 0.99}),
        *({"carried": 0.9}, {"carried": 0.9}),
        {"carried": 0.9, "core": 0.95},
        {"carried": 0.9, "exact": False},
    ]
    first = [given[0], given[2]]

    def canned(shape: Shape, window_s: float) -> dict[str, Any]:
        return GOOD | PLACED | given.pop(0)

    monkeypatch.setattr(one_router, "measure", canned)
    carried = [share.point(Shape(), number)["carried"] for number in range(4)]
    assert carried == [0.99, 0.9, 0.9, 0.9]
    assert not given, "an overloaded router or an inexact run must not be measured again"
    assert share.not_carried == [GOOD | PLACED | one for one in first]


def test_workers_hold_beginnings_of_prompts() -> None:
    """Ensure that the router's prefix index has hits."""
    shape = Shape()
    prompt = next(prompts(shape, Random(0)))
    chain = chain_hashes(prompt, BLOCK, cache_seed(IDENTITY, b""))
    shared = shape.shared_len // BLOCK
    held = [set(held_by(worker, shape)) for worker in range(shape.decodes)]
    holders = [hashes for hashes in held if set(chain[:shared]) <= hashes]
    assert len(prompt) == shape.prompt_len
    assert len(holders) == shape.decodes // 10
    assert all(chain[shared] not in hashes for hashes in held)


def test_a_fit_and_its_residuals() -> None:
    line = fit([(1, 3), (2, 5), (4, 9), (5, 11)])
    assert (line.fixed, line.slope, line.r2) == pytest.approx((1, 2, 1))
    assert (line.above, line.below) == pytest.approx((0, 0))
    for sizes in ((25, 50, 100, 200), (500, 1000, 1500, 2000)):
        assert fit([(n, n * n) for n in sizes]).above > 0.1
    slower = fit([(1, 1), (2, 2), (3, 2.5), (4, 2.7)])
    assert (slower.above, slower.below) == pytest.approx((0, 0))
    fall = fit([(25, 0.1), (50, 0.5), (100, 0.2), (200, 0.3)])
    assert fall.below == pytest.approx(0.3 / 0.5)
    step = fit([(25, 1), (50, 2), (100, 8), (200, 12)])
    assert step.above == pytest.approx((8 - 4) / 12)
    with pytest.raises(ValueError, match="3 points"):
        fit([(1, 1), (2, 2), (3, 3)])


def test_the_plot_marks_overloaded_points() -> None:
    points = [{"x": n, "core": n / 1000, "carried": n < 200} for n in (25, 50, 100, 200)]
    line = {"fixed": 0.0, "slope": 0.001, "r2": 1.0}
    root = ET.fromstring(svg({"a<b": {"points": points, "line": line}}, "x & y"))
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    assert [c.get("fill") for c in circles].count("white") == 1
    assert any("a<b" in (e.text or "") for e in root.iter())


COSTS = Costs(0.02, 0.001, 0.0001, 70, 0.2, 40, 0.02, 20)


def test_the_share_of_one_in_ten_routers() -> None:
    system = System(workers=100, streams=20_000, routers=10)
    assert system.joins == 1_000
    assert system.workers_a_router == 100
    assert system.core(COSTS) == pytest.approx(0.02 + 0.1 + 0.2)
    assert system.mib(COSTS) == pytest.approx(70 + 20 + 100 * 20_000 * 40 / (1 << 20) + 40)
    assert system.rows_a_message == pytest.approx(20_000 / 900)
    assert system.token_messages_s == pytest.approx(900)
    assert system.gateways == 9
    assert system.reports_s(COSTS) == 2_000


def test_more_routers_relieve_a_sharded_system_but_not_a_mesh() -> None:
    assert mesh_limit(COSTS) == 350
    assert least_routers(1_000, 100_000, COSTS) is None
    assert least_routers(1_000, 100_000, COSTS, keep=4) == 21
    few = System(1_000, 100_000, 50, keep=4)
    assert few.workers_a_router == 80
    assert few.core(COSTS) < replace(few, keep=0).core(COSTS)
    assert few.sees(1) == pytest.approx(0.08)
    assert few.sees(50) > 0.98


def test_the_busiest_router_has_little_more_than_its_share() -> None:
    assert busiest(1_000, 50, 4) < 1.4


def test_the_document_contains_the_computed_tables() -> None:
    """The tables are the output of `python benchmarks/scale/arithmetic.py`."""
    lines = set(DOC.read_text().splitlines())
    measured = arithmetic.costs_of(json.loads(REPORT.read_text()))
    assert set(arithmetic.table(measured)) | set(arithmetic.sharding()) <= lines
    found = re.search(r"up to (\d+) workers", DOC.read_text())
    assert found is not None
    assert int(found[1]) == mesh_limit(measured)


def test_the_arithmetic_agrees_with_the_measured_share() -> None:
    report = json.loads(REPORT.read_text())
    said = System(workers=100, streams=20_000, routers=10).core(arithmetic.costs_of(report))
    assert said == pytest.approx(report["share"]["core"], rel=0.1)
