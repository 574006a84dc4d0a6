"""Products with packed weights, relative to the memory and arithmetic limits of one core.

`python -m benchmarks.kernels.linear [FORMAT ...]` prints a JSON line of the core's limits and one
per format, shape (SmolLM2-135M's) and number of tokens: GB/s of packed bytes for one token, read
from memory (as many matrices as fill WORKING_SET), otherwise GOP/s. Processor time of one thread,
including the encoding of the inputs; the fastest eighth of many runs, since other programs can only
add.
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from pdserve.kernels._native import Context, Matrix, linear_into

LIMITS = Path(__file__).parents[1] / "cpu" / "limits.cpp"
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
TOKENS = (1, 8, 32, 128, 512)
BLOCKS = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}  # bytes per 32 values
K_BLOCKS = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}  # per 256
NUMBERS = {"BF16": 2, "F16": 2, "F32": 4}
WORKING_SET = 160 << 20
STRETCH_S = 0.5


def limits() -> dict[str, float]:
    """read_gb_s and the operations of each kind, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "limits"
        flags = ("-O3", "-march=native", "-std=c++17", "-pthread")
        subprocess.run(["g++", *flags, str(LIMITS), "-o", str(binary)], check=True)
        printed = subprocess.run([str(binary), "1"], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(printed.stdout)
    return found


def packed(context: Context, kind: str, rows: int, cols: int, copies: int) -> list[Matrix]:
    """The same random bytes packed `copies` times; numbers are small."""
    if kind in NUMBERS:
        row_bytes = cols * NUMBERS[kind]
    else:
        row_bytes = cols // 32 * BLOCKS[kind] if kind in BLOCKS else cols // 256 * K_BLOCKS[kind]
    stored = np.random.default_rng(0).integers(0, 60, (rows, row_bytes), np.uint8)
    return [Matrix.pack(context, kind, stored, rows, cols) for _ in range(copies)]


def seconds(context: Context, matrices: list[Matrix], tokens: int) -> float:
    """Seconds of one product with all the matrices."""
    x = np.random.default_rng(1).normal(size=(tokens, matrices[0].cols)).astype(np.float32)
    out = np.empty((tokens, sum(matrix.rows for matrix in matrices)), np.float32)
    times: list[float] = []
    while sum(times) < STRETCH_S or len(times) < 3:
        start = time.thread_time()
        linear_into(context, x, matrices, out)
        times.append(time.thread_time() - start)
    return sorted(times)[len(times) // 8]


def report(context: Context, kind: str, rows: int, cols: int) -> None:
    if kind in K_BLOCKS:
        cols = -(-cols // 256) * 256
    matrix = packed(context, kind, rows, cols, 1)
    for tokens in TOKENS:
        line: dict[str, str | float] = {"format": kind, "rows": rows, "cols": cols, "M": tokens}
        if tokens == 1:
            copies = packed(context, kind, rows, cols, -(-WORKING_SET // matrix[0].nbytes))
            each = seconds(context, copies, 1) / len(copies)
            line["gb_s"] = round(matrix[0].nbytes / each / 1e9, 1)
        else:
            each = seconds(context, matrix, tokens)
            line["gop_s"] = round(2 * rows * cols * tokens / each / 1e9)
        line["us"] = round(each * 1e6, 1)
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = (*BLOCKS, *K_BLOCKS, *NUMBERS)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=", ".join(known))
    kinds = parser.parse_args().formats or ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16"]
    if unknown := set(kinds) - set(known):
        parser.error(f"no format {', '.join(sorted(unknown))}")
    print(json.dumps({"limits": limits()}), flush=True)
    context = Context(1)
    for kind in kinds:
        for rows, cols in SHAPES:
            report(context, kind, rows, cols)


if __name__ == "__main__":
    main()
