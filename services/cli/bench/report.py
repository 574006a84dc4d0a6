"""Formats a benchmark's statistics as a table, histograms and a line of throughput over time.
Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.services.cli.bench.measure import PERCENTILES, Sample

TIMES = {
    "ttft_ms": "time to first token",
    "itl_ms": "between two tokens",
    "tpot_ms": "time per output token",
    "e2e_ms": "whole request",
}
COLUMNS = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
BINS, BAR = 10, 40  # of a histogram: rows, columns
SLOTS = 60  # columns of the line over time
EIGHTHS = " ▁▂▃▄▅▆▇█"


def table(figures: Mapping[str, Any]) -> str:
    """The table, with a newline after each line."""
    lines = [
        f"{figures['completed']} of {figures['requests']} requests in "
        f"{figures['duration_s']:.1f} s, {figures['mean_concurrency']:.1f} at once on average",
        f"{figures['requests_per_s']:.2f} requests/s, {figures['output_tokens_per_s']:.1f} output "
        f"tokens/s, {figures['total_tokens_per_s']:.1f} tokens/s in all",
        "",
        f"{'milliseconds':22}" + "".join(f"{name:>9}" for name in COLUMNS),
    ]
    for key, title in TIMES.items():
        lines.append(f"{title:22}" + "".join(f"{figures[key][name]:9.1f}" for name in COLUMNS))
    if "slo_ms" in figures:
        bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in figures["slo_ms"].items())
        lines += [
            "",
            f"goodput: {figures['goodput_requests_per_s']:.2f} requests/s met {bounds} "
            f"({figures['slo_attainment']:.0%})",
        ]
    for message, count in figures["errors"].items():
        lines.append(f"{count} failed: {message}")
    return "".join(f"{line}\n" for line in lines)


def plot(samples: Sequence[Sample]) -> str:
    """Histograms of the first and the further tokens, and output tokens over time."""
    good = [sample for sample in samples if not sample.error]
    if not good:
        return ""
    return (
        histogram("time to first token, ms", [sample.ttft_s * 1000 for sample in good])
        + histogram("between two tokens, ms", [g * 1000 for sample in good for g in sample.gaps_s])
        + over_time(good)
    )


def histogram(title: str, values: Sequence[float]) -> str:
    """One row per tenth of the range up to the 99th percentile; the last row includes larger
    values."""
    if not values:
        return ""
    ordered = sorted(values)
    low, high = ordered[0], ordered[int((len(ordered) - 1) * 0.99)]
    width = (high - low) / BINS
    counts = [0] * BINS
    for value in ordered:
        counts[min(BINS - 1, int((value - low) / width)) if width else 0] += 1
    max_count = max(counts)
    rows = [f"\n{title}\n"]
    for number, count in enumerate(counts if width else counts[:1]):
        overflow_mark = "+" if number == BINS - 1 and ordered[-1] > high else " "
        rows.append(
            f"{low + number * width:10.1f}{overflow_mark} {bar(count / max_count):{BAR}} {count}\n"
        )
    return "".join(rows)


def bar(share: float) -> str:
    """A bar of up to BAR columns, in eighths."""
    eighths = round(share * BAR * 8)
    partial = " ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else ""
    return "█" * (eighths // 8) + (partial or ("▏" if share and not eighths else ""))


def over_time(samples: Sequence[Sample]) -> str:
    """Output tokens per second from the first request to the last end."""
    begin = min(sample.started for sample in samples)
    span = max(sample.ended for sample in samples) - begin
    if span <= 0:
        return ""
    counts = [0.0] * SLOTS
    for sample in samples:
        tokens_per_text = sample.output_tokens / len(sample.arrivals)  # tokens of one text
        for arrival in sample.arrivals:
            counts[min(SLOTS - 1, int((arrival - begin) / span * SLOTS))] += tokens_per_text
    max_count = max(counts)
    line = "".join(EIGHTHS[round(count / max_count * 8)] for count in counts)
    rate = max_count * SLOTS / span
    return f"\noutput tokens/s over {span:.1f} s, at most {rate:.0f}\n{line}\n"
