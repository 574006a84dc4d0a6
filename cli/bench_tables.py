"""The tables of `pdserve bench`: of one run, of a sweep over rates, and of two compared runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.cli.load import PERCENTILES

Figures = Mapping[str, Any]
TIMES = {
    "ttft_ms": "time to first token",
    "itl_ms": "between two tokens",
    "tpot_ms": "time per output token",
    "e2e_ms": "whole request",
}
COLUMNS = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
RATES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "tokens/s in all",
}
COMPARED_PERCENTILES = ("p50", "p99")
# What two runs must have in common, or their figures differ for that reason.
LOAD = (
    *("model", "endpoint", "dataset", "rate", "concurrency"),
    *("input_tokens", "output_tokens_asked", "requests"),
    *("temperature", "ignore_eos", "warmup"),
)


def run_table(figures: Figures) -> str:
    """Format the statistics of one run as lines of text."""
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


def sweep_rows(runs: Sequence[Figures]) -> list[list[str]]:
    """Return the table of a sweep as texts: the head, then a row for each rate."""
    has_slo = any("slo_ms" in run for run in runs)
    head = ["rate", "req/s", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "failed"]
    rows = [head + ["in SLO"] * has_slo]
    for run in runs:
        ttft, itl = run["ttft_ms"], run["itl_ms"]
        row = [f"{run['rate']:g}", f"{run['requests_per_s']:.2f}"]
        row.append(f"{run['output_tokens_per_s']:.1f}")
        row += [f"{times[p]:.1f}" for times in (ttft, itl) for p in COMPARED_PERCENTILES]
        row.append(str(run["requests"] - run["completed"]))
        rows.append(row + ([f"{run['slo_attainment']:.0%}"] if has_slo else []))
    return rows


def sweep_table(runs: Sequence[Figures]) -> str:
    """Format a sweep as lines of text, times in milliseconds."""
    rows = sweep_rows(runs)
    widths = [2 + max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("".join(map(str.rjust, row, widths)) + "\n" for row in rows)


def comparison(first: Path, second: Path) -> str:
    """Format the figures of two result files side by side, with the second by the first. Runs of
    two sweeps are paired by their rates. Raises ValueError if a file is not a result of `pdserve
    bench`, or if no run has a counterpart."""
    pairs = list(_paired(_runs(first), _runs(second)))
    if not pairs:
        raise ValueError(f"{first} and {second} have no rate in common")
    lines = [f"A: {first}", f"B: {second}"]
    for a, b in pairs:
        load = f"rate {a['rate']:g}/s" if a["rate"] else f"{a['concurrency']} at once"
        lines += ["", f"{load + ' (times in ms)':28}{'A':>12}{'B':>12}{'B/A':>9}"]
        lines += [_compared(title, a[key], b[key]) for key, title in RATES.items()]
        for key, title in TIMES.items():
            for p in COMPARED_PERCENTILES:
                lines.append(_compared(f"{title}, {p}", a[key][p], b[key][p]))
        for name in LOAD:
            if a.get(name) != b.get(name):
                lines.append(f"differs: {name} is {a.get(name)} in A, {b.get(name)} in B")
    return "".join(f"{line}\n" for line in lines)


def _compared(title: str, a: float, b: float) -> str:
    ratio = f"{b / a:9.3f}" if a else f"{'-':>9}"
    return f"{title:28}{a:12.2f}{b:12.2f}{ratio}"


def _paired(
    first: Sequence[Figures], second: Sequence[Figures]
) -> Iterator[tuple[Figures, Figures]]:
    if len(first) == len(second) == 1:
        yield first[0], second[0]
        return
    of_rate = {run["rate"]: run for run in second}
    for run in first:
        if run["rate"] in of_rate:
            yield run, of_rate[run["rate"]]


def _runs(path: Path) -> Sequence[Figures]:
    """Return the figures of each run in a result file. Raises ValueError."""
    try:
        result = json.loads(path.read_text())
        runs = result.get("runs", [result])
        for run in runs:
            for key in ("rate", "concurrency", *RATES):
                run[key]
            for key in TIMES:
                for p in COMPARED_PERCENTILES:
                    float(run[key][p])
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a result of `pdserve bench --json`") from None
    return list(runs)
