"""The two rates: half of what one core can prefill, and what keeps eight short requests in flight.

Both are measured on the separated pair and then hold for every configuration.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from interference.arrivals import LONG, SHORT, schedule
from interference.client import Answer, closed_loop, open_loop
from interference.configurations import Prompts, system, warm_up
from interference.figures import SEPARATED, summary

PROMPTS = 4  # that measure the capacity
IN_FLIGHT = 8
AROUND = (4, 12)  # in flight while the time of a request is measured
OPEN_SEEDS = (101, 102)  # of the arrivals at which the rate is corrected
LOAD = 0.5  # of the capacity
RAMP_S = 8.0  # at the beginning of a closed loop, not counted
FIRST = 2_000_000  # numbers of prompts, apart from those of the runs


@dataclass(frozen=True, slots=True)
class Queue:
    """Of requests that take a + b n seconds among n. Pure.

    It serves all its n requests alike at n / (a + b n) a second; under Poisson arrivals their
    number is negative binomial, with mean r p / (1 - p), r = a / b + 1, p = rate * b.
    """

    b: float
    r: float

    @classmethod
    def of(cls, measured: Sequence[tuple[int, float]]) -> "Queue":
        """`measured`: (requests always in flight, requests a second) twice. Raises RuntimeError if
        a request does not take longer among more."""
        (few, few_s), (many, many_s) = ((n, n / rate) for n, rate in measured)
        b = (many_s - few_s) / (many - few)
        if b <= 0:
            text = f"{few_s:.2f} s among {few} and {many_s:.2f} s among {many} requests"
            raise RuntimeError(text)
        return cls(b, max(0.0, few_s - b * few) / b + 1)

    def rate_for(self, in_flight: float) -> float:
        """Arrivals a second that have `in_flight` requests there on the mean."""
        return in_flight / (in_flight + self.r) / self.b

    def seen(self, rate: float, in_flight: float) -> "Queue":
        """The same with the b at which `rate` has `in_flight` requests there."""
        return replace(self, b=in_flight / (in_flight + self.r) / rate)


def capacity(url: str, prompts: Prompts) -> float:
    """4,000-token prompts a second that the prefill worker computes, when it never waits."""
    answers = asyncio.run(
        closed_loop(
            url, lambda n: prompts.ask(LONG, FIRST + n), 2, lambda begun, _: begun == PROMPTS
        )
    )
    return PROMPTS / max(answer.events_s[0] for answer in answers)


def finished_in(answers: Sequence[Answer], start_s: float, end_s: float) -> float:
    """Requests a second that ended in that time."""
    return sum(start_s <= a.events_s[-1] < end_s for a in answers) / (end_s - start_s)


def closed_rate(
    url: str, prompts: Prompts, long_rate: float, in_flight: int, seconds: float
) -> float:
    """Short requests a second, always so many of them in flight, under the long ones."""
    end_s = RAMP_S + seconds
    longs = prompts.all_of(schedule(long_rate, 1.0, end_s, 0, seed=-in_flight))
    background = [asked for asked in longs if asked.kind == LONG]
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


def in_flight_at(
    url: str, prompts: Prompts, long_rate: float, rate: float, seconds: float, seed: int
) -> float:
    """Short requests in flight on the mean when they come at that rate, under the long ones."""
    plan = schedule(long_rate, rate, seconds, 0, seed)
    asked = tuple(replace(a, number=FIRST + 100_000 * seed + a.number) for a in plan.arrivals)
    answers = asyncio.run(open_loop(url, prompts.all_of(replace(plan, arrivals=asked))))
    return float(summary(answers, plan.seconds)["short_in_flight"])


def calibrate(seconds: float) -> dict[str, Any]:
    """The rates, in requests a second; `seconds` for each of two closed loops, twice that for each
    of two open ones: long prompts come in bursts there, so fewer short ones keep as many in flight.
    """
    with system(SEPARATED) as fleet:
        prompts = Prompts(fleet.url)
        warm_up(fleet, prompts)
        most = capacity(fleet.url, prompts)
        long_rate = LOAD * most
        measured = [(n, closed_rate(fleet.url, prompts, long_rate, n, seconds)) for n in AROUND]
        queue, opened = Queue.of(measured), []
        for seed in OPEN_SEEDS:
            rate = queue.rate_for(IN_FLIGHT)
            there = in_flight_at(fleet.url, prompts, long_rate, rate, 2 * seconds, seed)
            opened.append([round(rate, 3), there])
            queue = queue.seen(rate, there)
        return {
            "capacity_tokens_s": round(4_000 * most, 1),
            "closed_loop": [[n, round(rate, 3)] for n, rate in measured],
            "open_loop": opened,
            "long_rate": round(long_rate, 4),
            "short_rate": round(queue.rate_for(IN_FLIGHT), 4),
        }
