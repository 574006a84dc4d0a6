"""Launches of kernels/cuda/layer that together compile each of its kernels."""

from collections.abc import Callable
from functools import partial

import torch

from pdserve.kernels.cuda.layer import (
    HeadNorms,
    HeadRange,
    Rotation,
    activated,
    add,
    add_norm,
    gated,
    norm,
    prepare_heads,
)
from pdserve.kernels.cuda.linear import SplitSums

BF16 = torch.bfloat16
SPLITS = 3


def launches() -> list[tuple[str, Callable[[], object]]]:
    """Yield a label and a launch for each kernel."""
    found: list[tuple[str, Callable[[], object]]] = []
    for size in (1024, 4096, 8192):
        x, weight = torch.zeros(4, size, dtype=BF16), torch.zeros(size)
        found += [
            (f"norm of {size}", partial(norm, x, weight, None, 1e-6)),
            (f"layer norm of {size}", partial(norm, x, weight, weight, 1e-6, is_layer=True)),
            (f"sum and norm of {size}", partial(add_norm, x, x, weight, None, 1e-6)),
            (f"sum of three of {size}", partial(add, x, x, x, 0.5)),
        ]
        sums = SplitSums(torch.zeros(SPLITS, 4, size), weight, BF16)
        label = f"sums of splits and norm of {size}"
        found.append((label, partial(add_norm, x, sums, weight, None, 1e-6)))
    pair = torch.zeros(4, 4096, dtype=BF16)
    sums = SplitSums(torch.zeros(SPLITS, 4, 4096), None, BF16)
    found.append(("gated silu of sums of splits", partial(gated, sums, "silu")))
    for kind in ("silu", "gelu_tanh", "gelu", "swiglu_oai"):
        found.append((f"gated {kind}", partial(gated, pair, kind)))
        if kind != "swiglu_oai":
            found.append((f"activated {kind}", partial(activated, pair, kind)))
    for dim in (64, 80, 128, 256):
        for kv_dtype in (BF16, torch.float16):
            found.append((f"heads of {dim} to {kv_dtype}", partial(_heads, dim, kv_dtype)))
    return found


def _heads(dim: int, kv_dtype: torch.dtype) -> None:
    kv = torch.zeros(4, 2, 8, 16, dim, dtype=kv_dtype)
    x, numbers = torch.zeros(4, 32 * dim, dtype=BF16), torch.zeros(4, dtype=torch.int32)
    rotation = Rotation(torch.zeros(64, dim // 2), torch.zeros(64, dim // 2))
    norms = HeadNorms(torch.zeros(dim), torch.zeros(dim), 1e-6)
    heads = HeadRange(0, 16, 8, 8, dim)
    for some in (norms, None):
        prepare_heads(x, heads, some, rotation, numbers, kv, numbers)
