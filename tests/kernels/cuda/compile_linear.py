"""Launches of linear.py that together compile each of its kernels: formats, types, tiles."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pdserve.kernels.cuda import linear
from pdserve.kernels.cuda.weights import Matrix, pack

ROWS, COLS = 256, 1024
TOKENS = (1, 32, 64, 256)  # one for each width of tiles

# format, group, type of scales, whether there are zeros
STORED = (
    ("BF16", 0, np.uint16, False),
    ("Q4_K", 0, np.uint8, False),
    ("Q8_0", 0, np.uint8, False),
    ("INT4", 32, np.float16, False),
    ("INT4", 128, np.float16, True),
    ("INT4", 64, np.float32, True),
    ("INT4", COLS, np.uint16, False),
    ("INT8", 16, np.float32, False),
    ("INT8", 128, np.float16, True),
    ("FP8", 128, np.float32, False),
    ("FP8", COLS, np.uint16, False),
)


def matrix(
    format: str, group: int, scales: type[np.generic], zeros: bool, dtype: torch.dtype
) -> Matrix:
    """A weight of zeros."""
    if format == "BF16":
        parts = {"values": np.zeros((ROWS, COLS), scales)}
    elif group == 0:
        size = {"Q4_K": COLS // 256 * 144, "Q8_0": COLS // 32 * 34}[format]
        parts = {"blocks": np.zeros((ROWS, size), np.uint8)}
    else:
        parts = {
            "codes": np.zeros((ROWS, COLS // (2 if format == "INT4" else 1)), np.uint8),
            "scales": np.zeros((ROWS, COLS // group), scales),
        }
        if zeros:
            parts["zeros"] = np.zeros((ROWS, COLS // group), np.uint8)
    return pack(format, ROWS, COLS, parts, dtype, "cpu")


def launch(made: Matrix, tokens: int, looped: bool, bias: bool) -> None:
    tiles = replace(linear.tiles_of(made, tokens), looped=looped)
    x = torch.zeros(tokens, COLS, dtype=made.dtype)
    linear.product(x, made, torch.zeros(ROWS) if bias else None, None, None, tiles)


def launches() -> list[tuple[str, Callable[[], None]]]:
    """All of bfloat16, and of the other types the narrowest and the widest tiles."""
    found: list[tuple[str, Callable[[], None]]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for stored in STORED:
            made = matrix(*stored, dtype)
            for tokens in TOKENS if dtype == torch.bfloat16 else TOKENS[::3]:
                for looped in (False, True):
                    kind = "looped" if looped else "separate"
                    label = f"linear {stored[0]}/{stored[1]} {dtype} {tokens} tokens {kind}"
                    found.append(
                        (
                            label,
                            lambda made=made, tokens=tokens, looped=looped: launch(  # type: ignore[misc]
                                made, tokens, looped, bias=looped
                            ),
                        )
                    )
    return found
