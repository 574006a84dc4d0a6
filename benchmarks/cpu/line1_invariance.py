"""Line 1: on the native backend the result of a request depends only on the request.

Tokens and their log-probabilities are compared to the last bit, with the shipped model. 200 seeded
requests (T = 1, penalties, floors, n = 2) run alone and among 32 others; then a smaller set in
chunks of 1 to 512 tokens, on one thread and two, cold and from a warm prefix cache, and resumed at
every token; then through real processes, prefilled locally and remotely, where texts are compared.
The tests of tests/engine and tests/system with "invarian" in their name run too: they do the same
with tiny models of every architecture.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from alike import Traces, differing, resumed, seeded_requests, traces
from machine import CORES
from peers import say
from prompts import prompts
from pytest_line import run_tests
from systems.fleet import Fleet

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.api.request import Request
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine

CONFIG = EngineConfig(kernels="native", kv_tokens=65536, chunk_size=128, max_running=80)
CHUNKS = (1, 7, 32, 100, 512)
NEW = 32


def engine(threads: int = CORES, **changes: object) -> Engine:
    config = dataclasses.replace(CONFIG, threads=threads, **changes)  # type: ignore[arg-type]
    return build_engine(config, lambda *_: None)[0]


def engine_ways(few: list[Request], expected: Traces) -> Iterator[tuple[str, Traces, Traces]]:
    """Ways to run a small set of requests of one choice: name, expected traces, actual traces."""
    for chunk in CHUNKS:
        alone = engine(chunk_size=chunk, prefix_cache=False)
        yield f"chunks of {chunk}", expected, traces(alone, few, 8)
    yield "one thread", expected, traces(engine(threads=1, prefix_cache=False), few, 8)
    warm = engine()
    yield "cold prefix cache", expected, traces(warm, few, 4)
    hits = warm.stats().prefix_hits
    yield "warm prefix cache", expected, traces(warm, few, 4)
    assert warm.stats().prefix_hits > hits, "no prefix hit in the warm run"
    again, tails = [], {}
    for request in few[:4]:
        whole = expected[request.key, 0]
        for cut in range(1, NEW):
            again.append(resumed(request, whole, cut))
            tails[again[-1].key, 0] = whole[cut:]
    yield "resumed at every token", tails, traces(engine(prefix_cache=False), again, 16)


def service_ways(few: list[Request], expected: Traces) -> Iterator[tuple[str, Any, Any]]:
    """The same requests through real processes, which return only tokens."""
    ids = {key: tuple(i for i, _ in trace) for (key, _), trace in expected.items()}
    remote = ["--prefill", "1", "--decode", "1", "--remote-prefill", "always"]
    for way, options in {
        "one decode worker": ["--prefill", "0", "--decode", "1"],
        "remote by tcp": [*remote, "--kv-transport", "tcp"],
        "remote by shm": [*remote, "--kv-transport", "shm"],
    }.items():
        with Fleet("--kernels", "native", *options) as fleet:
            got = fleet.generate(few, width=8)
            moved = fleet.prefills("remote")
            wanted = len(few) if way.startswith("remote") else 0
            assert moved == wanted, f"{way}: {moved} remote prefills, not {wanted}"
        yield way, {(k, 0): v for k, v in ids.items()}, {(k, 0): v for k, v in got.items()}


def plain(request: Request) -> Request:
    """The same prompt and seed without the parameters that Fleet.generate does not support."""
    params = dataclasses.replace(
        request.params, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
        presence_penalty=0.0, frequency_penalty=0.0, n=1,
    )  # fmt: skip
    return dataclasses.replace(request, key=f"plain-{request.key}", params=params)


def main() -> None:
    asked = seeded_requests(prompts(200, 2, 600), NEW)
    one_by_one = engine(prefix_cache=False)
    alone = traces(one_by_one, asked, 1)
    say(f"{len(asked)} requests alone")
    ways = []

    def compare(way: str, expected: Any, got: Any) -> None:
        found = differing(expected, got)
        say(f"{way}: {len(found)} of {len(expected)} differ")
        ways.append({"way": way, "answers": len(expected), "differing": found})

    compare("under 32 others", alone, traces(engine(prefix_cache=False), asked, 33))
    few = [plain(request) for request in asked[4::10]]
    expected = traces(one_by_one, few, 1)
    for way, wanted, got in engine_ways(few, expected):
        compare(way, wanted, got)
    for way, wanted, got in service_ways(few, expected):
        compare(way, wanted, got)
    tests = run_tests("tests/engine", "tests/kernels", "tests/system", "-k", "invarian")
    figures = {
        "ok": tests["ok"] and not any(way["differing"] for way in ways),
        "numerics_id": one_by_one.numerics_id,
        "requests": len(asked),
        "choices": sum(r.params.n for r in asked),
        "ways": ways,
        "tests": tests,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
