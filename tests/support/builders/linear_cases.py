"""Weights of each kind that the CUDA products take, and tokens for them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.weights import RawTensor
from pdserve.engine.weights.convert import unpack
from pdserve.kernels.cuda.linear import DeviceMatrix, pack

F16, BF16, F32 = np.float16, np.uint16, np.float32
Parts = dict[str, NDArray[Any]]
# Of each kind one that has two or three splits, with rows that fill no tile.
KINDS = [
    ("BF16", 520, 0, BF16, False),
    ("Q4_K", 768, 0, F16, False),
    ("Q8_0", 544, 0, F16, False),
    ("INT4", 640, 128, F16, True),
    ("INT8", 528, 16, F32, False),
    ("FP8", 640, 128, F32, False),
]


def floats(rng: np.random.Generator, shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
    values = rng.normal(0, 0.02, shape).astype(np.float32)
    if kind is BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(kind)


def parts_of(
    form: str, rows: int, cols: int, group: int, kind: Any, zeros: bool, seed: int = 0
) -> Parts:
    rng = np.random.default_rng(rows * 1000 + cols + seed)
    if form in ("BF16", "F16", "F32"):
        return {"values": floats(rng, (rows, cols), kind)}
    if form in ("Q4_K", "Q8_0"):
        values, size, halves = {"Q4_K": (256, 144, 2), "Q8_0": (32, 34, 1)}[form]
        blocks = rng.integers(0, 256, (rows, cols // values, size), dtype=np.uint8)
        blocks[..., : 2 * halves] = floats(rng, (*blocks.shape[:2], halves), F16).view(np.uint8)
        return {"blocks": blocks.reshape(rows, -1)}
    codes = rng.integers(0, 256, (rows, cols // 2 if form == "INT4" else cols), dtype=np.uint8)
    if form == "FP8":
        codes[codes & 127 == 127] = 0x80
    found = {"codes": codes, "scales": floats(rng, (rows, cols // group), kind)}
    if zeros:
        found["zeros"] = rng.integers(
            0, 16 if form == "INT4" else 256, (rows, cols // group), dtype=np.uint8
        )
    return found


def values_of(form: str, parts: Parts, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Return the weights, rounded once to the compute dtype; for bfloat16 the scales and minima of
    Q4_K are rounded, too.
    """
    with np.errstate(all="ignore"):
        if form == "Q4_K" and dtype == torch.bfloat16:
            scales, minima, levels = map(torch.from_numpy, q4_k_numbers(parts["blocks"]))
            values = levels * scales.bfloat16().double()[..., None]
            return (values - minima.bfloat16().double()[..., None]).to(dtype).view(rows, cols)
        return torch.tensor(unpack(RawTensor(parts, form, (rows, cols)))).to(dtype)


def q4_k_numbers(stored: NDArray[np.uint8]) -> tuple[NDArray[np.float32], ...]:
    """Return scales and minima [rows, groups], and levels [rows, groups, 32], of Q4_K's blocks."""
    blocks = stored.reshape(len(stored), -1, 144)
    d, dmin = (blocks[..., at : at + 2].copy().view(np.float16) for at in (0, 2))
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    six = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], -1)
    low = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], -1)
    runs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    levels = np.concatenate([runs & 15, runs >> 4], -2).reshape(len(blocks), -1, 32)
    scales, minima = (f.astype(np.float32) * n for f, n in ((d, six), (dmin, low)))
    return scales.reshape(len(blocks), -1), minima.reshape(len(blocks), -1), levels


def made(
    case: tuple[Any, ...], rows: int, dtype: torch.dtype, seed: int = 0
) -> tuple[DeviceMatrix, Tensor]:
    form, cols, group, kind, zeros = case
    parts = parts_of(form, rows, cols, group, kind, zeros, seed)
    matrix = pack(form, rows, cols, parts, dtype, "cpu")
    return matrix, values_of(form, parts, rows, cols, dtype)


def tokens_for(matrix: DeviceMatrix, tokens: int) -> Tensor:
    return torch.randn(tokens, matrix.cols, generator=torch.Generator().manual_seed(tokens)).to(
        matrix.dtype
    )


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()
