"""Conversation traces in Mooncake's format: generated from a seed, or read from a file.

A line is a JSON object with timestamp (ms), input_length, output_length and hash_ids, one id for
each block of 512 prompt tokens, the last one partial; equal leading ids mean a common prefix. The
defaults of `Shape` are near the statistics of the conversation trace that Mooncake publishes.
"""

import bisect
import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    arrival_s: float
    num_tokens: int  # of the prompt
    output_len: int
    blocks: tuple[int, ...]  # ids of all blocks, including the partial one

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """Blocks that a prefix cache can serve: the last token is always computed."""
        return self.blocks[: (self.num_tokens - 1) // BLOCK_TOKENS]


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of a generated trace. Lengths are medians and sigmas of log-normal draws."""

    num_requests: int = 12_000
    duration_s: float = 3_600.0
    day_amplitude: float = 0.2  # of the arrival rate's sine, whose period is the duration
    more_turns: float = 0.42  # chance that a turn is followed by another
    gap_s: tuple[float, float] = (110.0, 0.9)  # between a turn and the next
    # tokens of a first prompt beyond the shared ones
    question: tuple[float, float] = (3_800.0, 1.3)
    next_question: tuple[float, float] = (250.0, 1.1)  # tokens that a turn adds to the answer
    attachment: float = 0.1  # chance that a turn also adds a document
    document: tuple[float, float] = (6_000.0, 0.9)
    output: tuple[float, float] = (290.0, 0.6)
    apps: int = 40  # system prompts, chosen by Zipf's law
    app_blocks: int = 4  # blocks of the longest of them, in addition to the common one
    known_document: float = 0.06  # chance that a first prompt begins with a document of `documents`
    documents: int = 100  # each belongs to a system prompt
    single_document: float = 0.03  # chance of a single question about a long unshared document
    long_document: tuple[float, float] = (60_000.0, 0.4)
    zipf: float = 1.1
    most_tokens: int = 126_000
    most_output: int = 2_000


def generate(seed: int, shape: Shape = Shape()) -> list[TraceRequest]:
    """A trace in order of arrival."""
    return _Generator(Random(seed), shape).trace()


class _Generator:
    def __init__(self, rng: Random, shape: Shape) -> None:
        self._rng = rng
        self._shape = shape
        self._num_blocks = 1  # block 0 begins every prompt
        self._popular = {n: _zipf(n, shape.zipf) for n in {shape.apps, shape.documents}}
        sizes = [rng.randint(0, shape.app_blocks) for _ in range(shape.apps)]
        self._apps = [(0, *self._fresh(size)) for size in sizes]
        tokens = (self._length(shape.document) for _ in range(shape.documents))
        self._documents = [self._pick(self._apps) + self._fresh(n // BLOCK_TOKENS) for n in tokens]

    def trace(self) -> list[TraceRequest]:
        """The trace; conversations also begin before it, so that it starts in the middle of a
        day."""
        shape, found = self._shape, list[TraceRequest]()
        turns = 1 / (1 - shape.more_turns)
        singles = shape.single_document
        rate = shape.num_requests / shape.duration_s / ((1 - singles) * turns + singles)
        now = -shape.duration_s / 3
        while now < shape.duration_s:
            phase = math.sin(2 * math.pi * now / shape.duration_s)
            now += self._rng.expovariate(rate * (1 + shape.day_amplitude * phase))
            found += self._conversation(now)
        kept = [r for r in found if 0 <= r.arrival_s < shape.duration_s]
        return sorted(kept, key=lambda r: r.arrival_s)

    def _conversation(self, now: float) -> Iterable[TraceRequest]:
        shape, rng = self._shape, self._rng
        known = rng.random() < shape.known_document
        blocks = list(self._pick(self._documents if known else self._apps))
        if rng.random() < shape.single_document:
            num_tokens = len(blocks) * BLOCK_TOKENS + self._length(shape.long_document)
            yield self._request(now, num_tokens, blocks)
            return
        num_tokens = len(blocks) * BLOCK_TOKENS + self._length(shape.question)
        while num_tokens <= shape.most_tokens:
            request = self._request(now, num_tokens, blocks)
            yield request
            if rng.random() >= shape.more_turns:
                return
            now += rng.lognormvariate(math.log(shape.gap_s[0]), shape.gap_s[1])
            num_tokens += request.output_len + self._length(shape.next_question)
            if rng.random() < shape.attachment:
                num_tokens += self._length(shape.document)

    def _request(self, now: float, num_tokens: int, blocks: list[int]) -> TraceRequest:
        """Extend `blocks`; the partial one is not kept, since the next turn's has other tokens."""
        num_tokens = min(num_tokens, self._shape.most_tokens)
        blocks += self._fresh(num_tokens // BLOCK_TOKENS - len(blocks))
        rest = self._fresh(1) if num_tokens % BLOCK_TOKENS else ()
        output = min(self._length(self._shape.output), self._shape.most_output)
        return TraceRequest(now, num_tokens, output, (*blocks, *rest))

    def _fresh(self, count: int) -> tuple[int, ...]:
        first = self._num_blocks
        self._num_blocks += max(0, count)
        return tuple(range(first, self._num_blocks))

    def _length(self, of: tuple[float, float]) -> int:
        return max(1, round(self._rng.lognormvariate(math.log(of[0]), of[1])))

    def _pick(self, of: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        sums = self._popular[len(of)]
        return of[bisect.bisect(sums, self._rng.random() * sums[-1])]


def _zipf(count: int, exponent: float) -> list[float]:
    return list(accumulate(1 / rank**exponent for rank in range(1, count + 1)))


def read(path: Path) -> list[TraceRequest]:
    """A trace from a file. Raises ValueError that names the line and the field."""
    found, before = list[TraceRequest](), dict[int, int]()
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    found.append(_parsed(json.loads(line), before))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
    return sorted(found, key=lambda r: r.arrival_s)


def _parsed(fields: dict[str, Any], before: dict[int, int]) -> TraceRequest:
    """A parsed line. `before`: for each block its predecessor, over all lines so far."""
    missing = {"timestamp", "input_length", "output_length", "hash_ids"} - fields.keys()
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    for name in ("timestamp", "input_length", "output_length"):
        if not isinstance(fields[name], int | float):
            raise ValueError(f"{name} is not a number")
    num_tokens, blocks = int(fields["input_length"]), tuple(fields["hash_ids"])
    if num_tokens < 1:
        raise ValueError("input_length is below 1")
    if len(blocks) < num_tokens // BLOCK_TOKENS:
        raise ValueError("hash_ids are fewer than the full blocks of input_length")
    if not all(isinstance(block, int) and 0 <= block < 2**32 for block in blocks):
        raise ValueError("hash_ids are not all integers below 2**32")
    for block, last in zip(blocks, (-1, *blocks), strict=False):
        if before.setdefault(block, last) != last:
            raise ValueError(f"hash_ids: {block} stands behind {last} and {before[block]}")
    return TraceRequest(
        fields["timestamp"] / 1000, num_tokens, max(1, int(fields["output_length"])), blocks
    )


def statistics(trace: Sequence[TraceRequest]) -> dict[str, float]:
    """Statistics of a trace without a fleet. Shares are of prompt tokens."""
    prompts = sorted(r.num_tokens for r in trace)
    outputs = sorted(r.output_len for r in trace)
    seen: dict[int, float] = {}  # by block: when it was last in a prompt
    cached, goes_on, gaps = 0, 0, []
    for request in trace:
        blocks = request.full_blocks
        known = leading(blocks, seen)
        cached += known * BLOCK_TOKENS
        if known > 1:
            goes_on += 2 * known >= len(blocks)
            gaps.append(request.arrival_s - seen[blocks[known - 1]])
        seen |= dict.fromkeys(blocks, request.arrival_s)
    gaps.sort()
    span = trace[-1].arrival_s - trace[0].arrival_s
    return {
        "requests": len(trace),
        "requests_per_s": round(len(trace) / max(span, 1e-9), 2),
        "prompt_mean": round(sum(prompts) / len(trace)),
        "prompt_p50": at(prompts, 0.5),
        "prompt_p90": at(prompts, 0.9),
        "prompt_p99": at(prompts, 0.99),
        "output_mean": round(sum(outputs) / len(trace)),
        "output_p99": at(outputs, 0.99),
        "blocks": len(seen),
        "reuse": round(cached / sum(prompts), 3),  # with one unbounded cache
        "half_known": round(goes_on / len(trace), 3),  # requests with half their blocks seen before
        "gap_s_p50": round(at(gaps, 0.5)),  # since the last use of the prefix, without block 0
        "gap_s_p90": round(at(gaps, 0.9)),
    }


def leading(blocks: Sequence[int], known: Container[int]) -> int:
    """The number of leading blocks among the known."""
    return next((n for n, block in enumerate(blocks) if block not in known), len(blocks))


def at(values: Sequence[float], share: float) -> float:
    """That quantile of sorted values; 0 for no values."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
