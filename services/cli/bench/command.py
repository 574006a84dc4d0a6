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
    chosen = settings.build(BenchSettings)
    if chosen.rate and settings.values["concurrency"].given:
        raise OptionError("--rate and --concurrency: a load is an open loop or a closed one")
    try:
        slo = parse_slo(chosen.slo)
    except ValueError as error:
        raise OptionError(f"--slo: {error}") from None
    if chosen.json:
        try:
            Path(chosen.json).open("a").close()  # fail before the load, not after it
        except OSError as error:
            raise OptionError(f"--json: {error}") from None
    view = progress_on(sys.stderr)
    bench = Bench(chosen, view)
    try:
        stopped = asyncio.run(bench.run())
    except ApiError as error:
        view.close()
        print(f"pdserve bench: {error}{advice(error)}", file=sys.stderr)
        return 1
    view.close()
    figures = {**bench.load, **summarize(bench.samples, slo)}
    print(f"{bench.title}\n{table(figures)}{plot(bench.samples)}", end="")
    if chosen.json:
        try:
            Path(chosen.json).write_text(json.dumps(figures, indent=2) + "\n")
        except OSError as error:
            print(f"pdserve bench: --json: {error}", file=sys.stderr)
            return 1
    if stopped:
        return STOPPED
    return 1 if figures["errors"] or not figures["completed"] else 0


class Bench:
    """One run; `samples` grows as requests end."""

    def __init__(self, chosen: BenchSettings, view: ProgressView) -> None:
        # A repeated prompt would be in the server's prefix cache.
        self._seed = chosen.random_seed or random.randrange(1, 1 << 31)
        self._chosen = chosen
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
        chosen = self._chosen
        api = AsyncApi(chosen)
        try:
            model = chosen.model or await api.first_model()
            total = chosen.requests + chosen.warmup
            self._view.update("making prompts", 0.0)
            prompts, exact = await make_prompts(api, model, total, chosen.input_tokens, self._seed)
            self._view.update("making prompts", 1.0)
            self._describe(api, model, exact)
            bodies = (self._body(model, prompt) for prompt in prompts)
            await self._send(api, PATHS[chosen.endpoint], bodies)
        finally:
            api.close()

    async def _send(self, api: AsyncApi, path: str, bodies: Iterator[bytes]) -> None:
        """Send the requests; warm-up requests are not counted."""
        chosen = self._chosen
        for _, body in zip(range(chosen.warmup), bodies, strict=False):
            await send_request(api, path, body, _ignore)

        def on_sample(sample: Sample) -> None:
            self.samples.append(sample)
            self._view.update("requests", len(self.samples) / chosen.requests)

        self._view.update("requests", 0.0)
        if chosen.rate:
            await open_loop(api, path, bodies, chosen.rate, self._seed, on_sample)
        else:
            await closed_loop(api, path, bodies, chosen.concurrency, on_sample)

    def _describe(self, api: AsyncApi, model: str, exact: bool) -> None:
        chosen = self._chosen
        how = (
            f"open loop, {chosen.rate:g} requests/s (Poisson)"
            if chosen.rate
            else f"closed loop, {chosen.concurrency} at once"
        )
        length = "tokens" if exact else "words (the server has no /tokenize)"
        self.title = (
            f"{model} at {api.url}: {how}, {chosen.requests} requests of {chosen.input_tokens} "
            f"{length} in, {chosen.output_tokens} tokens out"
        )
        self.load = {
            "model": model,
            "endpoint": chosen.endpoint,
            "rate": chosen.rate or None,
            "concurrency": None if chosen.rate else chosen.concurrency,
            "input_tokens": chosen.input_tokens,
            "input_is_exact": exact,
            "output_tokens_asked": chosen.output_tokens,
            "seed": self._seed,
        }

    def _body(self, model: str, prompt: str) -> bytes:
        chosen = self._chosen
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": chosen.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if chosen.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if chosen.temperature >= 0:
            body["temperature"] = chosen.temperature
        if chosen.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body).encode()


def _ignore(sample: Sample) -> None:
    """Discard a warm-up request's sample. Raises ApiError if it failed, since all would."""
    if sample.error:
        raise ApiError(sample.error, 500)
