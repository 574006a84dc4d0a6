"""Run pdserve's Engine on request, in process and with sampling: the warm process of the harness.

usage: contend_pdserve.py MODEL THREADS [NAME=VALUE ...]; the last are text options of EngineConfig.
Requests and answers are those of contend_llama.cpp. A step has room for all prompts of a batch, so
that the phases do not overlap: the decode phase starts when every sequence has its first token. The
chunk length is the one that the engine measures.
"""

import json
import sys
import time
from typing import Any

from token_ids import prompt_ids

from pdserve.engine.api import (
    EngineConfig,
    NewTokens,
    PromptScored,
    Request,
    SamplingParams,
    TokenLogprob,
)
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine

KV_TOKENS, STEP_TOKENS = 16384, 8192
TOP = 20  # candidates of a scored position


def run(engine: Engine, batch: int, prompt: int, new: int, number: int) -> dict[str, float]:
    """Generate greedy tokens for `batch` prompts; raises RuntimeError if some are missing."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    requests = [prompt_ids(prompt, number * 64 + i, engine.limits.vocab_size) for i in range(batch)]
    started = time.perf_counter()
    for i, ids in enumerate(requests):
        engine.submit(Request(str(i), ids, params, seed=0))
    made: dict[str, int] = {}
    first_at = 0.0
    late = 0
    while (step := engine.step()) is not None:
        count = 0
        for event in step.events:
            if isinstance(event, NewTokens):
                made[event.key] = made.get(event.key, 0) + len(event.ids)
                count += len(event.ids)
        if first_at:
            late += count
        elif len(made) == batch:
            first_at = time.perf_counter()
    ended = time.perf_counter()
    if sum(made.values()) != batch * new:
        raise RuntimeError(f"{sum(made.values())} tokens instead of {batch * new}")
    # The tokens of the phase are counted; seconds are scaled to the number requested from the
    # peers.
    wanted = batch * (new - 1)
    decode_s = (ended - first_at) * wanted / late if late else 0.0
    return {"prefill_s": first_at - started, "decode_s": decode_s}


def score(engine: Engine, ids: list[int]) -> dict[str, Any]:
    """Score teacher-forced at every position but the last: the best ids with their
    log-probabilities, best first (`top`), the best id (`argmax`) and -log p of the next id
    (`nll`)."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=TOP)
    engine.submit(Request("score", tuple(ids), params, seed=0))
    scored: list[TokenLogprob] = []
    while (step := engine.step()) is not None:
        for event in step.events:
            if isinstance(event, PromptScored):
                scored += event.logprobs
    if len(scored) != len(ids) - 1:
        raise RuntimeError(f"{len(scored)} scores of {len(ids)} ids")
    return {
        "argmax": [p.top[0][0] for p in scored],
        "nll": [-p.logprob for p in scored],
        "top": [p.top for p in scored],
    }


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    options: dict[str, Any] = dict(word.split("=", 1) for word in sys.argv[3:])
    started = time.perf_counter()
    config = EngineConfig(
        model=model,
        kv_tokens=KV_TOKENS,
        step_tokens=STEP_TOKENS,
        max_running=32,
        prefix_cache=False,
        threads=threads,
        **options,
    )
    engine, _ = build_engine(config)
    spec = engine.kv.spec
    ready = {
        "ready_s": time.perf_counter() - started,
        "kv_bytes_per_token": spec.pool_bytes((1,) * len(spec.groups)) / spec.block_size,
        "numerics_id": engine.numerics_id,
        "chunk_size": engine.limits.chunk_size,
    }
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        numbers = [int(word) for word in words]
        if verb == "run":
            answer = run(engine, *numbers)
        elif verb == "score":
            answer = score(engine, numbers)
        else:
            raise SystemExit(f"unknown request {verb!r}")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
