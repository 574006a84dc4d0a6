"""Line 2: the same tokens from transformers and from every way in which pdserve can run them.

float32: greedy tokens of 40 prompts of 1-3,000 tokens equal transformers'; greedy and seeded tokens
are equal in every mode below, except for near-ties, which are listed. bf16: teacher-forced argmax
agreement with float32, next to that of transformers in bf16 in the same run.
"""

import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator

import torch
from parity import Difference, Judge, Tokens, requests, resumed_at, run
from prompts import prompts, reference_greedy, reference_model
from systems.fleet import Fleet

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.api.request import Request, SamplingParams
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine

CONFIG = EngineConfig(
    kernels="native",
    weights="float32",
    kv_dtype="float32",
    kv_tokens=65536,
    chunk_size=256,
    threads=2,
)
TEMPERATURES = (0.0, 1.0)


def engine(**changes: object) -> Engine:
    return build_engine(dataclasses.replace(CONFIG, **changes), lambda *_: None)[0]


def log(message: str) -> None:
    print(time.strftime("%H:%M:%S"), message, file=sys.stderr, flush=True)


def engine_modes(asked: dict[str, Request], expected: Tokens) -> Iterator[tuple[str, Tokens]]:
    """Every mode of the in-process Engine, each with proof that its event happened."""
    everything = list(asked.values())
    warm = engine()
    run(warm, everything, 4)
    hits = warm.stats().prefix_hits
    yield "warm prefix cache", run(warm, everything, 4)
    assert warm.stats().prefix_hits > hits, "no prefix hit in the warm run"

    yield "batch 16", run(engine(prefix_cache=False), everything, 16)

    yield "after preemption", preempted(everything)

    draw = random.Random(7)
    cuts = {key: draw.randrange(1, len(expected[key])) for key in asked}
    resumed = [resumed_at(r, expected[key], cuts[key]) for key, r in asked.items()]
    tails = run(engine(prefix_cache=False), resumed, 4)
    yield "resumed", {key: expected[key][: cuts[key]] + tails[key] for key in asked}


def preempted(everything: list[Request], together: int = 8) -> Tokens:
    """Run requests of similar length in a pool that holds their prompts and one more block for
    each, so that their growth preempts some of them; asserts that it did."""
    size = 16  # tokens per block, so that 32 new tokens need two more
    order = sorted(everything, key=lambda r: len(r.prompt_ids))
    tokens: dict[str, tuple[int, ...]] = {}
    preemptions = 0
    for at in range(0, len(order), together):
        group = order[at : at + together]
        blocks = sum(-(-len(r.prompt_ids) // size) for r in group) + together
        tight = engine(prefix_cache=False, block_size=size, kv_tokens=blocks * size)
        tokens |= run(tight, group, together)
        preemptions += tight.stats().preemptions
    log(f"{preemptions} preemptions")
    assert preemptions > 0
    return tokens


def service_modes(asked: dict[str, Request]) -> Iterator[tuple[str, Tokens]]:
    """The same requests through real processes, by the router's Generate."""
    common = ["--kernels", "native", "--weights", "float32", "--kv-dtype", "float32"]
    # Without the prefix cache, a repeated prompt is prefilled remotely as a whole.
    common += ["--chunk-size", "256", "--no-prefix-cache"]
    remote = ["--prefill", "1", "--decode", "1", "--remote-prefill", "always"]
    for mode, options in {
        "one decode worker": ["--prefill", "0", "--decode", "1"],
        "remote by tcp": [*remote, "--kv-transport", "tcp"],
        "remote by shm": [*remote, "--kv-transport", "shm"],
    }.items():
        with Fleet(*common, *options) as fleet:
            before = fleet.prefills("remote")
            yield mode, fleet.generate(list(asked.values()), width=8)
            moved = fleet.prefills("remote") - before
            long_enough = sum(len(r.prompt_ids) > 1 for r in asked.values())
            wanted = long_enough if mode.startswith("remote") else 0
            assert moved == wanted, f"{mode}: {moved} remote prefills, not {wanted}"


@torch.inference_mode()
def agreement(asked: list[tuple[int, ...]]) -> dict[str, float]:
    """Share of positions whose bf16 argmax, given the same text, equals float32's."""
    exact = reference_model(torch.float32)
    wanted = [exact(torch.tensor([ids])).logits[0].argmax(-1) for ids in asked]
    del exact
    positions = sum(len(ids) for ids in asked)
    theirs = reference_model(torch.bfloat16)
    same = sum(
        int((theirs(torch.tensor([ids])).logits[0].argmax(-1) == want).sum())
        for ids, want in zip(asked, wanted, strict=True)
    )
    del theirs
    scored = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    half = engine(weights="bf16", kv_dtype="bf16")
    ours = 0
    for i, (ids, want) in enumerate(zip(asked, wanted, strict=True)):
        half.submit(Request(str(i), ids, scored, seed=0))
        best: list[int] = []
        while (step := half.step()) is not None:
            for event in step.events:
                best += [p.top[0][0] for p in getattr(event, "logprobs", ()) if p.top]
                if type(event).__name__ == "NewTokens":
                    best += event.ids
        assert len(best) == len(ids), (len(best), len(ids))
        ours += int((torch.tensor(best) == want).sum())
    return {"pdserve": ours / positions, "transformers": same / positions, "positions": positions}


def main() -> None:
    torch.set_num_threads(2)
    asked_prompts = prompts()
    reference = reference_model(torch.float32)
    judge = Judge(reference)
    asked: dict[str, Request] = {}
    for temperature in TEMPERATURES:
        asked |= requests(asked_prompts, temperature)

    log("in-process engine, one at a time")
    base = run(engine(prefix_cache=False), list(asked.values()), 1)
    log("transformers")
    greedy = {k: r for k, r in asked.items() if r.params.temperature == 0}
    wanted = {k: tuple(reference_greedy(reference, r.prompt_ids, 32)) for k, r in greedy.items()}
    against_reference = judge.differences("transformers", greedy, wanted, base)

    found: list[Difference] = []
    modes = []
    for source in (engine_modes(asked, base), service_modes(asked)):
        for mode, tokens in source:
            parted = judge.differences(mode, asked, base, tokens)
            modes.append({"mode": mode, "requests": len(tokens), "differences": len(parted)})
            log(f"{mode}: {len(parted)} differences")
            found += parted
    log("bf16 agreement")
    bf16 = agreement([p for p in asked_prompts if 1 < len(p) <= 800])

    ok = (
        not against_reference
        and all(d.near_tie for d in found)
        and bf16["pdserve"] >= bf16["transformers"] - 0.01
    )
    figures = {
        "ok": ok,
        "greedy_equal_to_transformers": f"{len(greedy) - len(against_reference)} of {len(greedy)}",
        "against_transformers": [dataclasses.asdict(d) for d in against_reference],
        "modes": modes,
        "differences": [dataclasses.asdict(d) for d in found],
        "not_near_ties": sum(not d.near_tie for d in found),
        "bf16_argmax_agreement": bf16,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
