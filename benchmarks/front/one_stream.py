"""One stream over HTTP from mixed workers beside the same engine in this process, in turns."""

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

import machine
from fleet import Fleet
from ratios import Bound, judged

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.api.request import NewTokens, Request, SamplingParams
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine

LEAST = Bound(0.85, 0.9)
PROMPT_LEN, TOKENS, PAIRS = 32, 256, 9
MODEL = "SmolLM2-135M-Instruct"
PROMPT = list(range(1000, 1000 + PROMPT_LEN))


def in_process(engine: Engine) -> float:
    """Tokens a second, from the first to the last."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    engine.submit(Request("one", tuple(PROMPT), params, seed=1))
    times: list[float] = []
    while engine.has_work:
        for event in engine.step().events:
            if isinstance(event, NewTokens):
                times += [time.perf_counter()] * len(event.ids)
    return _rate(times)


def over_http(url: str) -> float:
    """Likewise, by when a client reads each."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"temperature": 0, "stream": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    times: list[float] = []
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            times += [now] * len(json.loads(line[6:])["choices"][0]["token_ids"])
    connection.close()
    return _rate(times)


def _rate(times: list[float]) -> float:
    """Raises RuntimeError unless all tokens have come."""
    if len(times) != TOKENS:
        raise RuntimeError(f"{len(times)} of {TOKENS} tokens")
    return (len(times) - 1) / (times[-1] - times[0])


def measure() -> dict[str, Any]:
    """Pairs of both, each on all cores while the other rests."""
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
    return judged(LEAST, ours, theirs)
