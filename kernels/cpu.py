"""The native CPU kernels (kernels/native, docs/cpu.md) as Python holds them.

A result for a token never depends on other tokens of the batch, on chunk borders or on the number
of threads; within one `numerics` it is the same bit for bit.
"""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.kernels import _native

VERSION = "native-2"  # raise it with any change of a kernel's results
FORMATS = frozenset(_native.formats())  # that pack knows
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
        stored = np.ascontiguousarray(data).view(np.uint8).reshape(rows, -1)
        return _native.Matrix.pack(self.context, format, stored, rows, cols)


def default_threads() -> int:
    """What OMP_NUM_THREADS says, else as many as there are cores for this process."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))
