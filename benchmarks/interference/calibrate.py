"""Calibrates the rates of requests: the prefill capacity of one core, the speed of short requests
under that load, and a model of requests that share a worker, which finds the rate at which a given
number is in flight. Both speeds are measured on the separated pair."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from interference.arrivals import LONG, SHORT, schedule
from interference.client import closed_loop, open_loop
from interference.configurations import Prompts, system, warm_up
from interference.figures import SEPARATED, Answer

STEPS = 40  # of bisection
PROMPTS = 4  # that measure the capacity
AROUND = (4, 20)  # in flight while the time of a request is measured
LOAD = 0.5  # of the capacity
RAMP_S = 8.0  # at the beginning of a closed loop, not counted
FIRST = 2_000_000  # numbers of prompts, different from those of the runs


@dataclass(frozen=True, slots=True)
class Sharing:
    """A request takes a + b n seconds among n; all get equal shares."""

    a: float
    b: float

    @classmethod
    def of(cls, measured: Sequence[tuple[int, float]]) -> "Sharing":
        """Fit `measured`: (requests always in flight, requests per second) twice. Raises
        RuntimeError if a request does not take longer among more."""
        (few, few_s), (many, many_s) = ((n, n / rate) for n, rate in measured)
        b = (many_s - few_s) / (many - few)
        if b <= 0:
            text = f"{few_s:.2f} s among {few} and {many_s:.2f} s among {many} requests"
            raise RuntimeError(text)
        return cls(max(0.0, few_s - b * few), b)

    def in_flight(self, arrivals: Sequence[float], seconds: float) -> float:
        """The mean number in flight over `seconds` for these ordered arrival times; requests left
        at the end are served to completion and counted."""
        waiting = deque(arrivals)
        ends: deque[float] = deque()  # cumulative service at which each request ends, in order
        now = served = total = 0.0
        while waiting or ends:
            pace = self.a + self.b * len(ends)
            leaves = now + (ends[0] - served) * pace if ends else float("inf")
            comes = waiting[0] if waiting else float("inf")
            then = min(leaves, comes)
            total += len(ends) * (then - now)
            if ends:
                served += (then - now) / pace
            now = then
            if comes <= leaves:
                waiting.popleft()
                ends.append(served + 1.0)
            else:
                served = ends.popleft()
        return total / seconds

    def rate_for(
        self, wanted: float, arrivals: Callable[[float], Sequence[float]], seconds: float
    ) -> float:
        """Requests per second that keep `wanted` in flight on average, where `arrivals(rate)` are
        the arrival times."""
        low, high = 0.0, 2.0 / self.b
        for _ in range(STEPS):
            rate = (low + high) / 2
            if self.in_flight(arrivals(rate), seconds) < wanted:
                low = rate
            else:
                high = rate
        return (low + high) / 2

    def seen(self, there: float, arrivals: Sequence[float], seconds: float) -> "Sharing":
        """The same model, faster or slower, so that these arrivals have `there` in flight."""
        low, high = 0.25, 4.0
        for _ in range(STEPS):
            factor = (low * high) ** 0.5
            if Sharing(self.a * factor, self.b * factor).in_flight(arrivals, seconds) < there:
                low = factor
            else:
                high = factor
        return Sharing(self.a * low, self.b * low)


def capacity(url: str, prompts: Prompts) -> float:
    """4,000-token prompts per second that the prefill worker computes when it never waits."""
    answers = asyncio.run(
        closed_loop(
            url, lambda n: prompts.ask(LONG, FIRST + n), 2, lambda begun, _: begun == PROMPTS
        )
    )
    return PROMPTS / max(answer.events_s[0] for answer in answers)


def finished_in(answers: Sequence[Answer], start_s: float, end_s: float) -> float:
    """Requests per second that ended in that interval."""
    return sum(start_s <= a.events_s[-1] < end_s for a in answers) / (end_s - start_s)


def closed_rate(
    url: str, prompts: Prompts, long_rate: float, in_flight: int, seconds: float
) -> float:
    """Short requests per second with this many always in flight, under the long ones."""
    end_s = RAMP_S + seconds
    longs = prompts.all_of(schedule(long_rate, 1.0, end_s, 0, seed=-in_flight))
    background = [request for request in longs if request.kind == LONG]
    first = FIRST + 10_000 * in_flight

    async def both() -> list[Answer]:
        _, answers = await asyncio.gather(
            open_loop(url, background),
            closed_loop(
                url,
                lambda n: prompts.ask(SHORT, first + n),
                in_flight,
                lambda _, now_s: now_s >= end_s,
            ),
        )
        return answers

    return finished_in(asyncio.run(both()), RAMP_S, end_s)


def calibrate(seconds: float) -> dict[str, Any]:
    """Requests per second: long ones to send, and short ones answered when a given number is always
    in flight; `seconds` for each of these loops."""
    with system(SEPARATED) as fleet:
        prompts = Prompts(fleet.url)
        warm_up(fleet, prompts)
        most = capacity(fleet.url, prompts)
        long_rate = LOAD * most
        measured = [(n, closed_rate(fleet.url, prompts, long_rate, n, seconds)) for n in AROUND]
        return {
            "capacity_tokens_s": round(4_000 * most, 1),
            "closed_loop": [[n, round(rate, 3)] for n, rate in measured],
            "long_rate": round(long_rate, 4),
        }
