"""Launches of linear.py that together compile each of its kernels: formats, types, tiles."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from compile_only import MOST_SHARED
from triton.runtime import driver

from pdserve.kernels.cuda.linear import (
    DeviceMatrix,
    ProductTarget,
    pack,
    tall_tiles,
    tiles_of_width,
    width_of,
)
from pdserve.kernels.cuda.linear import product as linear

ROWS, COLS = 256, 1024
# Tokens, maximum tokens of a tile, and whether one program adds all splits of its tile.
EVERY = (
    *((n, n, looped) for n in (16, 32, 64) for looped in (False, True)),
    (256, 64, True),
    (256, 128, False),
    (256, 128, True),
)
ENDS = (EVERY[0], (256, 64, True), EVERY[-1])  # the fewest and the most registers

# Format, columns of a group, type of scales, whether there are zeros.
PLAIN = ("BF16", 0, np.uint16, False)
Q4_K = ("Q4_K", 0, np.uint8, False)
Q8_0 = ("Q8_0", 0, np.uint8, False)
GPTQ = ("INT4", 128, np.float16, True)
EXACT_INT4 = ("INT4", 32, np.float32, True)
INT4_PAIRS = ("INT4", 32, np.float16, False)
INT8_16 = ("INT8", 16, np.float32, False)
INT8_ROWS = ("INT8", COLS, np.float16, True)
FP8 = ("FP8", 128, np.float32, False)
FP8_ROWS = ("FP8", COLS, np.uint16, False)

LAUNCHED = (
    (torch.bfloat16, (PLAIN, Q4_K, GPTQ), EVERY),
    (torch.bfloat16, (Q8_0, EXACT_INT4, INT4_PAIRS, INT8_16, INT8_ROWS, FP8, FP8_ROWS), ENDS),
    (torch.float16, (PLAIN, Q4_K, GPTQ, INT8_16), ENDS),
    (torch.float32, (PLAIN, Q4_K, Q8_0), ENDS),
)


def matrix(
    format: str, group: int, scales: type[np.generic], zeros: bool, dtype: torch.dtype
) -> DeviceMatrix:
    """A weight matrix of zeros."""
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


def launch(made: DeviceMatrix, tokens: int, width: int, looped: bool, bias: bool) -> None:
    arch = driver.active.get_current_target().arch
    target = ProductTarget(arch == 90, MOST_SHARED[arch])
    width = min(width, width_of(made, tokens, target))
    tall = tall_tiles(made, tokens)
    tiles = tiles_of_width(made, width, tall, looped, target)
    x = torch.zeros(tokens, COLS, dtype=made.dtype)
    linear.product(x, made, torch.zeros(ROWS) if bias else None, None, None, tiles)


def launches() -> list[tuple[str, Callable[[], None]]]:
    """Yield a label and a launch for each kernel."""
    found: list[tuple[str, Callable[[], None]]] = []
    for dtype, formats, shapes in LAUNCHED:
        for stored in formats:
            made = matrix(*stored, dtype)
            for tokens, width, looped in shapes:
                kind = "looped" if looped else "separate"
                label = f"linear {stored[0]}/{stored[1]} {dtype} {tokens} tokens by {width} {kind}"
                found.append((label, partial(launch, made, tokens, width, looped, bias=looped)))
    return found
