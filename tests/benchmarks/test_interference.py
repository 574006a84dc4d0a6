"""The interference benchmark: arrivals, the open-loop client, figures, calibration and plot."""

import asyncio
import json
import socket
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interference.arrivals import LONG, SHAPES, SHORT, prompt_ids, schedule
from interference.calibrate import Sharing, finished_in
from interference.client import PlannedRequest, closed_loop, open_loop, request_body
from interference.figures import (
    Answer,
    best_mixed,
    comparison,
    gaps,
    percentile,
    spread,
    summary,
    ttft,
)
from interference.plot import svg


def test_arrivals_are_poisson_and_repeatable_by_seed() -> None:
    plan = schedule(0.1, 2.0, 2_000, 30, seed=1)
    assert plan == schedule(0.1, 2.0, 2_000, 30, seed=1)
    assert plan != schedule(0.1, 2.0, 2_000, 30, seed=2)
    times = [a.at_s for a in plan.arrivals]
    assert times == sorted(times)
    for kind, rate in ((LONG, 0.1), (SHORT, 2.0)):
        own = [a.at_s for a in plan.arrivals if a.kind == kind]
        assert [a.number for a in plan.arrivals if a.kind == kind] == list(range(len(own)))
        assert len(own) == pytest.approx(rate * 2_000, rel=0.25)
        between = [b - a for a, b in pairwise(own)]
        mean = sum(between) / len(between)
        spread = (sum((x - mean) ** 2 for x in between) / len(between)) ** 0.5
        assert spread == pytest.approx(mean, rel=0.3), "gaps must be exponential"


def test_long_arrivals_do_not_depend_on_short_ones() -> None:
    few, many = (schedule(0.1, rate, 300, 0, seed=1).arrivals for rate in (1.0, 3.0))
    assert [a for a in few if a.kind == LONG] == [a for a in many if a.kind == LONG]


def test_a_run_lasts_until_there_are_enough_long_prompts() -> None:
    plan = schedule(0.05, 1.0, 60, 30, seed=3)
    longs = [a for a in plan.arrivals if a.kind == LONG]
    assert len(longs) == 30
    assert plan.seconds == longs[-1].at_s > 60
    assert plan.arrivals[-1].at_s <= plan.seconds


def test_prompts_have_their_length_and_a_unique_beginning() -> None:
    text = list(range(1_000, 6_000))
    made = [prompt_ids(text, 50_000, kind, n) for kind in SHAPES for n in range(300)]
    assert {len(ids) for ids in made} == {4_000, 128}
    assert len({tuple(ids[:3]) for ids in made}) == 600
    assert made == [prompt_ids(text, 50_000, kind, n) for kind in SHAPES for n in range(300)]


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}], "usage": None}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 5, "completion_tokens": 3}
TAIL = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Server:
    """Answer with three events; the first request is answered only after the last has arrived."""

    def __init__(self, requests: int) -> None:
        self.left = requests
        self.all_there = asyncio.Event()
        self.open = self.most = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(x for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
        body = json.loads(await reader.readexactly(int(length.split(b":")[1])))
        assert body["min_tokens"] == body["max_tokens"] == 3
        self.left -= 1
        self.open += 1
        self.most = max(self.most, self.open)
        if not self.left:
            self.all_there.set()
        if body["prompt"] == [0]:
            await self.all_there.wait()
        writer.write(HEAD + event("a") + event("b") + event("c") + TAIL)
        await writer.drain()
        self.open -= 1
        writer.close()
        await writer.wait_closed()


def test_the_open_loop_does_not_wait_for_answers() -> None:
    async def run() -> list[Answer]:
        listener = await asyncio.start_server(Server(5).handle, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            requests = [PlannedRequest(SHORT, n / 50, request_body("m", [n], 3)) for n in range(5)]
            return await open_loop(f"http://127.0.0.1:{port}", requests)

    answers = sorted(asyncio.run(run()), key=lambda a: a.planned_s)
    assert [a.planned_s for a in answers] == [n / 50 for n in range(5)]
    assert all(a.sent_s >= a.planned_s for a in answers)
    assert answers[0].events_s[0] > answers[4].planned_s, (
        "the first answer must come after the last request"
    )
    assert {(len(a.events_s), a.prompt_tokens, a.completion_tokens) for a in answers} == {(3, 5, 3)}


def test_a_failed_request_is_reported_and_others_continue(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run() -> list[Answer]:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))  # no process listens there
            port = bound.getsockname()[1]
            return await open_loop(
                f"http://127.0.0.1:{port}", [PlannedRequest(LONG, 0.0, b"x")] * 2
            )

    assert asyncio.run(run()) == []
    assert capsys.readouterr().err.count("a long request of 0.0 s failed") == 2


def test_the_closed_loop_keeps_the_number_in_flight() -> None:
    server = Server(1)

    async def run() -> list[Answer]:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            return await closed_loop(
                f"http://127.0.0.1:{port}",
                lambda n: PlannedRequest(SHORT, 0.0, request_body("m", [n + 1], 3)),
                3,
                lambda begun, now_s: begun == 12,
            )

    assert len(asyncio.run(run())) == 12
    assert 1 <= server.most <= 3


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, s) for s in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([], 0.5) == 0.0
    times = {"p50": 1.0, "p90": 3.0, "p99": 3.0, "max": 3.0, "mean": 2.0}
    assert spread([0.001, 0.003]) == times


def answer(kind: str, start: float, first: float, gap: float) -> Answer:
    shape = SHAPES[kind]
    times = tuple(start + first + gap * n for n in range(shape.new))
    return Answer(kind, start, start + 0.001, times, shape.prompt, shape.new)


