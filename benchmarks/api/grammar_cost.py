"""What a grammar costs decode: the speed of a batch that a grammar binds over that of a free one.

    .venv/bin/python benchmarks/api/grammar_cost.py [--batch 16] [--tokens 96] [--rounds 5]

Free and bound batches of the same prompts take turns on one engine with the native kernels and the
shipped model; steps with a prompt or an unfinished batch do not count. Prints one JSON object: the
median milliseconds of a step of each kind in each round, the ratio of the fastest rounds (others on
the machine can only slow a round), and how many rows ran twice since their mask was late.
"""

import argparse
import json
import random
import statistics
import time

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.api.request import Grammar, NewTokens, Request, SamplingParams
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine

SCHEMA = {
    "type": "array",
    "minItems": 1000,  # so that no answer ends while the steps are timed
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
PROMPT_LEN = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    engine, _ = build_engine(EngineConfig(kernels="native", kv_tokens=16384))
    engine.load_grammars()
    grammar = Grammar(json.dumps({"grammars": [{"json_schema": SCHEMA}]}))
    batch(engine, 2, 8, grammar)  # compiles it
    found: dict[str, list[float]] = {"free": [], "bound": []}
    late = 0
    for number in range(options.rounds):
        kinds = [("free", None), ("bound", grammar)]
        for kind, chosen in kinds if number % 2 else kinds[::-1]:
            step_ms, again = batch(engine, options.batch, options.tokens, chosen)
            found[kind].append(round(step_ms, 2))
            late += again
    ratio = min(found["free"]) / min(found["bound"])
    print(json.dumps({"step_ms": found, "speed_ratio": round(ratio, 3), "late_rows": late}))
    engine.close()


def batch(engine: Engine, size: int, num_tokens: int, grammar: Grammar | None) -> tuple[float, int]:
    """(median milliseconds of a step with all of a batch, rows that ran again)."""
    rng = random.Random(1)
    for number in range(size):
        prompt = tuple(rng.randrange(1000, 40_000) for _ in range(PROMPT_LEN))
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, grammar=grammar)
        engine.submit(Request(f"{number}", prompt, params, seed=number))
    times: list[float] = []
    again = 0
    while engine.has_work:
        started = time.perf_counter()
        plan = engine.schedule()
        if plan is None:
            time.sleep(0.001)  # its grammar is compiled, or its mask is computed
            continue
        step = engine.collect(engine.launch(plan))
        took = time.perf_counter() - started
        num_new = sum(isinstance(event, NewTokens) for event in step.events)
        if plan.rows and plan.num_decode_rows == len(plan.rows):
            again += len(plan.rows) - num_new
            if num_new == size:
                times.append(took)
    return statistics.median(times) * 1000, again


if __name__ == "__main__":
    main()
