"""The decode speed of a mixture of experts, against a dense model that reads as many bytes per
token.

`python -m benchmarks.kernels.experts` runs both alternately on all cores: LAYERS layers of random
weights, 64 experts of which a token uses 8, and an MLP of the size of those 8. A step of x1 and of
x16 rows; the ratio is the dense model's time over the mixture's, the median of the pairs. At x1
both read the same bytes, so 1 is the limit set by memory; at x16 the mixture reads nearly all
experts.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pdserve.engine.execution import Batch, GroupTable
from pdserve.engine.kv import KvSpec
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models import (
    PRE_NORMS,
    ExpertRouting,
    LayerConfig,
    MixtureOfExperts,
    ModelConfig,
    NativeDecoder,
    tensor_shapes,
)
from pdserve.engine.models.rope import RopeConfig
from pdserve.engine.weights import BLOCKS, VALUES, RawTensor
from pdserve.kernels.cpu import CpuKernels

EXPERTS, TOP_K, SIZE, HIDDEN, LAYERS = 64, 8, 768, 1024, 8
BLOCK_SIZE, CONTEXT, PAIRS, STEPS = 32, 64, 15, 10
DENSE = ModelConfig(
    architecture="bench", vocab_size=1024, hidden_size=HIDDEN, ffn_size=TOP_K * SIZE, num_heads=8,
    num_kv_heads=2, head_dim=64, context_len=CONTEXT, norms=PRE_NORMS, norm_eps=1e-5,
    layers=(LayerConfig(RopeConfig(1e4, 64)),) * LAYERS, tied_head=True,
)  # fmt: skip


def mixture() -> ModelConfig:
    experts = MixtureOfExperts(EXPERTS, SIZE, ExpertRouting(TOP_K, normalized=True))
    layer = replace(DENSE.layers[0], feed_forward=experts)
    return replace(DENSE, layers=(layer,) * LAYERS)


def weights_of(config: ModelConfig) -> Callable[[str], RawTensor]:
    """Random weights: matrices in Q4_0, norms and routers in float32."""
    generator = np.random.default_rng(0)
    shapes = tensor_shapes(config)

    def weight(name: str) -> RawTensor:
        shape = shapes[name]
        if len(shape) == 1 or name.endswith("mlp.gate.weight"):
            values = generator.standard_normal(shape, np.float32)
            return RawTensor({VALUES: values}, "F32", shape)
        blocks = generator.integers(0, 256, (shape[0], shape[1] // 32, 18), np.uint8)
        blocks[..., :2] = np.array([0.01], np.float16).view(np.uint8)
        return RawTensor({BLOCKS: blocks.reshape(shape[0], -1)}, "Q4_0", shape)

    return weight


class Decoding:
    """A model with `rows` sequences whose last tokens are decoded repeatedly."""

    def __init__(self, config: ModelConfig, kernels: CpuKernels, rows: int) -> None:
        self.decoder = NativeDecoder(config, weights_of(config), kernels, "float16")
        self._rows = rows
        self._generator = np.random.default_rng(1)
        spec = KvSpec(BLOCK_SIZE, self.decoder.kv_groups)
        self._kv = KvCache(spec, [rows * CONTEXT // BLOCK_SIZE])

    def step(self) -> float:
        """Seconds of a step with different tokens each time."""
        rows, blocks = self._rows, CONTEXT // BLOCK_SIZE
        table = np.arange(rows * blocks, dtype=np.int64).reshape(rows, blocks)
        last = np.full(rows, CONTEXT - 1, np.int64)
        slots = table[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1
        batch = Batch(
            token_ids=self._generator.integers(0, DENSE.vocab_size, rows),
            positions=last,
            starts=np.arange(rows + 1, dtype=np.int64),
            kv_lens=np.full(rows, CONTEXT, np.int64),
            num_decode_rows=rows,
            groups=(GroupTable(table, slots),),
            logit_tokens=np.arange(rows, dtype=np.int64),
            kv_only=False,
        )
        began = time.perf_counter()
        self.decoder.forward(batch, self._kv)
        return time.perf_counter() - began

    def stretch(self) -> float:
        return statistics.median(self.step() for _ in range(STEPS))


def measure(kernels: CpuKernels) -> dict[str, object]:
    found = {}
    for rows in (1, 16):
        dense, sparse = (Decoding(config, kernels, rows) for config in (DENSE, mixture()))
        pairs = [(dense.stretch(), sparse.stretch()) for _ in range(PAIRS)][1:]
        found[f"x{rows}"] = {
            "dense_ms": round(1e3 * statistics.median(a for a, _ in pairs), 3),
            "mixture_ms": round(1e3 * statistics.median(b for _, b in pairs), 3),
            "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        }
    return {"isa": kernels.numerics, **found}


if __name__ == "__main__":
    print(json.dumps(measure(CpuKernels())))
