"""`pdserve bench` sends requests to a running server and reports its latency and throughput."""

import asyncio
import json
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.commands import STOPPED
from pdserve.cli.http_client import ApiError
from pdserve.cli.load import (
    PERCENTILES,
    Sample,
    closed_loop,
    open_loop,
    parse_slo,
    send_request,
    summarize,
)
from pdserve.cli.options import BenchSettings, OptionError, Settings
from pdserve.cli.progress import ProgressView, progress_on

# Words that are one token each, after a space, in most vocabularies.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law "
    "car city community name president team minute idea body information back parent face others "
    "level office door health person art war history party result change morning reason research "
    "girl guy moment air teacher force education"
)
WORDS = tuple(_TEXT.split(" "))
TRIES = 40
NO_ROUTE = (404, 405, 501)
CountTokens = Callable[[str], Awaitable[int]]
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
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


async def make_prompts(
    api: AsyncApi, model: str, count: int, num_tokens: int, seed: int
) -> tuple[list[str], bool]:
    """Make `count` random prompts of `num_tokens` tokens. Returns them, and whether the server's
    tokenizer has confirmed their length; if the server has no /tokenize, they have `num_tokens`
    words instead. Raises ApiError if the server refuses, or if no prompt has the length."""
    rng = random.Random(seed)

    async def tokens(text: str) -> int:
        response = await api.post("/tokenize", {"model": model, "prompt": text})
        if response.status in NO_ROUTE:
            raise LookupError
        return int(response.check().json["count"])

    try:
        return [await prompt_of_length(rng, num_tokens, tokens) for _ in range(count)], True
    except LookupError:
        return [random_words(rng, num_tokens) for _ in range(count)], False


def random_words(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, num_words)))


async def prompt_of_length(rng: random.Random, num_tokens: int, tokens: CountTokens) -> str:
    """Make a random text of exactly `num_tokens` tokens, as counted by `tokens`. Raises ApiError if
    none is found in TRIES tries."""
    words = rng.choices(WORDS, k=max(1, num_tokens))
    for _ in range(TRIES):
        text = " ".join(words)
        num_text_tokens = await tokens(text)
        missing = num_tokens - num_text_tokens
        if not missing:
            return text
        # In words, each of several tokens.
        part = round(abs(missing) * len(words) / max(1, num_text_tokens))
        # For tokenizers of characters.
        shortened = text[:missing] if missing < 0 and part <= 1 else ""
        if missing > 0:
            words += rng.choices(WORDS, k=max(1, part))
        elif shortened.endswith(" "):  # a chat template may strip the space
            words = rng.choices(WORDS, k=len(words))
        elif shortened and await tokens(shortened) == num_tokens:
            return shortened
        else:
            words = words[: max(1, len(words) - max(1, part))]
    raise ApiError(
        f"cannot make a prompt of exactly {num_tokens} tokens; increase --input-tokens", 400
    )


def table(figures: Mapping[str, Any]) -> str:
    """Format a benchmark's statistics as a table of text lines."""
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
    """Draw a benchmark's results as text: histograms of the time to first token and of the gaps
    between tokens, and the output tokens per second over time. Empty if no request succeeded."""
    good = [sample for sample in samples if not sample.error]
    if not good:
        return ""
    return (
        histogram("time to first token, ms", [sample.ttft_s * 1000 for sample in good])
        + histogram("between two tokens, ms", [g * 1000 for sample in good for g in sample.gaps_s])
        + over_time(good)
    )


