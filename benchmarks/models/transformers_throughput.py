"""The in-process Engine against transformers.generate, bf16, 16 sequences of 128 + 128.

Both run on 2 threads on the same weights, interleaved; the ratio is taken per pair, and the median
counts.
"""

import json
import time

import torch
from ratios import compared
from weights import corpus_ids, reference_model

from pdserve.engine.api import EngineConfig, NewTokens, Request, SamplingParams
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine

SEQUENCES, PROMPT, NEW, PAIRS = 16, 128, 128, 5


def run_engine(engine: Engine, batch: list[tuple[int, ...]], run: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    started = time.perf_counter()
    for i, ids in enumerate(batch):
        engine.submit(Request(f"{run}-{i}", ids, params, seed=0))
    produced = 0
    while (step := engine.step()) is not None:
        produced += sum(len(e.ids) for e in step.events if isinstance(e, NewTokens))
    assert produced == SEQUENCES * NEW, produced
    return produced / (time.perf_counter() - started)


@torch.inference_mode()
def run_reference(model: object, batch: list[tuple[int, ...]]) -> float:
    ids = torch.tensor(batch)
    started = time.perf_counter()
    out = model.generate(  # type: ignore[attr-defined]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=2,
    )
    assert out.shape == (SEQUENCES, PROMPT + NEW)
    return SEQUENCES * NEW / (time.perf_counter() - started)


def main() -> None:
    torch.set_num_threads(2)
    engine, _ = build_engine(
        EngineConfig(
            # torch against torch; `make bench-cpu` measures the native kernels
            kernels="reference",
            weights="bf16",
            kv_dtype="bf16",
            kv_tokens=32768,
            prefix_cache=False,
            threads=2,
        ),
        lambda *_: None,
    )
    model = reference_model(torch.bfloat16)
    ids = corpus_ids()
    ours, theirs = [], []
    for run in range(PAIRS + 1):
        batch = [tuple(ids[(i + run) * 50 : (i + run) * 50 + PROMPT]) for i in range(SEQUENCES)]
        pair = run_engine(engine, batch, run), run_reference(model, batch)
        if run:  # the first pair warms up
            ours.append(pair[0])
            theirs.append(pair[1])
    print(json.dumps(compared(ours, theirs)))


if __name__ == "__main__":
    main()
