"""The cost of the engine's Python code per row and step, with a model that computes nothing and
tokens that are ready at once. The minimum of several runs counts: other load on the machine only
adds."""

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pdserve.engine.api import Request, SamplingParams
from pdserve.engine.engine import Engine, Pending
from pdserve.engine.execution import Batch, Ints
from pdserve.engine.kv import KvIdentity, KvSpec, LayerGroup, pool_sizes
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import EngineLimits
from pdserve.kernels.sampling_ops import StreamSettings

VOCAB = 256
SPEC = KvSpec(64, (LayerGroup((0,), "full", 0, 1, 1, "float32", 0, 1),))
WARM_STEPS, STEPS, RUNS = 60, 60, 9


class NoModel:
    """A model without hidden states and logits."""

    def forward(self, batch: Batch[Ints], kv: KvCache) -> Any:
        return np.broadcast_to(np.float32(0), (len(batch.logit_tokens), VOCAB))

    def logits(self, hidden: Any) -> Any:
        return hidden

    def states(self, hidden: Any) -> Any:
        return hidden


class ReadyTokens:
    """Token 3 for each row."""

    def __init__(self, count: int) -> None:
        self.tokens = np.full(count, 3)

    def read(self) -> list[int]:
        return [3] * len(self.tokens)


class ReadySampling:
    """Streams and samples that cost nothing."""

    def stream(self, settings: StreamSettings, vocab: int) -> StreamSettings:
        return settings

    def begin(
        self, logits: Any, rows: list[int], streams: list[Any], num_generated: list[int]
    ) -> ReadyTokens:
        return ReadyTokens(len(rows))

    def sample(
        self,
        logits: Any,
        rows: list[int],
        streams: list[Any],
        generated: list[list[int]],
        masks: Any = None,
    ) -> list[int]:
        return [3] * len(rows)

    def logprobs(
        self, logits: Any, tokens: list[int], count: int, also: Sequence[int] = ()
    ) -> list[Any]:
        raise AssertionError("no request here asks for log-probabilities")


def cost(rows: int, ahead: bool) -> dict[str, float]:
    """Microseconds of CPU per row: {"least": ..., "median": ...}."""
    num_blocks = rows * 40 + 100
    limits = EngineLimits(
        vocab_size=VOCAB,
        context_len=8192,
        block_size=SPEC.block_size,
        num_blocks=num_blocks,
        max_running=rows,
        chunk_size=512,
    )
    kv = KvCache(SPEC, pool_sizes(SPEC, num_blocks, rows, 512))
    engine = Engine(NoModel(), kv, limits, ReadySampling(), kv_identity=KvIdentity(b"cost"))
    for n in range(rows):
        params = SamplingParams(max_tokens=2000, temperature=0.7)
        engine.submit(Request(f"r{n}", tuple(range(3, 40)), params, n))
    pending: Pending | None = None

    def step() -> int:
        nonlocal pending
        if pending is None:
            plan = engine.schedule()
            assert plan is not None
            pending = engine.launch(plan)
        following = engine.launch_ahead(pending) if ahead else None
        done = engine.collect(pending)
        pending = following
        return len(done.events)

    for _ in range(WARM_STEPS):
        step()
    found = []
    for _ in range(RUNS):
        begun = time.process_time()
        assert all(step() == rows for _ in range(STEPS))
        assert (pending is not None) == ahead
        found.append((time.process_time() - begun) / STEPS / rows * 1e6)
    return {"least": round(min(found), 2), "median": round(sorted(found)[RUNS // 2], 2)}


if __name__ == "__main__":
    found = {"us_a_row_ahead": cost(256, ahead=True), "us_a_row_one_by_one": cost(256, ahead=False)}
    print(json.dumps(found))
