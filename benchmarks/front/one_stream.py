"""One stream over HTTP from mixed workers, alternating with the same engine in this process."""

import asyncio
import json
import time
from typing import Any

import machine
from ratios import compared
from systems.fleet import Fleet

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.load import Sample, send_request
from pdserve.cli.options import ClientSettings
from pdserve.engine.api import EngineConfig, NewTokens, Request, SamplingParams
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine

PROMPT_LEN, TOKENS, PAIRS = 32, 256, 9
MODEL = "SmolLM2-135M-Instruct"
PROMPT = list(range(1000, 1000 + PROMPT_LEN))


def in_process(engine: Engine) -> float:
    """Tokens per second in process, from the first to the last."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    engine.submit(Request("one", tuple(PROMPT), params, seed=1))
    times: list[float] = []
    while engine.has_work:
        for event in engine.step().events:
            if isinstance(event, NewTokens):
                times += [time.perf_counter()] * len(event.ids)
    return _rate(times)


def over_http(url: str) -> float:
    """Tokens per second over HTTP, from the first to the last text of a stream at the client.
    Raises RuntimeError unless nearly every token has a separate chunk."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    samples: list[Sample] = []

    async def send() -> None:
        api = AsyncApi(ClientSettings(url=url))
        await send_request(api, "/v1/completions", json.dumps(body).encode(), samples.append)
        api.close()

    asyncio.run(send())
    (sample,) = samples
    if sample.output_tokens != TOKENS or len(sample.arrivals) < TOKENS - 1:
        chunks = len(sample.arrivals)
        raise RuntimeError(f"{sample.output_tokens} of {TOKENS} tokens in {chunks} chunks")
    return 1 / sample.tpot_s


def _rate(times: list[float]) -> float:
    """Tokens per second of a run. Raises RuntimeError unless all tokens arrive."""
    if len(times) != TOKENS:
        raise RuntimeError(f"{len(times)} of {TOKENS} tokens")
    return (len(times) - 1) / (times[-1] - times[0])


def measure() -> dict[str, Any]:
    """Measure pairs of both, each on all cores while the other rests."""
    config = EngineConfig(kernels="native", kv_tokens=8192, threads=machine.CORES)
    engine, _ = build_engine(config)
    ours: list[float] = []
    theirs: list[float] = []
    threads = ("--threads", str(machine.CORES))
    with Fleet("--prefill", "0", "--decode", "1", "--kv-tokens", "8192", *threads) as fleet:
        over_http(fleet.url)
        in_process(engine)
        for number in range(PAIRS):
            for turn in ("http", "engine") if number % 2 else ("engine", "http"):
                if turn == "http":
                    ours.append(over_http(fleet.url))
                else:
                    theirs.append(in_process(engine))
    engine.close()
    return compared(ours, theirs)
