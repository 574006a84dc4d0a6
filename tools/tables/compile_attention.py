"""Launches of paged attention, one for each variant of its kernel."""

from collections.abc import Callable
from functools import partial

import torch
from builders.attention_rows import plan_rows

from pdserve.kernels.cuda.attention import paged_attention

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HEADS = ((64, 0), (80, 0), (96, 0), (128, 0), (192, 0), (256, 0), (576, 512))  # length and latent


def launches() -> list[tuple[str, Callable[[], object]]]:
    """Launch decode rows of one split, then of more splits next to a chunk: every kernel, for CPU
    tensors. Variants that spill registers are omitted: values of 512, and latent float16 under
    bfloat16."""
    cases = [(BF16, BF16, head_dim, latent, 2, False) for head_dim, latent in HEADS]
    cases += [(BF16, BF16, 576, 512, 128, False), (BF16, BF16, 64, 0, 64, False)]  # wide groups
    # as in Gemma and gpt-oss
    cases += [(BF16, BF16, 256, 0, 2, True), (BF16, BF16, 64, 0, 8, True)]
    cases += [(BF16, F16, 128, 0, 2, False), (BF16, F32, 128, 0, 2, False)]
    cases += [(BF16, F16, 256, 0, 2, False)]
    cases += [(F16, F16, 128, 0, 2, False), (F16, BF16, 128, 0, 2, False)]
    cases += [(F32, F32, head_dim, latent, 2, True) for head_dim, latent in HEADS]
    cases += [(F32, BF16, 128, 0, 2, False)]
    return [(_label(*case), partial(_launch, *case)) for case in cases]


def _label(
    dtype: torch.dtype, kv: torch.dtype, head_dim: int, latent: int, group: int, capped: bool
) -> str:
    names = f"{dtype} over {kv}".replace("torch.", "")
    rest = f"latent {latent}, " * bool(latent) + f"groups of {group}" + ", capped, sinks" * capped
    return f"attention, {names}, heads of {head_dim}, {rest}"


def _launch(
    dtype: torch.dtype, kv: torch.dtype, head_dim: int, latent: int, group: int, capped: bool
) -> None:
    pool = torch.zeros(2, 1 if latent else 2, 1 if latent else 2, 16, head_dim, dtype=kv)
    num_heads = pool.shape[2] * group
    for lens in ((1, 1), (2000, 100)):
        rows = plan_rows((0, 1, 1 + lens[1]), (lens[0], lens[1]), 1, torch.zeros(2, 125).int())
        q = torch.zeros(1 + lens[1], num_heads, head_dim, dtype=dtype)
        sinks = torch.zeros(num_heads) if capped else None
        cap = 50.0 if capped else 0.0
        paged_attention(q, pool, rows, 0.1, soft_cap=cap, sinks=sinks, latent=latent)
