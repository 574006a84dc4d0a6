"""Figures of known times, and their output."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli.bench import bar, histogram, plot
from pdserve.cli.bench_tables import run_table
from pdserve.cli.load import (
    Sample,
    is_saturated,
    meets_slo,
    parse_rates,
    parse_slo,
    percentile,
    summarize,
)


def sample(started: float, *arrivals: float, tokens: int = 0, error: str = "") -> Sample:
    ended = arrivals[-1] if arrivals else started + 1
    return Sample(started, arrivals, ended, 10, tokens or len(arrivals), error)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent))


def test_times_of_a_request() -> None:
    one = sample(1.0, 1.5, 1.6, 1.9)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.gaps_s == pytest.approx([0.1, 0.3])
    assert one.tpot_s == pytest.approx(0.2)
    assert one.e2e_s == pytest.approx(0.9)
    several = sample(0.0, 1.0, 2.0, tokens=5)  # texts of several tokens
    assert several.tpot_s == pytest.approx(0.25)
    assert sample(0.0, 1.0).tpot_s == 0


def test_figures_of_a_run() -> None:
    samples = [sample(0.0, 0.5, 1.0), sample(1.0, 2.0, 4.0), sample(1.0, error="busy")]
    figures = summarize(samples, {"ttft": 0.6})
    assert (figures["requests"], figures["completed"], figures["errors"]) == (3, 2, {"busy": 1})
    assert figures["duration_s"] == pytest.approx(4.0)
    assert figures["output_tokens_per_s"] == pytest.approx(1.0)
    assert figures["total_tokens_per_s"] == pytest.approx(6.0)
    assert figures["requests_per_s"] == pytest.approx(0.5)
    assert figures["mean_concurrency"] == pytest.approx(1.0)
    assert figures["ttft_ms"]["p50"] == pytest.approx(750)
    assert figures["itl_ms"]["max"] == pytest.approx(2000)
    assert figures["goodput_requests_per_s"] == pytest.approx(0.25)
    assert figures["slo_attainment"] == pytest.approx(1 / 3)


def test_a_request_meets_its_bounds_or_does_not() -> None:
    one = sample(0.0, 0.1, 0.2, 0.5)
    for slo, kept in (
        ("ttft=100", True),
        ("itl=290", False),
        ("tpot=0.2s", True),
        ("e2e=1s", True),
    ):
        assert meets_slo(one, parse_slo(slo)) is kept
    assert meets_slo(one, parse_slo("ttft=1s,e2e=0.4s")) is False
    assert meets_slo(sample(0.0, error="x"), {}) is False


@pytest.mark.parametrize("text", ["ttft", "ttft=x", "speed=1", "itl=-1", "itl=5m"])
def test_invalid_bounds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid bound"):
        parse_slo(text)


def test_the_report() -> None:
    samples = [sample(n * 0.1, n * 0.1 + 0.05, n * 0.1 + 0.1 + n / 1000) for n in range(20)]
    samples.append(sample(0.0, error="busy"))
    text = run_table(summarize(samples, parse_slo("ttft=40"))) + plot(samples)
    for part in ("20 of 21 requests", "p99", "goodput: 0.00", "ttft 40 ms (0%)", "1 failed: busy"):
        assert part in text
    assert text.count("█") > 10
    assert "output tokens/s over" in text
    assert max(map(len, text.splitlines())) <= 100
    assert plot([samples[-1]]) == ""


def test_a_histogram_counts_every_value() -> None:
    rows = histogram("x", [1.0] * 5 + [2.0] * 3 + [100.0]).splitlines()[2:]
    assert sum(int(row.split()[-1]) for row in rows) == 9
    assert histogram("x", [3.0, 3.0]).splitlines()[2].endswith(" 2")
    assert len(bar(1.0)) == 40
    assert bar(0.0) == ""
    assert bar(1e-6) == "▏"


def test_rates_of_a_sweep(subtests: pytest.Subtests) -> None:
    for text, rates in (
        ("1,2.5,4", [1, 2.5, 4]),
        ("3", [3]),
        ("1:16:2", [1, 2, 4, 8, 16]),
        ("0.1:0.8:2", [0.1, 0.2, 0.4, 0.8]),
        ("2:7:2", [2, 4]),
    ):
        with subtests.test(text):
            assert parse_rates(text) == pytest.approx(rates)
    for text in (
        "",
        "x",
        "2,1",
        "1,1",
        "0,1",
        "1,inf",
        "nan",
        "1:2",
        "1:9:1",
        "4:1:2",
        "1:9:1.0001",
    ):
        with subtests.test(text), pytest.raises(ValueError, match="growing list of rates"):
            parse_rates(text)


def test_a_server_that_falls_behind_is_saturated() -> None:
    def answers(delay_per_request: float) -> list[Sample]:
        ends = [(n, n / 10 + 0.5 + n * delay_per_request) for n in range(50)]
        return [sample(n / 10, end, end) for n, end in ends]

    assert not is_saturated(answers(0.0))
    assert not is_saturated(answers(0.01))  # 0.91 of the rate
    assert is_saturated(answers(0.05))  # 0.67 of it
    assert is_saturated([*answers(0.0), sample(0.0, error="busy")])
    assert not is_saturated(answers(0.0)[:1])