def test_a_summary_counts_only_events_before_the_end() -> None:
    answers = [answer(LONG, 0.0, 9.0, 0.01), answer(SHORT, 5.0, 0.5, 0.02)]
    assert ttft(answers[0]) == 9.0
    assert max(gaps(answers[1])) == pytest.approx(0.02)
    found = summary(answers, seconds=8.06)
    assert found["requests"] == {LONG: 1, SHORT: 1}
    assert found["completed_tokens"] == 129, (
        "half of the short answer must count: its later events take 0.02 s each"
    )
    assert found["itl_ms"]["p99"] == found["itl_ms"]["max"] == 20.0
    assert found["ttft_ms"][LONG]["p50"] == 9_000.0
    assert found["good_share"] == 1.0
    with pytest.raises(RuntimeError, match="tokens"):
        summary([Answer(SHORT, 0.0, 0.0, (1.0,), 128, 255)], 10)


def figures(
    p99: float, ttft_long: float, ttft_all: float, tokens: int = 1_000
) -> dict[str, object]:
    times = {"p50": 1.0, "p90": 1.0, "max": 1.0}
    return {
        "itl_ms": times | {"p99": p99},
        "ttft_ms": {
            LONG: times | {"mean": ttft_long},
            SHORT: times | {"mean": 1.0},
            "all": times | {"mean": ttft_all},
        },
        "completed_tokens": tokens,
        "goodput_requests_s": 1.0,
        "short_in_flight": 8.0,
        "failed": 0,
    }


def test_the_rival_is_the_best_with_a_fair_time_to_first_token() -> None:
    runs = {
        "separated": figures(10, 1, 1),
        "mixed-64": figures(50, 200, 100),
        "mixed-128": figures(60, 124, 140),
        "mixed-256": figures(90, 100, 101),
        "mixed-512": figures(40, 130, 150),
    }
    assert best_mixed(runs) == ("mixed-64", ["mixed-64", "mixed-256", "mixed-128"])
    del runs["mixed-64"]
    assert best_mixed(runs)[0] == "mixed-128"


def test_the_comparison_has_the_ratios_to_the_best_rival() -> None:
    runs = {"separated": figures(20, 1, 1, 950), "mixed-64": figures(60, 1, 1, 1_000)}
    found = comparison(runs)
    assert (found["best_mixed"], found["p99_itl_ratio"]) == ("mixed-64", 3.0)
    assert found["tokens_ratio"] == 0.95


def poisson_times(rate: float) -> list[float]:
    return [a.at_s for a in schedule(0.1, rate, 20_000, 0, seed=3).arrivals if a.kind == SHORT]


@pytest.mark.parametrize(("a", "b", "rate"), [(1.0, 0.3, 1.5), (0.0, 0.5, 1.6), (3.0, 0.1, 4.0)])
def test_the_number_in_flight_of_a_long_run_matches_theory(a: float, b: float, rate: float) -> None:
    weight, total, mean = 1.0, 1.0, 0.0
    for n in range(1, 3_000):  # arrivals at `rate`, departures at n / (a + b n)
        weight *= rate * (a + b * n) / n
        total += weight
        mean += n * weight
    found = Sharing(a, b).in_flight(poisson_times(rate), 20_000)
    assert found == pytest.approx(mean / total, rel=0.1)


def test_requests_that_share_a_worker() -> None:
    assert Sharing(2.0, 1.0).in_flight([0.0], 10.0) == pytest.approx(0.3)
    # alone for 1 s (a third of it), then 2/3 at 1/4 a second for both, then 1/3 alone
    together = Sharing(2.0, 1.0).in_flight([0.0, 1.0], 10.0)
    assert together == pytest.approx((1 + 2 * (2 / 3) * 4 + (1 / 3) * 3) / 10)


@pytest.mark.extended
@given(st.floats(0.0, 5.0), st.floats(0.05, 1.0), st.floats(1.0, 20.0))
def test_the_rate_keeps_the_wanted_number_in_flight(a: float, b: float, wanted: float) -> None:
    def arrivals(rate: float) -> list[float]:
        return [x.at_s for x in schedule(0.1, rate, 100, 0, seed=3).arrivals if x.kind == SHORT]

    sharing = Sharing.of([(n, n / (a + b * n)) for n in (4, 20)])
    rate = sharing.rate_for(wanted, arrivals, 100)
    assert sharing.in_flight(arrivals(rate), 100) == pytest.approx(wanted, rel=0.1)
    slower = sharing.seen(2 * wanted, arrivals(rate), 100)  # this number was observed
    assert slower.in_flight(arrivals(rate), 100) == pytest.approx(2 * wanted, rel=0.01)
    assert slower.rate_for(wanted, arrivals, 100) < rate


def test_no_rate_is_found_if_more_requests_do_not_take_longer() -> None:
    with pytest.raises(RuntimeError):
        Sharing.of([(4, 1.0), (20, 5.1)])


def test_requests_finished_in_an_interval() -> None:
    answers = [Answer(SHORT, 0.0, 0.0, (0.5, at), 128, 256) for at in (1.0, 2.0, 3.0, 4.0)]
    assert finished_in(answers, 2.0, 4.0) == 1.0


def test_the_plot_has_a_curve_and_a_row_for_each_run() -> None:
    runs = {"separated": figures(10, 1, 1), "mixed-64": figures(50, 2, 2)}
    report = {
        "machine": "A < B",
        "seconds": 300.0,
        "rates": {"long_rate": 0.05, "short_rate": 2.0},
        "comparison": comparison(runs),
        "runs": runs,
    }
    text = svg(report, {name: [0.001 * n for n in range(1, 100)] for name in runs})
    root = ET.fromstring(text)
    lines = [path for path in root.iter() if path.get("stroke-width") == "2"]
    assert len(lines) == 2
    for name in runs:
        assert name in text
