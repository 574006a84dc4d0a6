"""The two rates: half of what one core can prefill, and what keeps eight short requests in flight.

Both are measured on the separated pair and then hold for every configuration.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from interference.arrivals import LONG, SHORT, schedule
from interference.client import Answer, closed_loop, open_loop
from interference.configurations import Prompts, system, warm_up
from interference.figures import SEPARATED

PROMPTS = 4  # that measure the capacity
IN_FLIGHT = 8
AROUND = (4, 12)  # in flight while the time of a request is measured
LOAD = 0.5  # of the capacity
RAMP_S = 8.0  # at the beginning of a closed loop, not counted
FIRST = 2_000_000  # numbers of prompts, apart from those of the runs


def rate_for(in_flight: float, measured: Sequence[tuple[int, float]]) -> float:
    """Poisson arrivals a second that have `in_flight` requests there on the mean. Pure.

    `measured`: (requests always in flight, requests a second) twice. A request takes a + b n
    seconds among n; in a queue that serves all its n requests alike at n / (a + b n) a second the
    number of them is negative binomial, with mean r p / (1 - p), r = a / b + 1, p = rate * b.
    Raises RuntimeError if a request does not take longer among more.
    """
    (few, few_s), (many, many_s) = ((n, n / rate) for n, rate in measured)
    b = (many_s - few_s) / (many - few)
    a = few_s - b * few
    if b <= 0:
        raise RuntimeError(f"{few_s:.2f} s among {few} and {many_s:.2f} s among {many} requests")
    r = max(0.0, a) / b + 1
    return in_flight / (in_flight + r) / b


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


def calibrate(seconds: float) -> dict[str, Any]:
    """The rates, in requests a second; `seconds` for each of two closed loops."""
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
            "short_rate": round(rate_for(IN_FLIGHT, measured), 4),
        }
