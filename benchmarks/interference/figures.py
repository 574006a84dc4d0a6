"""Figures of a run and the comparison of all runs. Pure.

Inter-token latency is the time between two events of one stream. An event carries one token unless
the outbox of a slow hop has merged some (`tokens_per_event`); merged ones count as one gap, the
whole of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from interference.arrivals import LONG, SHAPES, SHORT

TTFT_SLACK = 1.25
# A request is good if its first token arrives within the first number of seconds, and 99 % of its
# gaps are at most GOOD_ITL_S.
GOOD_TTFT_S = {LONG: 15.0, SHORT: 1.0}
GOOD_ITL_S = 0.05
SEPARATED = "separated"


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole stream; seconds since the start of the run."""

    kind: str
    planned_s: float
    sent_s: float
    events_s: tuple[float, ...]  # when each event with text arrived
    prompt_tokens: int
    completion_tokens: int


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value with at least `share` of all at or below it; 0 for no values."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def gaps(answer: Answer) -> list[float]:
    """Seconds between the events of an answer."""
    return [b - a for a, b in zip(answer.events_s, answer.events_s[1:], strict=False)]


def ttft(answer: Answer) -> float:
    """Seconds from the planned time of the request to its first token."""
    return answer.events_s[0] - answer.planned_s


def is_good(answer: Answer) -> bool:
    quick = ttft(answer) <= GOOD_TTFT_S[answer.kind]
    return quick and percentile(gaps(answer), 0.99) <= GOOD_ITL_S


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles, maximum and mean, in milliseconds."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    figures = {name: round(1000 * percentile(seconds, share), 2) for name, share in shares.items()}
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    return figures | {"mean": round(1000 * mean, 2)}


def tokens_by(answer: Answer, end_s: float) -> float:
    """Tokens received by `end_s`, with merged ones spread evenly over the events."""
    there = sum(at <= end_s for at in answer.events_s)
    return answer.completion_tokens * there / len(answer.events_s)


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """The published figures of one run. Raises RuntimeError if a length differs from the
    request."""
    for answer in answers:
        shape = SHAPES[answer.kind]
        got = answer.prompt_tokens, answer.completion_tokens
        if got != (shape.prompt, shape.new):
            raise RuntimeError(f"a {answer.kind} request of {got} tokens")
    kinds = {kind: [a for a in answers if a.kind == kind] for kind in SHAPES}
    lasted = sum(a.events_s[-1] - a.planned_s for a in kinds[SHORT])
    tokens = sum(a.completion_tokens for a in answers)
    return {
        "requests": {kind: len(some) for kind, some in kinds.items()},
        "itl_ms": spread([gap for a in answers for gap in gaps(a)]),
        "itl_short_ms": spread([gap for a in kinds[SHORT] for gap in gaps(a)]),
        "ttft_ms": {
            "all": spread([ttft(a) for a in answers]),
            **{kind: spread([ttft(a) for a in some]) for kind, some in kinds.items()},
        },
        "completed_tokens": round(sum(tokens_by(a, seconds) for a in answers)),
        "tokens_s": round(sum(tokens_by(a, seconds) for a in answers) / seconds, 1),
        "goodput_requests_s": round(sum(map(is_good, answers)) / seconds, 3),
        "good_share": round(sum(map(is_good, answers)) / len(answers), 3),
        "short_in_flight": round(lasted / seconds, 2),
        "tokens_per_event": round(tokens / sum(len(a.events_s) for a in answers), 3),
        "sent_late_ms": spread([a.sent_s - a.planned_s for a in answers]),
        "drained_s": round(max(a.events_s[-1] for a in answers) - seconds, 1),
    }


def best_mixed(runs: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The mixed configuration to compare with, and its candidates: the lowest p99 of those whose
    mean TTFT, of all requests or of the long ones alone, is at most 1.25 times the minimum. Either
    is enough, so that no good rival is left out."""
    mixed = {name: run for name, run in runs.items() if name != SEPARATED}
    fit: list[str] = []
    for kind in ("all", LONG):
        means = {name: run["ttft_ms"][kind]["mean"] for name, run in mixed.items()}
        least = min(means.values())
        fit += [name for name in mixed if means[name] <= TTFT_SLACK * least and name not in fit]
    return min(fit, key=lambda name: mixed[name]["itl_ms"]["p99"]), fit


def comparison(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The separated pair against the best mixed one; `runs` are summaries by configuration."""
    ours = runs[SEPARATED]
    name, fit = best_mixed(runs)
    theirs = runs[name]
    ratio = theirs["itl_ms"]["p99"] / ours["itl_ms"]["p99"]
    tokens = ours["completed_tokens"] / theirs["completed_tokens"]
    return {
        "p99_itl_ratio": round(ratio, 2),
        "tokens_ratio": round(tokens, 3),
        "best_mixed": name,
        "chosen_from": fit,
        "separated": brief(ours),
        "mixed": brief(theirs),
    }


def brief(run: Mapping[str, Any]) -> dict[str, Any]:
    """The main figures of a run."""
    itl = run["itl_ms"]
    return {
        "itl_ms": {key: itl[key] for key in ("p50", "p99", "max")},
        "ttft_p50_ms": {kind: run["ttft_ms"][kind]["p50"] for kind in (LONG, SHORT)},
        "completed_tokens": run["completed_tokens"],
        "goodput_requests_s": run["goodput_requests_s"],
        "failed": run["failed"],
    }
