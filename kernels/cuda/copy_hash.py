"""Launches the hashing copy of copy_hash.cu with CuPy, which compiles it for the current device."""

from pathlib import Path
from typing import Any

import numpy as np

from pdserve.kernels.copy_hash import TILE_BYTES, UNIT_BYTES

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++17", f"-I{FOLDER}")
THREADS = 256
SHARES_AT, SHARE_BYTES = 16, 16  # struct Scratch of copy_hash.cu: a count, then a share per tile
INTACT = 1  # verdict of a copy from a slot whose tag matches


class _Stream:
    """A CUDA stream that another library owns (cudaStream_t), in the form that CuPy takes."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._number  # (protocol version, stream)


class CopyHash:
    """The compiled kernel of the hashing copy, between pages of a KV cache and a slot. Its methods
    raise CuPy's errors."""

    def __init__(self, cupy: Any) -> None:
        """Compile the kernel for the current device, which must also be current in `launch`."""
        self._cupy = cupy
        source = (FOLDER / "copy_hash.cu").read_text()
        self._kernel = cupy.RawModule(code=source, options=OPTIONS).get_function("copy_hash_kernel")

    def launch(
        self,
        *,
        pages: Any,
        slot: int,
        tag: int,
        plan: int,
        shares: int,
        verdict: int,
        to_slot: bool,
        stream: int,
    ) -> None:
        """Queue a hashing copy on a stream: from `pages` (engine.kv.Pages, with blocks of whole
        units) to the slot if `to_slot`, else from the slot. Device addresses: `slot` (payload),
        `tag`, `plan` (key words, then block numbers as int32), `shares` (SHARES_AT bytes plus
        SHARE_BYTES per tile, zeros before the first launch); `verdict` is in pinned host memory."""
        num_bytes = len(pages.layers) * len(pages.blocks) * pages.block_bytes
        numbers = (
            np.uint64(pages.base),
            np.uint64(pages.layer_bytes),
            np.uint64(pages.block_bytes),
            np.uint32(pages.layers[0]),
            np.uint32(len(pages.blocks)),
            np.uint64(slot),
            np.uint32(num_bytes // UNIT_BYTES),
            np.uint32(to_slot),
            np.uint64(plan),
            np.uint64(shares),
            np.uint64(tag),
            np.uint64(verdict),
        )
        with self._cupy.cuda.Stream.from_external(_Stream(stream)):
            self._kernel((-(-num_bytes // TILE_BYTES),), (THREADS,), numbers)
