"""A file mapped into memory, and arrays that view it.

The mapping is private (copy on write), so it never changes the file. It lives as long as any array
made from it; a file that shrinks meanwhile kills the process, as with any mapping.
"""

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.source import CheckpointError


class MappedFile:
    """A privately mapped file. `map[a:b]` copies bytes; `array` does not."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises CheckpointError if it cannot be opened or is empty."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        self.size = len(self.map)

    def array(self, dtype: "np.dtype[Any]", shape: tuple[int, ...], start: int) -> NDArray[Any]:
        """Return an array over the file's bytes from `start`; the caller checks that they exist.

        Bytes that are not aligned for `dtype` are copied.
        """
        count = math.prod(shape)
        if count == 0:
            return np.empty(shape, dtype)
        values = np.frombuffer(self.map, dtype, count, start).reshape(shape)
        return values if values.flags.aligned else values.copy()

    def release(self, start: int, count: int) -> None:
        """Free the memory of `count` bytes; the next access reads them from the file again."""
        begin = start - start % mmap.PAGESIZE
        if count and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED, begin, start + count - begin)
