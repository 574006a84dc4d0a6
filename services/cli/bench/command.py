"""`pdserve bench` sends a load to a running server and reports its performance."""

import asyncio
import json
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdserve.services.cli.async_client import AsyncApi
from pdserve.services.cli.bench.load import closed_loop, open_loop, send_request
from pdserve.services.cli.bench.measure import Sample, parse_slo, summarize
from pdserve.services.cli.bench.prompts import make_prompts
from pdserve.services.cli.bench.report import plot, table
from pdserve.services.cli.commands import STOPPED
from pdserve.services.cli.http_client import ApiError, advice
from pdserve.services.local.progress import ProgressView, progress_on
from pdserve.services.options.options import OptionError
from pdserve.services.options.settings import BenchSettings
from pdserve.services.options.sources import Settings

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Return 0 if every request succeeded; 1 if one did not, or nothing could be measured."""
    options = settings.build(BenchSettings)
    if options.rate and settings.values["concurrency"].given:
        raise OptionError(
            "--rate and --concurrency contradict each other: a load is an open or a closed loop"
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
    except ApiError as error:
        view.close()
        print(f"pdserve bench: {error}{advice(error)}", file=sys.stderr)
        return 1
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
    """One run; `samples` grows as requests end."""

    def __init__(self, options: BenchSettings, view: ProgressView) -> None:
        # A repeated prompt would be in the server's prefix cache.
        self._seed = options.random_seed or random.randrange(1, 1 << 31)
        self._options = options
        self._view = view
        self.samples: list[Sample] = []
        self.load: dict[str, Any] = {}
        self.title = ""

    async def run(self) -> bool:
        """Run the benchmark; return whether Ctrl-C stopped it. Raises ApiError if it cannot
        begin."""
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
        """Send the requests; warm-up requests are not counted."""
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
    """Discard a warm-up request's sample. Raises ApiError if it failed, since all would."""
    if sample.error:
        raise ApiError(sample.error, 500)
