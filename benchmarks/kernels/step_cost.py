"""The cost of a decode step outside the model: an Engine whose forward pass is free.

`python -m benchmarks.kernels.step_cost` prints microseconds per step, by part, for 1, 8 and 32
sequences, greedy and at T = 1: processor time of this thread, the fastest of several stretches of
steps, since other programs can only add. "native" is the call of the sampling kernels; "own" is the
step without it and without the model. --profile ROWS prints cProfile's output.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.api import Request, SamplingParams
from pdserve.engine.engine import Engine
from pdserve.engine.execution import Batch
from pdserve.engine.kv import KvSpec, LayerGroup
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import EngineLimits
from pdserve.kernels._native import Context
from pdserve.kernels.cpu import CpuSampling

VOCAB, BLOCK_SIZE, PROMPT, STRETCH = 49152, 16, 128, 60
PARTS = ("schedule", "launch", "collect")


class Timed:
    """Call a function and add up the time."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        start = time.thread_time()
        try:
            return self.call(*args)
        finally:
            self.seconds += time.thread_time() - start


class FreeModel:
    """A model that returns the same logits at every step."""

    def __init__(self) -> None:
        self.scores = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(0)) * 3

    def forward(self, batch: Batch, kv: KvCache) -> Tensor:
        return self.scores[: len(batch.logit_tokens)]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Backend:
    """A backend with native sampling and nothing else."""

    def __init__(self) -> None:
        sampling = CpuSampling(Context(1))
        self.stream = sampling.stream
        self.sample = Timed(sampling.sample)
        self.logprobs = sampling.logprobs


def engine(backend: Any) -> Engine:
    spec = KvSpec(BLOCK_SIZE, (LayerGroup((0,), "full", 0, 1, 4, "float32", 0, 1),))
    limits = EngineLimits(VOCAB, 8192, BLOCK_SIZE, 4096, 32, 256, eos_ids=frozenset({2}))
    return Engine(FreeModel(), KvCache(spec, [4096]), limits, backend)


def measure(rows: int, temperature: float, stretches: int) -> dict[str, float]:
    """Microseconds per step by part, of the stretch with the smallest "own"."""
    backend = Backend()
    served = engine(backend)
    for i in range(rows):
        prompt = tuple(range(1000 * i, 1000 * i + PROMPT))
        params = SamplingParams(temperature=temperature, ignore_eos=True)
        served.submit(Request(f"request-{i}", prompt, params, seed=i))
    while any(s.is_prefix for job in served.jobs.by_key.values() for s in job.sequences) or (
        served.jobs.waiting
    ):
        served.step()
    best: dict[str, float] = {}
    for _ in range(stretches):
        spent = dict.fromkeys(PARTS, 0.0)
        backend.sample.seconds = 0.0
        for _ in range(STRETCH):
            at = [time.thread_time()]
            plan = served.schedule()
            assert plan is not None
            at.append(time.thread_time())
            pending = served.launch(plan)
            at.append(time.thread_time())
            served.collect(pending)
            at.append(time.thread_time())
            for part, start, end in zip(PARTS, at, at[1:], strict=False):
                spent[part] += end - start
        native = backend.sample.seconds
        found = {**spent, "native": native, "own": sum(spent.values()) - native}
        if not best or found["own"] < best["own"]:
            best = found
    return {part: seconds / STRETCH * 1e6 for part, seconds in best.items()}


def main() -> None:
    """Print a line per kind of step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--stretches", type=int, default=20, help=f"of {STRETCH} steps")
    parser.add_argument("--profile", type=int, metavar="ROWS", help="profile that many sequences")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        with cProfile.Profile() as profile:
            measure(arguments.profile, 0.0, arguments.stretches)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    for rows in (1, 8, 32):
        for temperature in (0.0, 1.0):
            found = measure(rows, temperature, arguments.stretches)
            parts = "  ".join(f"{part} {us:6.1f}" for part, us in found.items())
            print(f"x{rows:<3} T={temperature:.0f}  {parts}  us a step")


if __name__ == "__main__":
    main()
