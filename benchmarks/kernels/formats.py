"""The cost of each weight format on the native kernels: memory, time of a product, time to pack.

`make bench-formats` (or `python -m benchmarks.kernels.formats [FORMAT ...]`) prints a JSON line for
each format: stored and packed bits per weight, the product of one row against a classic format's of
the same shape (Q4_0; Q8_0 for 8 bits), and the packing time. Products read as many matrices as fill
WORKING_SET, on all cores; both formats alternate, and the ratio is the median of the pairs: drift
of the machine affects both.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pdserve.engine.weights import BLOCKS, BlockFormat, RawTensor
from pdserve.engine.weights.formats import formats
from pdserve.engine.weights.formats.grouped import GroupedFormat
from pdserve.engine.weights.formats.i_quants import LevelFormat
from pdserve.kernels._native import Matrix, linear_into
from pdserve.kernels.cpu import FORMATS, CpuKernels

ROWS, COLS = 2048, 2048
WORKING_SET = 192 << 20  # bytes, beyond every cache
PAIRS = 15
SMALL, LARGE = "Q4_0", "Q8_0"  # references for formats of up to 6 bits, and of 8


class Variant(NamedTuple):
    """A grouped format: columns of a group (0: all), type of scales, with zeros."""

    format: str
    group: int
    scales: str
    zeros: bool


GROUPED = {
    "GPTQ 4 bits, 128": Variant("INT4", 128, "float16", True),
    "AWQ, 32": Variant("INT4", 32, "float16", True),
    "GPTQ 4 bits, 128, symmetric": Variant("INT4", 128, "float16", False),
    "compressed int4, 32, bf16": Variant("INT4", 32, "uint16", False),
    "GPTQ 8 bits, 128": Variant("INT8", 128, "float16", True),
    "int8 of outputs": Variant("INT8", 0, "float32", False),
    "FP8 of blocks": Variant("FP8", 128, "float32", False),
    "FP8 of outputs": Variant("FP8", 0, "float32", False),
    "NVFP4 of compressed-tensors": Variant("FP4", 16, "uint8", False),
}


FORMATS_OF_BLOCKS = [name for name in formats() if name in FORMATS]
LEVELS = [name for name, form in formats().items() if isinstance(form, LevelFormat)]


class Stored(NamedTuple):
    """A weight of ROWS x COLS as stored in files."""

    bits: float  # per value
    pack: Callable[[], Matrix]


def stored(kernels: CpuKernels, name: str) -> Stored:
    rng = np.random.default_rng(0)
    if name in GROUPED:
        return _grouped(kernels, GROUPED[name], rng)
    form = formats()[name]
    assert isinstance(form, BlockFormat)
    data = rng.integers(0, 60, (ROWS, form.row_bytes(COLS)), np.uint8)  # small scales
    if name == "MXFP4":  # bytes of exponents: these would be slower numbers
        data[:, :: form.block_bytes] = 120
    bits = 8 * form.block_bytes / form.block_values
    if isinstance(form, LevelFormat):
        raw = RawTensor({BLOCKS: data}, name, (ROWS, COLS))

        def pack_levels() -> Matrix:
            levels = form.packable(raw)
            return kernels.pack_groups(levels.format, **levels.parts)

        return Stored(bits, pack_levels)
    return Stored(bits, lambda: kernels.pack(data, name, ROWS, COLS))


def _grouped(kernels: CpuKernels, variant: Variant, rng: np.random.Generator) -> Stored:
    form = formats()[variant.format]
    assert isinstance(form, GroupedFormat)
    codes = rng.integers(0, 120, (ROWS, COLS * form.bits // 8), np.uint8)
    groups = COLS // variant.group if variant.group else 1
    scales = np.full((ROWS, groups), 0.01, np.float32)
    if variant.scales == "uint8":
        scales = np.full((ROWS, groups), 0x38, np.float32)  # one
    if variant.scales == "uint16":
        scales = (scales.view(np.uint32) >> 16).astype(np.uint16)
    scales = scales.astype(variant.scales)
    divisors = np.ones(ROWS, np.float32) if variant.format == "FP4" else None
    zeros = rng.integers(0, 1 << form.bits, (ROWS, groups), np.uint8) if variant.zeros else None
    # Files store zeros in as many bits as levels.
    bits = form.bits + (8 * scales.itemsize + form.bits * variant.zeros) * groups / COLS
    return Stored(bits, lambda: kernels.pack_groups(variant.format, codes, scales, zeros, divisors))


def seconds(kernels: CpuKernels, matrices: list[Matrix]) -> float:
    """Seconds of one row's product with each matrix in turn."""
    x = np.random.default_rng(1).normal(size=(1, COLS)).astype(np.float32)
    out = np.empty((1, ROWS), np.float32)
    start = time.perf_counter()
    for matrix in matrices:
        linear_into(kernels.context, x, [matrix], out)
    return (time.perf_counter() - start) / len(matrices)


def copies(source: Stored) -> list[Matrix]:
    first = source.pack()
    return [first, *(source.pack() for _ in range(WORKING_SET // first.nbytes))]


def measure(kernels: CpuKernels, name: str) -> dict[str, Any]:
    source = stored(kernels, name)
    rival = LARGE if source.bits > 7 else SMALL
    mine, theirs = copies(source), copies(stored(kernels, rival))
    begin = time.perf_counter()
    again = copies(source)
    per_weight = (time.perf_counter() - begin) / (len(again) * ROWS * COLS)
    ratios = [seconds(kernels, mine) / seconds(kernels, theirs) for _ in range(PAIRS)]
    packed_bits = 8 * mine[0].nbytes / (ROWS * COLS)
    return {
        "format": name,
        "layout": mine[0].layout,
        "stored_bits": round(source.bits, 3),
        "packed_bits": round(packed_bits, 3),
        "memory": round(packed_bits / source.bits, 3),
        "beside": rival,
        "time": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "pack_1e9_s": round(per_weight * 1e9, 1),
    }


def known() -> list[str]:
    """The formats that have a packed form."""
    return [*FORMATS_OF_BLOCKS, *LEVELS, *GROUPED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=known(), metavar="FORMAT")
    kernels = CpuKernels()
    print(json.dumps({"numerics": kernels.numerics, "pairs": PAIRS}), flush=True)
    for name in parser.parse_args().formats:
        print(json.dumps(measure(kernels, name)), flush=True)


if __name__ == "__main__":
    main()
