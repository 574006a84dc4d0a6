"""The prefill capacity of one core, and the speed of short requests under that load.

Both are measured on the separated pair.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from interference.arrivals import LONG, SHORT, schedule
from interference.client import closed_loop, open_loop
from interference.configurations import Prompts, system, warm_up
from interference.figures import SEPARATED, Answer

PROMPTS = 4  # that measure the capacity
AROUND = (4, 20)  # in flight while the time of a request is measured
LOAD = 0.5  # of the capacity
RAMP_S = 8.0  # at the beginning of a closed loop, not counted
FIRST = 2_000_000  # numbers of prompts, different from those of the runs


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
