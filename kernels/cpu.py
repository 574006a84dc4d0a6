"""The native CPU kernels (kernels/native, docs/cpu.md) as Python holds them.

A result for a token never depends on other tokens of the batch, on chunk borders or on the number
of threads; within one `numerics` it is the same bit for bit.
"""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.kernels import _native

VERSION = "native-4"  # raise it with any change of a kernel's results
FORMATS = frozenset(_native.formats())  # that pack knows
GROUPED = frozenset(_native.grouped_formats())  # that pack_groups knows
SCALES = {"float16": "F16", "uint16": "BF16", "float32": "F32", "uint8": "E4M3"}
KV_BLOCK = 16  # a block's tokens must be a multiple of it


class CpuKernels:
    """Threads, and the kernels of the best instruction set that this machine has."""

    def __init__(self, threads: int = 0, isa: str = "") -> None:
        """`threads` 0: see default_threads. Helpers are pinned if the process may use exactly that
        many cores. `isa`: one of `_native.isas()`; ValueError for another.
        """
        threads = threads or default_threads()
        cores = sorted(os.sched_getaffinity(0))
        self.context = _native.Context(threads, cores if len(cores) == threads else [], isa)
        self.numerics = f"{VERSION}/cpu/{self.context.isa}"

    def pack(self, data: NDArray[Any], format: str, rows: int, cols: int) -> "_native.Matrix":
        """Weights [rows, cols] as stored, laid out for the kernels.

        `data`: uint8 blocks [rows, bytes] of a GGUF type, or numbers of F16, BF16 (as uint16) or
        F32 [rows, cols]; `format` one of FORMATS, else ValueError. `data` is not needed afterwards.
        """
        return _native.Matrix.pack(self.context, format, _bytes(data), rows, cols)

    def pack_groups(
        self,
        format: str,
        codes: NDArray[np.uint8],
        scales: NDArray[Any],
        zeros: NDArray[np.uint8] | None = None,
        divisors: NDArray[np.float32] | None = None,
    ) -> "_native.Matrix":
        """Weights whose groups of columns share a scale, laid out for the kernels.

        `format` one of GROUPED; `codes`, `zeros` and `divisors` as of `_native.Matrix.pack_groups`;
        `scales` float32, float16, bfloat16 (as uint16) or 8-bit floats (as uint8) [rows, groups].
        ValueError as there.
        """
        zeros = None if zeros is None else np.ascontiguousarray(zeros)
        divisors = None if divisors is None else np.ascontiguousarray(divisors)
        kind = SCALES.get(scales.dtype.name, scales.dtype.name)
        codes = np.ascontiguousarray(codes)
        return _native.Matrix.pack_groups(
            self.context, format, codes, kind, _bytes(scales), zeros, divisors
        )


def _bytes(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """[rows, ...] as [rows, bytes]."""
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), -1)


def default_threads() -> int:
    """What OMP_NUM_THREADS says, else as many as there are cores for this process."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))