def histogram(title: str, values: Sequence[float]) -> str:
    """Draw a histogram as text, with BINS rows from the smallest value to the 99th percentile; the
    last row includes larger values."""
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
    """Draw a horizontal bar for a share from 0 to 1: up to BAR columns, in steps of an eighth of a
    column."""
    eighths = round(share * BAR * 8)
    partial = " ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else ""
    return "█" * (eighths // 8) + (partial or ("▏" if share and not eighths else ""))


def over_time(samples: Sequence[Sample]) -> str:
    """Draw the output tokens per second, from the start of the first request to the end of the
    last, as one line of text under a heading."""
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


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run the benchmark and print its results. Returns 0 if every request succeeded, 1 if one
    failed or nothing could be measured, STOPPED after Ctrl-C. Raises ApiError if the benchmark
    cannot begin."""
    options = settings.build(BenchSettings)
    if options.rate and settings.values["concurrency"].given:
        raise OptionError(
            "--rate and --concurrency exclude each other: the load is an open or a closed loop"
        )
    try:
        slo = parse_slo(options.slo)
    except ValueError as error:
        raise OptionError(f"--slo: {error}") from None
    if options.json:
        try:
            Path(options.json).open("a").close()  # fail before the load, not after it
        except OSError as error:
            raise OptionError(f"--json: {error}") from None
    view = progress_on(sys.stderr)
    bench = Bench(options, view)
    try:
        stopped = asyncio.run(bench.run())
    finally:
        view.close()
    figures = {**bench.load, **summarize(bench.samples, slo)}
    print(f"{bench.title}\n{table(figures)}{plot(bench.samples)}", end="")
    if options.json:
        try:
            Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
        except OSError as error:
            print(f"pdserve bench: --json: {error}", file=sys.stderr)
            return 1
    if stopped:
        return STOPPED
    return 1 if figures["errors"] or not figures["completed"] else 0


class Bench:
    """One run of the benchmark; adds a sample to `samples` at the end of each request."""

    def __init__(self, options: BenchSettings, view: ProgressView) -> None:
        # A repeated prompt would be in the server's prefix cache.
        self._seed = options.random_seed or random.randrange(1, 1 << 31)
        self._options = options
        self._view = view
        self.samples: list[Sample] = []
        self.load: dict[str, Any] = {}
        self.title = ""

    async def run(self) -> bool:
        """Send all requests of the benchmark; return whether Ctrl-C or SIGTERM stopped it. Raises
        ApiError if it cannot begin."""
        work = asyncio.ensure_future(self._work())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, work.cancel)
        with suppress(asyncio.CancelledError):
            await work
        return work.cancelled()

    async def _work(self) -> None:
        options = self._options
        api = AsyncApi(options)
        try:
            model = options.model or await api.first_model()
            total = options.requests + options.warmup
            self._view.update("making prompts", 0.0)
            prompts, exact = await make_prompts(api, model, total, options.input_tokens, self._seed)
            self._view.update("making prompts", 1.0)
            self._describe(api, model, exact)
            bodies = (self._body(model, prompt) for prompt in prompts)
            await self._send(api, PATHS[options.endpoint], bodies)
        finally:
            api.close()

    async def _send(self, api: AsyncApi, path: str, bodies: Iterator[bytes]) -> None:
        """Send the warm-up requests, whose results are discarded, and then the measured
        requests."""
        options = self._options
        for _, body in zip(range(options.warmup), bodies, strict=False):
            await send_request(api, path, body, _ignore)

        def on_sample(sample: Sample) -> None:
            self.samples.append(sample)
            self._view.update("requests", len(self.samples) / options.requests)

        self._view.update("requests", 0.0)
        if options.rate:
            await open_loop(api, path, bodies, options.rate, self._seed, on_sample)
        else:
            await closed_loop(api, path, bodies, options.concurrency, on_sample)

    def _describe(self, api: AsyncApi, model: str, exact: bool) -> None:
        options = self._options
        load_text = (
            f"open loop, {options.rate:g} requests/s (Poisson)"
            if options.rate
            else f"closed loop, {options.concurrency} at once"
        )
        length_unit = "tokens" if exact else "words (the server has no /tokenize)"
        self.title = (
            f"{model} at {api.url}: {load_text}, {options.requests} requests of "
            f"{options.input_tokens} {length_unit} in, {options.output_tokens} tokens out"
        )
        self.load = {
            "model": model,
            "endpoint": options.endpoint,
            "rate": options.rate or None,
            "concurrency": None if options.rate else options.concurrency,
            "input_tokens": options.input_tokens,
            "input_is_exact": exact,
            "output_tokens_asked": options.output_tokens,
            "seed": self._seed,
        }

    def _body(self, model: str, prompt: str) -> bytes:
        options = self._options
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": options.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if options.temperature >= 0:
            body["temperature"] = options.temperature
        if options.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body).encode()


def _ignore(sample: Sample) -> None:
    """Discard the sample of a warm-up request. Raises ApiError if the request failed, since the
    measured requests would fail too."""
    if sample.error:
        raise ApiError(sample.error, 500)
