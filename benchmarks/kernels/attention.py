"""Native attention at SmolLM2's sizes (9 query heads, 3 kv heads of 64): one JSON line per case.

GFLOP/s count the products with attended keys only, GB/s the keys and values that must be read once;
the limits of the machine, measured in the same run with torch (a float32 matrix product, a sum over
memory), are given for both. Times are the best of many calls; CPU time on one thread, which is
least affected by other load, otherwise wall time.

    python benchmarks/kernels/attention.py [--threads N] [--types float32 bfloat16 ...] [--isa NAME]
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from pdserve.kernels import _native as native

KV_HEADS, GROUP, HEAD_DIM, BLOCK = 3, 3, 64, 32
HEADS = KV_HEADS * GROUP
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
CASES = (  # name, rows, tokens per row, keys of the last token
    ("decode", 1, 1, 256),
    ("decode", 32, 1, 256),
    ("decode", 1, 1, 4096),
    ("decode", 32, 1, 4096),
    ("prefill", 1, 512, 512),
    ("prefill", 1, 512, 2048),
)


def best(call: Callable[[], object], threads: int, budget_s: float) -> float:
    """Seconds of the fastest of the calls that fit the budget."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    call()
    fastest, end = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end:
        start = clock()
        call()
        fastest = min(fastest, clock() - start)
    return fastest


def limits(threads: int) -> dict[str, float]:
    """Torch's rates: float32 products and reading memory."""
    torch.set_num_threads(threads)
    a, b = torch.randn(768, 768), torch.randn(768, 768)
    flops = 2 * 768**3 / best(lambda: torch.mm(a, b), threads, 1.0)
    memory = torch.ones(1 << 26)
    rate = memory.nbytes / best(memory.sum, threads, 1.0)
    return {"peak_gflops": round(flops / 1e9, 1), "peak_gbs": round(rate / 1e9, 1)}


def measure(
    context: native.Context, kind: str, rows: int, tokens: int, keys: int, budget_s: float
) -> dict[str, float]:
    width = -(-keys // BLOCK)
    table = torch.randperm(rows * width).view(rows, width)
    block_bytes = native.kv_block_bytes(kind, KV_HEADS, BLOCK, HEAD_DIM)
    kv = torch.zeros(rows * width, block_bytes, dtype=torch.uint8)
    for row in range(rows):
        position = torch.arange(keys)
        slots = table[row, position // BLOCK] * BLOCK + position % BLOCK
        k, v = torch.randn(2, keys, KV_HEADS, HEAD_DIM)
        native.write_kv(context, kv, kind, BLOCK, k, v, slots)
    q = torch.randn(rows * tokens, HEADS, HEAD_DIM)
    out = torch.empty_like(q)
    starts = torch.arange(rows + 1) * tokens
    lens = torch.full((rows,), keys)

    def call() -> None:
        native.paged_attention(
            context, q, kv, kind, KV_HEADS, BLOCK, table, starts, lens, HEAD_DIM**-0.5, 0, 0.0, out
        )

    seconds = best(call, context.threads, budget_s)
    seen = rows * (tokens * keys - tokens * (tokens - 1) // 2)
    read = rows * keys * KV_HEADS * HEAD_DIM * 2 * SIZES[kind]
    return {
        "us": round(seconds * 1e6, 2),
        "gflops": round(seen * HEADS * HEAD_DIM * 4 / seconds / 1e9, 1),
        "gbs": round(read / seconds / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"], choices=list(SIZES))
    parser.add_argument("--isa", default="")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a case")
    args = parser.parse_args()
    context = native.Context(args.threads, isa=args.isa)
    peaks = limits(args.threads)
    for kind in args.types:
        for name, rows, tokens, keys in CASES:
            case = {
                "case": name,
                "isa": context.isa,
                "threads": args.threads,
                "kv": kind,
                "rows": rows,
                "tokens": tokens,
                "keys": keys,
            }
            figures = measure(context, kind, rows, tokens, keys, args.budget)
            print(json.dumps(case | figures | peaks), flush=True)


if __name__ == "__main__":
    main()
