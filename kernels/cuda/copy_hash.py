"""Launches copy_hash.cu by CuPy, which compiles it for the device at hand."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pdserve.kernels.copy_hash import TILE_BYTES, UNIT_BYTES

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++17", f"-I{FOLDER}")
THREADS = 256
SHARES_AT, SHARE_BYTES = 16, 16  # struct Scratch of copy_hash.cu: a count, then a share a tile
INTACT = 1  # the verdict of a copy out of a slot whose tag agrees


class PagesLike(Protocol):
    """Whole blocks of a run of layers; block_bytes is a multiple of UNIT_BYTES."""

    @property
    def base(self) -> int: ...
    @property
    def layer_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def layers(self) -> range: ...
    @property
    def blocks(self) -> tuple[int, ...]: ...


class _Stream:
    """A cudaStream_t of somebody else, as CuPy takes one."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._number  # the version of this protocol first


class CopyHash:
    """The compiled kernel. Raises what CuPy raises."""

    def __init__(self, cupy: Any) -> None:
        """For the device that is current now, and while `launch` is called."""
        self._cupy = cupy
        source = (FOLDER / "copy_hash.cu").read_text()
        self._kernel = cupy.RawModule(code=source, options=OPTIONS).get_function("copy_hash_kernel")

    def launch(
        self,
        *,
        pages: PagesLike,
        slot: int,
        tag: int,
        plan: int,
        shares: int,
        verdict: int,
        to_slot: bool,
        stream: int,
    ) -> None:
        """Queue a copy on a stream. Addresses on the device: the slot's payload, its tag, the plan
        (key words, then block numbers as int32), the shares (SHARES_AT + SHARE_BYTES a tile, zeros
        before the first launch); `verdict` in pinned host memory."""
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
