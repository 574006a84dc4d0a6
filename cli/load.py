"""Sends the requests of a benchmark and measures them. An open loop sends them at random times,
regardless of the server; a closed loop keeps a constant number of requests in flight.

The definitions are those of vLLM (benchmarks/serving): TTFT (time to first token) lasts from the
start of a request to its first text, ITL (inter-token latency) is the gap between two texts, TPOT
is the mean time per output token after the first, E2E is the time of the whole request.
"""

import asyncio
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.http_client import ApiError

PERCENTILES = (50, 90, 95, 99)
SLO_TIMES = ("ttft", "itl", "tpot", "e2e")
MAX_RATES = 100  # of a sweep
SATURATED = 0.8  # of the rate of requests; random arrivals alone seldom cause less
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)?")
_SECONDS = {"ms": 1e-3, "s": 1.0}
Bodies = Iterator[bytes]


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one request; times are seconds of one clock. `arrivals` are the times at
    which its pieces of text arrived."""

    started: float
    arrivals: tuple[float, ...]
    ended: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def e2e_s(self) -> float:
        return self.ended - self.started

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        """Mean seconds per output token after the first; 0 for fewer than two tokens."""
        if self.output_tokens < 2:
            return 0.0
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, interpolated as numpy does; 0 if there are no
    values."""
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, percentiles and maximum in milliseconds of values in seconds."""
    ordered = sorted(value * 1000 for value in values)
    figures = {"mean": sum(ordered) / len(ordered) if ordered else 0.0}
    figures |= {f"p{p}": percentile(ordered, p) for p in PERCENTILES}
    return figures | {"max": ordered[-1] if ordered else 0.0}


def parse_slo(text: str) -> dict[str, float]:
    """Parse service level objectives, such as "ttft=500ms,itl=50", to the limit in seconds by name;
    the default unit is ms. Raises ValueError if a limit is malformed."""
    bounds = {}
    for part in filter(None, (item.strip() for item in text.split(","))):
        name, _, value = part.partition("=")
        match = _DURATION.fullmatch(value.strip())
        if name not in SLO_TIMES or not match:
            raise ValueError(
                f"{part!r} is not a valid bound: write ttft=500ms,itl=50ms "
                f"(times: {', '.join(SLO_TIMES)})"
            )
        bounds[name] = float(match[1]) * _SECONDS[match[2] or "ms"]
    return bounds


def parse_rates(text: str) -> list[float]:
    """Parse rates in requests per second: a list such as "1,2,4", or START:STOP:FACTOR, which
    multiplies START by FACTOR up to STOP. Raises ValueError unless they are positive and grow, and
    at most MAX_RATES."""
    try:
        if ":" in text:
            start, stop, factor = map(float, text.split(":"))
            if not (0 < start <= stop < math.inf and 1 < factor < math.inf):
                raise ValueError
            num = 1 + math.floor(math.log(stop / start) / math.log(factor) + 1e-9)
            rates = [start * factor**n for n in range(min(num, MAX_RATES + 1))]
        else:
            rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    grows = all(a < b for a, b in zip([0.0, *rates], [*rates, math.inf], strict=True))
    if not rates or not grows or len(rates) > MAX_RATES:
        raise ValueError(
            f"{text!r} is neither a growing list of rates, such as 1,2,4, nor START:STOP:FACTOR, "
            f"such as 1:16:2; at most {MAX_RATES} rates"
        )
    return rates


def is_saturated(samples: Sequence[Sample]) -> bool:
    """Return whether a server could not keep up with an open loop: a request failed, or responses
    ended at less than SATURATED of the rate at which requests began. False for fewer than two
    samples."""
    if any(sample.error for sample in samples):
        return True
    starts, ends = [s.started for s in samples], [s.ended for s in samples]
    if len(samples) < 2 or max(ends) <= min(ends):
        return False
    return (max(starts) - min(starts)) / (max(ends) - min(ends)) < SATURATED


def output_rates(samples: Sequence[Sample], num_parts: int) -> list[tuple[float, float]]:
    """Return the output tokens per second in equal parts of the time from the first request's start
    to the last one's end, each with the time in seconds at its middle. `samples` are without
    errors; the result is empty if they took no time."""
    begin = min((sample.started for sample in samples), default=0.0)
    span = max((sample.ended for sample in samples), default=0.0) - begin
    if span <= 0:
        return []
    counts = [0.0] * num_parts
    for sample in samples:
        tokens_per_text = sample.output_tokens / len(sample.arrivals)
        for arrival in sample.arrivals:
            part = min(num_parts - 1, int((arrival - begin) / span * num_parts))
            counts[part] += tokens_per_text
    return [((n + 0.5) * span / num_parts, c * num_parts / span) for n, c in enumerate(counts)]


def meets_slo(sample: Sample, slo: Mapping[str, float]) -> bool:
    """Return whether a request stayed within every limit of `slo`; `itl` limits the 99th percentile
    of the gaps between its texts. False if the request failed."""
    if sample.error:
        return False
    times = {
        "ttft": sample.ttft_s,
        "itl": percentile(sorted(sample.gaps_s), 99),
        "tpot": sample.tpot_s,
        "e2e": sample.e2e_s,
    }
    return all(times[name] <= bound for name, bound in slo.items())


def summarize(samples: Sequence[Sample], slo: Mapping[str, float]) -> dict[str, Any]:
    """Compute the statistics of a benchmark run: counts, rates over its whole duration, and the
    spread of each latency in milliseconds. With `slo`, also the requests within its limits."""
    good = [sample for sample in samples if not sample.error]
    wall_s = max((s.ended for s in samples), default=0.0) - min(
        (s.started for s in samples), default=0.0
    )
    per_s = 1 / wall_s if wall_s > 0 else 0.0
    output = sum(sample.output_tokens for sample in good)
    prompt = sum(sample.prompt_tokens for sample in good)
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    figures: dict[str, Any] = {
        "requests": len(samples),
        "completed": len(good),
        "errors": errors,
        "duration_s": wall_s,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(good) * per_s,
        "output_tokens_per_s": output * per_s,
        "total_tokens_per_s": (prompt + output) * per_s,
        "mean_concurrency": sum(sample.e2e_s for sample in good) * per_s,
        "ttft_ms": spread([sample.ttft_s for sample in good]),
        "itl_ms": spread([gap for sample in good for gap in sample.gaps_s]),
        "tpot_ms": spread([sample.tpot_s for sample in good if sample.output_tokens > 1]),
        "e2e_ms": spread([sample.e2e_s for sample in good]),
    }
    if slo:
        num_meeting_slo = sum(meets_slo(sample, slo) for sample in samples)
        figures["slo_ms"] = {name: bound * 1000 for name, bound in slo.items()}
        figures["slo_attainment"] = num_meeting_slo / len(samples) if samples else 0.0
        figures["goodput_requests_per_s"] = num_meeting_slo * per_s
    return figures


OnSample = Callable[[Sample], None]


async def open_loop(
    api: AsyncApi, path: str, bodies: Bodies, rate: float, seed: int, on_sample: OnSample
) -> None:
    """Send requests at random times, on average `rate` per second (a Poisson process), without
    waiting for responses."""
    rng = random.Random(seed)
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for body in bodies:
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(send_request(api, path, body, on_sample))
            due += rng.expovariate(rate)


async def closed_loop(
    api: AsyncApi, path: str, bodies: Bodies, concurrency: int, on_sample: OnSample
) -> None:
    """Run `concurrency` clients, each of which sends its next request after the response to its
    last."""

    async def client() -> None:
        for body in bodies:
            await send_request(api, path, body, on_sample)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())


async def send_request(api: AsyncApi, path: str, body: bytes, on_sample: OnSample) -> None:
    """Send one streamed request and pass its measurements to `on_sample`; an error is recorded in
    the sample."""
    events = _Events()
    started = time.perf_counter()
    error = ""
    try:
        response = (await api.post(path, body, events.take)).check()
        if not response.body and not events.arrivals:
            error = "the response has no text"
    except ApiError as api_error:
        error = str(api_error)
    on_sample(
        Sample(
            started,
            tuple(events.arrivals),
            time.perf_counter(),
            events.usage.get("prompt_tokens", 0),
            events.usage.get("completion_tokens", 0) or len(events.arrivals),
            error or events.error,
        )
    )


class _Events:
    """Parses the server-sent events of one response; records when each piece of text arrives, the
    token counts, and an error."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.usage: Mapping[str, Any] = {}
        self.error = ""
        self._rest = b""

    def take(self, piece: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._event(json.loads(line[6:]), now)

    def _event(self, event: dict[str, Any], now: float) -> None:
        if failure := event.get("error"):
            self.error = str(failure.get("message", failure))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            if delta.get("text") or delta.get("content") or delta.get("reasoning_content"):
                self.arrivals.append(now)
                return
