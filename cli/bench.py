"""`pdserve bench` sends requests to a running server and reports its latency and throughput."""

import asyncio
import json
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.bench_dataset import DatasetError, Entry, read_dataset
from pdserve.cli.bench_page import page
from pdserve.cli.bench_tables import comparison, run_table, sweep_table
from pdserve.cli.commands import STOPPED
from pdserve.cli.http_client import ApiError
from pdserve.cli.load import (
    Sample,
    closed_loop,
    is_saturated,
    open_loop,
    output_rates,
    parse_rates,
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
    rates = [rate for _, rate in output_rates(samples, SLOTS)]
    if not rates:
        return ""
    line = "".join(EIGHTHS[round(rate / max(rates) * 8)] for rate in rates)
    span = max(sample.ended for sample in samples) - min(sample.started for sample in samples)
    return f"\noutput tokens/s over {span:.1f} s, at most {max(rates):.0f}\n{line}\n"


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run the benchmark and print its results, or compare two earlier ones. Returns 0 if every
    request succeeded, 1 if one failed or nothing could be measured, STOPPED after Ctrl-C. In a
    sweep, a rate that saturates the server is no failure unless all its requests fail. Raises
    ApiError if the benchmark cannot begin."""
    options = settings.build(BenchSettings)
    if options.compare:
        for flag, value in (
            ("--json", options.json),
            ("--html", options.html),
            ("--sweep", options.sweep),
        ):
            if value:
                raise OptionError(f"--compare and {flag} exclude each other: nothing is measured")
        return _compare(options.compare)
    _check_given(settings)
    try:
        slo = parse_slo(options.slo)
    except ValueError as error:
        raise OptionError(f"--slo: {error}") from None
    try:
        rates = parse_rates(options.sweep) if options.sweep else []
    except ValueError as error:
        raise OptionError(f"--sweep: {error}") from None
    entries = _entries(options)
    files = {"--json": options.json, "--html": options.html}
    for flag, name in files.items():
        if name:
            try:
                Path(name).open("a").close()  # fail before the load, not after it
            except OSError as error:
                raise OptionError(f"{flag}: {error}") from None
    view = progress_on(sys.stderr)
    bench = Bench(options, entries, rates, view)
    try:
        stopped = asyncio.run(bench.run())
    finally:
        view.close()
    runs = [{**load.facts, **summarize(load.samples, slo)} for load in bench.loads]
    samples = bench.loads[0].samples if bench.loads else []
    if rates:
        print(f"{bench.title}\n\n{sweep_table(runs)}{bench.end_text}", end="")
    elif runs:
        print(f"{bench.title}\n{run_table(runs[0])}{plot(samples)}", end="")
    result = {"runs": runs} if rates else next(iter(runs), {})
    texts = {"--json": json.dumps(result, indent=2) + "\n"}
    texts["--html"] = page(bench.title, runs, samples) if options.html and runs else ""
    for flag, name in files.items():
        try:
            if name and runs:
                Path(name).write_text(texts[flag], encoding="utf-8")
        except OSError as error:
            print(f"pdserve bench: {flag}: {error}", file=sys.stderr)
            return 1
    if stopped:
        return STOPPED
    failed = any(not run["completed"] for run in runs) or any(run["errors"] for run in runs[:-1])
    return 1 if not runs or failed or (not rates and runs[0]["errors"]) else 0


def _compare(files: Sequence[str]) -> int:
    """Print the comparison of two result files. Raises OptionError."""
    if len(files) != 2:
        raise OptionError(f"--compare needs two files, not {len(files)}: --compare A --compare B")
    try:
        print(comparison(Path(files[0]), Path(files[1])), end="")
    except ValueError as error:
        raise OptionError(f"--compare: {error}") from None
    return 0


def _check_given(settings: Settings) -> None:
    """Raise OptionError if options exclude each other."""
    values = settings.values
    if values["rate"].value and values["concurrency"].given:
        raise OptionError(
            "--rate and --concurrency exclude each other: the load is an open or a closed loop"
        )
    if values["sweep"].value:
        for name in ("rate", "concurrency"):
            if values[name].given:
                raise OptionError(f"--sweep and --{name} exclude each other")
    if values["dataset"].value and values["input_tokens"].given:
        raise OptionError("--dataset and --input-tokens exclude each other")


def _entries(options: BenchSettings) -> list[Entry]:
    """Return the requests of the dataset; empty without one. Raises OptionError."""
    if not options.dataset:
        return []
    try:
        entries = read_dataset(Path(options.dataset))
    except DatasetError as error:
        raise OptionError(f"--dataset: {error}") from None
    if options.endpoint != "chat" and any(entry.messages for entry in entries):
        raise OptionError(f"--dataset: {options.dataset} has messages; add --endpoint chat")
    return entries


@dataclass
class Load:
    """One measured load: what it was (`facts`), and a sample for each request that has ended."""

    facts: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)


class Bench:
    """One run of the benchmark, with one load, or with one for each rate of a sweep. Loads are
    added to `loads` as they begin."""

    def __init__(
        self,
        options: BenchSettings,
        entries: Sequence[Entry],
        rates: Sequence[float],
        view: ProgressView,
    ) -> None:
        """`entries`: the requests of a dataset; random prompts are made if it is empty. `rates`:
        those of a sweep, which ends at the first one that saturates the server; empty for one
        load."""
        # A repeated prompt would be in the server's prefix cache.
        self._seed = options.random_seed or random.randrange(1, 1 << 31)
        self._options = options
        self._entries = entries
        self._sweep = rates
        self._view = view
        self.loads: list[Load] = []
        self.title = ""
        self.end_text = ""  # a line for the user if a sweep ended early

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
            rates: Sequence[float] = self._sweep or [options.rate]
            total = options.requests * len(rates) + options.warmup
            entries, exact = await self._requests(api, model, total)
            self._describe(api, model, exact)
            bodies = (self._body(model, entry) for entry in entries)
            for _, body in zip(range(options.warmup), bodies, strict=False):
                await send_request(api, PATHS[options.endpoint], body, _ignore)
            for rate in rates:
                load = Load(self._facts(model, exact, rate))
                self.loads.append(load)
                await self._send(api, islice(bodies, options.requests), load, rate)
                if self._sweep and is_saturated(load.samples):
                    failed = all(sample.error for sample in load.samples)
                    verb = "requests failed" if failed else "saturated"
                    self.end_text = f"\n{verb} at {rate:g} requests/s\n"
                    return
        finally:
            api.close()

    async def _requests(
        self, api: AsyncApi, model: str, count: int
    ) -> tuple[Iterable[Entry], bool | None]:
        """Return the requests of the benchmark, and whether their lengths are exact; None for those
        of a dataset, which are repeated if there are fewer than `count`."""
        if self._entries:
            return islice(cycle(self._entries), count), None
        self._view.update("making prompts", 0.0)
        num_tokens = self._options.input_tokens
        prompts, exact = await make_prompts(api, model, count, num_tokens, self._seed)
        self._view.update("making prompts", 1.0)
        return map(Entry, prompts), exact

    async def _send(self, api: AsyncApi, bodies: Iterator[bytes], load: Load, rate: float) -> None:
        options = self._options
        name = f"{rate:g} requests/s" if self._sweep else "requests"

        def on_sample(sample: Sample) -> None:
            load.samples.append(sample)
            self._view.update(name, len(load.samples) / options.requests)

        self._view.update(name, 0.0)
        path = PATHS[options.endpoint]
        if rate:
            await open_loop(api, path, bodies, rate, self._seed, on_sample)
        else:
            await closed_loop(api, path, bodies, options.concurrency, on_sample)

    def _describe(self, api: AsyncApi, model: str, exact: bool | None) -> None:
        options = self._options
        load_text = f"closed loop, {options.concurrency} at once, "
        if options.rate:
            load_text = f"open loop, {options.rate:g} requests/s (Poisson), "
        if self._sweep:
            load_text = "open loops (Poisson), for each rate "
        length_unit = "tokens" if exact else "words (the server has no /tokenize)"
        length_text = f"{options.input_tokens} {length_unit} in"
        if exact is None:
            length_text = f"{options.dataset} ({len(self._entries)} requests)"
        self.title = (
            f"{model} at {api.url}: {load_text}{options.requests} requests of {length_text}, "
            f"{options.output_tokens} tokens out"
        )

    def _facts(self, model: str, exact: bool | None, rate: float) -> dict[str, Any]:
        options = self._options
        return {
            "model": model,
            "endpoint": options.endpoint,
            "dataset": options.dataset or None,
            "rate": rate or None,
            "concurrency": None if rate else options.concurrency,
            "input_tokens": None if exact is None else options.input_tokens,
            "input_is_exact": exact,
            "output_tokens_asked": options.output_tokens,
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
            "warmup": options.warmup,
            "seed": self._seed,
        }

    def _body(self, model: str, entry: Entry) -> bytes:
        options = self._options
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": entry.max_tokens or options.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.endpoint == "chat":
            body["messages"] = entry.messages or [{"role": "user", "content": entry.prompt}]
        else:
            body["prompt"] = entry.prompt
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
