"""A decode worker process whose model computes nothing, to measure everything around the kernels.

`fast_decode.py CLOCK STEP_S CHUNK_S WORDS...`: a step with decode rows takes STEP_S, one with a
chunk of a prompt CHUNK_S if that is not 0. Then it records the time (time.monotonic) in the file
CLOCK; the tokens of step s are `s % MARKS`, whose texts are the MARKS characters from "!" on. WORDS
are those of `pdserve decode`.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from builders.byte_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, write_tokenizer
from front.clock import MARKS, StepClock

from pdserve.cli.main import main as pdserve
from pdserve.engine.api import EngineConfig
from pdserve.engine.checkpoints import CardData
from pdserve.engine.engine import Engine
from pdserve.engine.execution import Batch, Ints
from pdserve.engine.kv import KvIdentity, KvSpec, LayerGroup, pool_sizes
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import EngineLimits
from pdserve.kernels.cpu import CpuKernels, CpuSampling
from pdserve.services.worker import process

CONTEXT_LEN = 200_000
RUNNING = 128
BLOCK = 64
MODEL = "fast"
SPEC = KvSpec(BLOCK, (LayerGroup((0,), "full", 0, 1, 1, "float32", 0, 1),))


def tokenizer_json() -> bytes:
    """A tokenizer with one token per byte."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return (Path(folder) / "tokenizer.json").read_bytes()


CARD = CardData(
    name=MODEL,
    architecture="Fast",
    context_len=CONTEXT_LEN,
    vocab_size=VOCAB_SIZE,
    eos_ids=(),
    bos_id=None,
    adds_bos=False,
    tokenizer_json=tokenizer_json(),
    chat_template=CHAT_TEMPLATE,
    weights_digest="00",
    quantization="none",
    created=1,
    weights_bytes=1,
    generation_config={},
)


class FastModel:
    """A model that waits, then returns the same logits for every row."""

    def __init__(self, clock: StepClock, step_s: float, chunk_s: float) -> None:
        self._clock = clock
        self._step_s = step_s
        self._chunk_s = chunk_s
        self._logits = np.eye(MARKS, VOCAB_SIZE, dtype=np.float32)
        self._next = time.monotonic()

    def forward(self, batch: Batch[Ints], kv: KvCache) -> Any:
        if batch.num_decode_rows < len(batch.kv_lens) and self._chunk_s:
            time.sleep(self._chunk_s)
            self._next = time.monotonic()
        elif batch.num_decode_rows:
            self._next = max(self._next + self._step_s, time.monotonic())
            time.sleep(max(0.0, self._next - time.monotonic()))
        step = self._clock.tick(time.monotonic())
        return np.broadcast_to(self._logits[step % MARKS], (len(batch.logit_tokens), VOCAB_SIZE))

    def logits(self, hidden: Any) -> Any:
        return np.ascontiguousarray(hidden)

    def states(self, hidden: Any) -> Any:
        return hidden


def main() -> int:
    clock, step_s, chunk_s = StepClock(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    words = sys.argv[4:]

    def build(config: EngineConfig, progress: Callable[[str, float], None]) -> Any:
        num_blocks = 3 * RUNNING * 16 + CONTEXT_LEN // BLOCK
        limits = EngineLimits(
            vocab_size=VOCAB_SIZE,
            context_len=CONTEXT_LEN,
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_running=RUNNING,
            chunk_size=512,
        )
        engine = Engine(
            FastModel(clock, step_s, chunk_s),
            KvCache(SPEC, pool_sizes(SPEC, num_blocks, RUNNING, limits.chunk_size)),
            limits,
            CpuSampling(CpuKernels(1, "").context),
            kv_identity=KvIdentity(b"fast"),
        )
        return engine, CARD

    process.build_engine = build
    return pdserve(["decode", *words])


if __name__ == "__main__":
    sys.exit(main())
