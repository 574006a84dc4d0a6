"""The arrival times of requests: two Poisson streams from a seed. Pure; the same for every
configuration."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

LONG, SHORT = "long", "short"
LEAST_LONG = 30  # long prompts of a whole run


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of a kind of request; every answer has exactly `new`."""

    prompt: int
    new: int


SHAPES = {LONG: Shape(4_000, 32), SHORT: Shape(128, 256)}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds after the start, its kind, and the number of its prompt."""

    at_s: float
    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """All requests of a run, in order; arrivals end at `seconds`."""

    arrivals: tuple[Arrival, ...]
    seconds: float


def poisson(rate: float, seconds: float, least: int, rng: random.Random) -> list[float]:
    """Arrival times up to `seconds`, extended until there are `least`."""
    times: list[float] = []
    at = rng.expovariate(rate)
    while at < seconds or len(times) < least:
        times.append(at)
        at += rng.expovariate(rate)
    return times


def schedule(
    long_rate: float, short_rate: float, seconds: float, least_long: int, seed: int
) -> Schedule:
    """A run of at least `seconds`, extended until `least_long` long prompts have arrived; rates in
    requests per second."""
    longs = poisson(long_rate, seconds, least_long, random.Random(f"{LONG} {seed}"))
    seconds = max(seconds, longs[-1] if longs else 0.0)
    shorts = poisson(short_rate, seconds, 0, random.Random(f"{SHORT} {seed}"))
    arrivals = [
        Arrival(at, kind, number)
        for kind, times in ((LONG, longs), (SHORT, shorts))
        for number, at in enumerate(times)
    ]
    return Schedule(tuple(sorted(arrivals, key=lambda a: a.at_s)), seconds)


def prompt_ids(text: Sequence[int], vocab: int, kind: str, number: int) -> list[int]:
    """Prompt `number` of a kind: three ids that no other prompt begins with, then a slice of
    `text`, so that prefix caches do not help and the answer is text."""
    rng = random.Random(f"{kind} prompt {number}")
    length = SHAPES[kind].prompt - 3
    at = rng.randrange(len(text) - length)
    return [rng.randrange(300, vocab) for _ in range(3)] + list(text[at : at + length])
