"""A stored weight and its storage format: the parts that hold the values, and how to read them.

All parts are numpy arrays. bfloat16 is the upper half of float32; numpy has no type for it, so its
bits are held as uint16. Packed blocks have GGML's layouts (ggml-common.h).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
VALUES, BLOCKS = "values", "blocks"  # names of the parts of plain numbers and of GGUF's blocks
PIECE_VALUES = 1 << 22  # per thread task
CHUNK_VALUES = 1 << 18  # float32 at a time: smaller chunks are slower, larger ones take memory


def row_runs(shape: tuple[int, ...], values: int) -> Iterator[slice]:
    """Split the rows of a tensor into slices of consecutive rows, each with about `values` values
    and at least one row."""
    step = max(1, values // max(1, math.prod(shape[1:])))
    return (slice(begin, begin + step) for begin in range(0, shape[0], step))


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One weight as it is stored, read-only.

    `parts` holds the arrays that the format defines, by name. The first dimension of each part is
    the rows of the weight, or the matrices of a stack. Plain numbers have one part, VALUES, of
    `shape`.
    """

    parts: Mapping[str, NDArray[Any]]
    format: str
    shape: tuple[int, ...]
    columns: NDArray[np.int64] | None = None  # stored column n belongs to input columns[n]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def rows(self, index: slice | NDArray[np.int64]) -> "RawTensor":
        """Return some rows of the weight: a view for a slice, a copy for an array of row
        numbers."""
        parts = {name: part[index] for name, part in self.parts.items()}
        count = len(next(iter(parts.values())))
        return RawTensor(parts, self.format, (count, *self.shape[1:]), self.columns)

    def matrix(self, number: int) -> "RawTensor":
        """Return one matrix of a stack, as a view."""
        parts = {name: part[number] for name, part in self.parts.items()}
        return RawTensor(parts, self.format, self.shape[1:], self.columns)

    def transposed(self) -> "RawTensor":
        """Return the transpose of a matrix of plain numbers, or of each matrix in a stack, as a
        view."""
        values = self.parts[VALUES].swapaxes(-1, -2)
        return RawTensor({VALUES: values}, self.format, values.shape)

    def of_heads(self, heads: int, begin: int, end: int) -> "RawTensor":
        """Return the rows [begin, end) of each of the matrix's `heads` heads as a stack with one
        matrix per head, a view."""
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
    """Return whether two weights have their columns stored in the same order
    (RawTensor.columns)."""
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


class Format(ABC):
    """A storage format of matrices; the base class of all formats."""

    name: str

    @abstractmethod
    def unpack(self, raw: RawTensor) -> Floats:
        """Return the values of a stored weight, float32 of raw.shape, with columns in stored
        order."""

    def packable(self, raw: RawTensor) -> RawTensor:
        """Return the weight in a form with the same values that the native kernels can pack; by
        default the weight itself."""
        return raw


@dataclass(frozen=True)
class BlockFormat(Format):
    """A format in which each row is a sequence of blocks of bytes; blocks never cross rows.

    The part BLOCKS is uint8 [*shape[:-1], bytes of a row], the blocks in file order.
    """

    name: str  # GGUF's type name
    block_values: int
    block_bytes: int
    expand: Callable[[NDArray[np.uint8]], Floats]  # [blocks, block_bytes] -> [blocks, values]

    def row_bytes(self, row_values: int) -> int:
        """Return the size of a row in bytes. Raises ValueError if the row is not a whole number of
        blocks."""
        if row_values % self.block_values:
            raise ValueError(
                f"a row of {row_values} values does not divide into {self.name} blocks "
                f"of {self.block_values}"
            )
        return row_values // self.block_values * self.block_bytes

    def unpack(self, raw: RawTensor) -> Floats:
        blocks = raw.parts[BLOCKS].reshape(-1, self.block_bytes)
        return self.expand(blocks).reshape(raw.shape)


# Format name -> numpy type that holds a number.
PLAIN: Mapping[str, "np.dtype[Any]"] = MappingProxyType(
    {
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(np.uint16),
        "F64": np.dtype(np.float64),
    }
)
NAN_BF16 = 0x7FC0


def widened(values: NDArray[Any], format: str) -> Floats:
    """Convert plain numbers of `format` to float32; return float32 numbers without a copy."""
    if format == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def write_rounded(values: NDArray[Any], out: NDArray[Any], format: str) -> None:
    """Write float32 or float64 values as plain numbers of `format`, rounded to nearest even."""
    if format != "BF16":
        with np.errstate(over="ignore"):  # values out of range become infinite, as in every format
            out[...] = values
        return
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded[np.isnan(values)] = NAN_BF16
    out[...] = rounded.astype(np.uint16)


def empty(shape: tuple[int, ...], format: str) -> NDArray[Any]:
    """Allocate an uninitialized array for plain numbers of `format`."""
    return np.empty(shape, PLAIN[format])


Bytes = NDArray[np.uint8]


def half(blocks: Bytes, offset: int) -> Floats:
    """Return the float16 at byte `offset` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def fields(packed: Bytes, width: int) -> Bytes:
    """Split uint8 [..., bytes] into `width`-bit fields, lowest first: [..., 8 / width, bytes]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    values: Bytes = (packed[..., None, :] >> shifts) & np.uint8((1 << width) - 1)
    return values


def signed(packed: NDArray[Any]) -> Floats:
    """Interpret bytes as int8; return float32 of the same shape."""
    return np.ascontiguousarray(packed).view(np.int8).astype(np.float32)


def floats(levels: NDArray[Any]) -> Floats:
    """Convert unsigned quantization levels to float32 of the same shape."""
    return levels.astype(np.float32)


def flat(values: NDArray[Any]) -> Floats:
    """Reshape float32 [blocks, ...] to [blocks, values]."""
    rows: Floats = values.reshape(len(values), -1)
    return rows


def gguf_expand(name: str) -> Callable[[Bytes], Floats]:
    """Return a function that unpacks blocks of a GGUF type with the gguf package: [blocks, bytes]
    to [blocks, values]."""

    def expand(blocks: Bytes) -> Floats:
        import gguf  # slow to import, and most models do not need it

        values: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
        return values

    return expand


def gguf_format(name: str, block_values: int, block_bytes: int) -> BlockFormat:
    """Return the storage format of a GGUF type whose blocks the gguf package unpacks."""
    return BlockFormat(name, block_values, block_bytes, gguf_expand(name))
