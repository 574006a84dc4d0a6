"""A stored weight and its storage format: the parts that hold the values, and how to read them.

All parts are numpy arrays; bfloat16 numbers are held as uint16 with the same bits.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
VALUES, BLOCKS = "values", "blocks"  # names of the parts of plain numbers and of GGUF's blocks
PIECE_VALUES = 1 << 22  # per thread task
CHUNK_VALUES = 1 << 18  # float32 at a time: smaller chunks are slower, larger ones take memory


def row_runs(shape: tuple[int, ...], values: int) -> Iterator[slice]:
    """Split the rows of a tensor into runs of about `values` values, at least one row each."""
    step = max(1, values // max(1, math.prod(shape[1:])))
    return (slice(begin, begin + step) for begin in range(0, shape[0], step))


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One stored weight, read-only.

    `parts` holds the arrays that the format defines. The first dimension of each part is the rows
    of the weight, or the matrices of a stack. Plain numbers have one part, VALUES, of `shape`.
    """

    parts: Mapping[str, NDArray[Any]]
    format: str
    shape: tuple[int, ...]
    columns: NDArray[np.int64] | None = None  # stored column n belongs to input columns[n]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def rows(self, index: slice | NDArray[np.int64]) -> "RawTensor":
        """Return some rows: a view for a slice, a copy for an array of row numbers."""
        parts = {name: part[index] for name, part in self.parts.items()}
        count = len(next(iter(parts.values())))
        return RawTensor(parts, self.format, (count, *self.shape[1:]), self.columns)

    def matrix(self, number: int) -> "RawTensor":
        """Return one matrix of a stack, as a view."""
        parts = {name: part[number] for name, part in self.parts.items()}
        return RawTensor(parts, self.format, self.shape[1:], self.columns)

    def transposed(self) -> "RawTensor":
        """Return the transpose of a matrix of plain numbers, or of each in a stack, as a view."""
        values = self.parts[VALUES].swapaxes(-1, -2)
        return RawTensor({VALUES: values}, self.format, values.shape)

    def of_heads(self, heads: int, begin: int, end: int) -> "RawTensor":
        """Split a matrix's rows into `heads` heads and return the rows [begin, end) of each, as a
        stack and a view."""
        parts = {
            name: part.reshape(heads, -1, *part.shape[1:])[:, begin:end]
            for name, part in self.parts.items()
        }
        shape = (heads, end - begin, *self.shape[1:])
        return RawTensor(parts, self.format, shape, self.columns)

    def as_row(self) -> "RawTensor":
        """Return a vector as a matrix of one row, as a view."""
        parts = {name: part[None] for name, part in self.parts.items()}
        return RawTensor(parts, self.format, (1, *self.shape))


def same_order(a: NDArray[np.int64] | None, b: NDArray[np.int64] | None) -> bool:
    """Return whether two column orders (RawTensor.columns) are equal."""
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


class Format(ABC):
    """A way to store a matrix."""

    name: str

    @abstractmethod
    def unpack(self, raw: RawTensor) -> Floats:
        """Return the values, float32 of raw.shape, with columns in stored order."""

    def packable(self, raw: RawTensor) -> RawTensor:
        """Return the same values in parts that the native kernels can pack."""
        return raw


@dataclass(frozen=True)
class BlockFormat(Format):
    """A format whose rows are runs of blocks of bytes; blocks never cross rows.

    The part BLOCKS is uint8 [*shape[:-1], bytes of a row], the blocks in file order.
    """

    name: str  # GGUF's type name
    block_values: int
    block_bytes: int
    expand: Callable[[NDArray[np.uint8]], Floats]  # [blocks, block_bytes] -> [blocks, values]

    def row_bytes(self, row_values: int) -> int:
        """Return the bytes of a row. Raises ValueError if it is not a whole number of blocks."""
        if row_values % self.block_values:
            raise ValueError(
                f"a row of {row_values} values does not divide into {self.name} blocks "
                f"of {self.block_values}"
            )
        return row_values // self.block_values * self.block_bytes

    def unpack(self, raw: RawTensor) -> Floats:
        blocks = raw.parts[BLOCKS].reshape(-1, self.block_bytes)
        return self.expand(blocks).reshape(raw.shape)
