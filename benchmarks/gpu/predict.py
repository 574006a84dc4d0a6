"""The data that each kernel of a step moves and computes, and its minimum time on an H100.
Calculated, not measured. Prints the tables of docs/gpu.md.

    python benchmarks/gpu/predict.py
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

COPY_BYTES_S = 3.35e12  # of an H100 SXM's memory (NVIDIA H100 data sheet)
BF16_FLOPS = 989e12  # of its tensor cores, dense (same source)
SPLIT = 256  # keys: kernels/cuda/attention/paged.py
BITS = {"bf16": 16.0, "Q4_K": 5.0, "INT4": 4.25, "FP8": 8.25}  # per weight, as packed


@dataclass(frozen=True)
class Shape:
    """A model's shape; `ffn` is that of one expert if it has experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 0
    top_k: int = 0


QWEN = Shape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151_936)
LLAMA = Shape("Llama 3 8B", 32, 4096, 32, 8, 128, 14_336, 128_256)
QWEN_MOE = Shape("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, 151_936, experts=128, top_k=8)


class Cost(NamedTuple):
    """The cost of one launch, or of a pair that belongs together."""

    kernel: str
    launches: int  # per step
    num_bytes: float
    flops: float

    @property
    def seconds(self) -> float:
        """The minimum time of all its launches in a step."""
        return self.launches * max(self.num_bytes / COPY_BYTES_S, self.flops / BF16_FLOPS)


def decode_step(model: Shape, rows: int, keys: int, bits: float) -> Iterator[Cost]:
    """A step of decode rows that attend to this many keys each, with keys and values in
    bfloat16."""
    m, n = model, rows
    qkv = (m.heads + 2 * m.kv_heads) * m.head_dim
    attended = m.heads * m.head_dim

    def product(name: str, outputs: int, inputs: int, count: int, out_bytes: int = 2) -> Cost:
        weights = outputs * inputs * bits / 8
        return Cost(
            f"product {name} [{outputs}, {inputs}]",
            count,
            weights + n * (2 * inputs + out_bytes * outputs),
            2 * n * outputs * inputs,
        )

    row = 2 * n * m.hidden
    yield product("of q, k, v", qkv, m.hidden, m.layers)
    yield Cost("heads: norm, rope, to the cache", m.layers, 2 * 2 * n * qkv, 0)
    kv_bytes = 2 * 2 * n * keys * m.kv_heads * m.head_dim
    partials = 2 * 4 * n * m.heads * -(-keys // SPLIT) * (m.head_dim + 2)
    flops = 4 * n * m.heads * m.head_dim * keys
    yield Cost("attention: splits and merge", m.layers, kv_bytes + partials, flops)
    yield product("of the output", m.hidden, attended, m.layers)
    yield Cost("sum and norm", 2 * m.layers, 4 * row, 0)
    if m.experts:
        yield from experts_of(m, n, bits)
    else:
        yield product("of gate and up", 2 * m.ffn, m.hidden, m.layers)
        yield Cost("gate", m.layers, 2 * n * 3 * m.ffn, 0)
        yield product("down", m.hidden, m.ffn, m.layers)
    yield product("of the head", m.vocab, m.hidden, 1, out_bytes=4)
    yield Cost("sampling: survey and choice", 1, 4 * n * m.vocab, 0)


def experts_of(m: Shape, rows: int, bits: float) -> Iterator[Cost]:
    """Expected number of experts read in one layer, if each token's experts are drawn uniformly."""
    pairs, read = rows * m.top_k, m.experts * (1 - (1 - m.top_k / m.experts) ** rows)

    def grouped(name: str, outputs: int, inputs: int) -> Cost:
        weights = read * outputs * inputs * bits / 8
        moved = weights + 2 * pairs * (inputs + outputs)
        return Cost(f"experts: {name}", m.layers, moved, 2 * pairs * outputs * inputs)

    router = 4 * m.experts * m.hidden + rows * (4 * m.hidden + 4 * m.experts)
    router_flops = 2 * rows * m.experts * m.hidden
    yield Cost("experts: the router's product, float32", m.layers, router, router_flops)
    yield Cost("experts: route", m.layers, rows * (4 * m.experts + 8 * m.top_k), 0)
    yield Cost("experts: group", m.layers, 8 * pairs * m.experts, 0)
    yield grouped("gate and up", 2 * m.ffn, m.hidden)
    yield Cost("experts: gate", m.layers, 2 * pairs * 3 * m.ffn, 0)
    yield grouped("down", m.hidden, m.ffn)
    yield Cost("experts: weighted sum", m.layers, 2 * (pairs + rows) * m.hidden, 0)


def table(model: Shape, rows: int, keys: int, format: str) -> Iterator[str]:
    """The table in Markdown lines."""
    costs = list(decode_step(model, rows, keys, BITS[format]))
    yield f"{model.name}, {rows} rows of {keys:,} keys, weights in {format}:"
    yield ""
    yield "| kernel | launches a step | MB a launch | GFLOP a launch | µs a step at least |"
    yield "|---|---|---|---|---|"
    for cost in costs:
        megabytes, gigaflops = cost.num_bytes / 1e6, cost.flops / 1e9
        yield (
            f"| {cost.kernel} | {cost.launches} | {megabytes:,.2f} | {gigaflops:,.2f} | "
            f"{cost.seconds * 1e6:,.0f} |"
        )
    total = sum(cost.seconds for cost in costs)
    launches = sum(cost.launches for cost in costs)
    yield f"| all | {launches} | | | {total * 1e6:,.0f} ({rows / total:,.0f} tokens/s) |"


if __name__ == "__main__":
    for arguments in (
        (QWEN, 256, 1024, "bf16"),
        (LLAMA, 1, 1024, "bf16"),
        (LLAMA, 1, 1024, "Q4_K"),
        (LLAMA, 64, 1024, "bf16"),
        (QWEN_MOE, 1, 1024, "bf16"),
        (QWEN_MOE, 64, 1024, "bf16"),
    ):
        print("\n".join(table(*arguments)), end="\n\n")
