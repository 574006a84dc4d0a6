"""The speed of a batch that a grammar constrains, relative to a free one.

Free and constrained batches of the same prompts alternate on one engine with the native kernels and
the shipped model, pinned to two cores; the order within a pair alternates. The figure is the median
of the pairs' ratios. The ratio of the fastest rounds, which other load on the machine can only
slow, is shown next to it. `--any-load` as in bench.py.
"""

import argparse
import json
import random
import threading
import time
from collections import Counter
from typing import Any

import machine
from ratios import compared

from pdserve.engine.api import EngineConfig, Grammar, NewTokens, Request, SamplingParams
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine

BATCH, TOKENS, PAIRS = 16, 96, 31  # with 11 pairs, medians of one state differ by 0.03
PROMPT_LEN = 32
LIMIT_S = 60.0  # maximum idle time of an engine
SCHEMA = {
    "type": "array",
    "minItems": 1000,  # no answer ends while the steps are timed
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


def tokens_per_s(engine: Engine, size: int, num_tokens: int, grammar: Grammar | None) -> float:
    """Tokens per second of a batch of `size` requests, from when all have started to when the first
    has ended."""
    rng = random.Random(1)
    for number in range(size):
        prompt = tuple(rng.randrange(1000, 40_000) for _ in range(PROMPT_LEN))
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, grammar=grammar)
        engine.submit(Request(f"{number}", prompt, params, seed=number))
    woken = threading.Event()
    engine.wake_with(woken.set)
    generated: Counter[str] = Counter()
    counted, ended = 0, False
    began = took = 0.0
    while engine.has_work:
        woken.clear()
        plan = engine.schedule()
        if plan is None:
            woken.wait(LIMIT_S)  # its grammar is being compiled, or late masks computed
            continue
        for event in engine.collect(engine.launch(plan)).events:
            if isinstance(event, NewTokens):
                generated[event.key] += len(event.ids)
        if not began and len(generated) == size:
            began, counted = time.perf_counter(), generated.total()
        if not ended and max(generated.values(), default=0) == num_tokens:
            ended, took = True, time.perf_counter() - began
            counted = generated.total() - counted
    return counted / took


def measure(size: int, num_tokens: int, pairs: int) -> dict[str, Any]:
    """The figures for a batch of this many requests."""
    engine, _ = build_engine(EngineConfig(kernels="native", kv_tokens=16384, threads=machine.CORES))
    engine.load_grammars()
    grammar = Grammar(json.dumps({"grammars": [{"json_schema": SCHEMA}]}))
    kinds = {"bound": grammar, "free": None}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind in kinds:
        tokens_per_s(engine, size, 8, kinds[kind])  # compiles the grammar and warms the caches
    for number in range(pairs):
        for kind in kinds if number % 2 else reversed(kinds):
            found[kind].append(tokens_per_s(engine, size, num_tokens, kinds[kind]))
    engine.close()
    fastest = max(found["bound"]) / max(found["free"])
    return compared(found["bound"], found["free"]) | {"fastest": round(fastest, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--any-load", action="store_true")
    options = parser.parse_args()
    cores = machine.pin()
    loads = [machine.quiet(cores, options.any_load)]
    figures = measure(options.batch, options.tokens, options.pairs)
    loads.append(machine.quiet(cores, options.any_load))
    print(json.dumps(figures | {"load_by_others": [round(load, 3) for load in loads]}))


if __name__ == "__main__":
    main()
