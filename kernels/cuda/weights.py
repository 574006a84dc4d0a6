"""Weight matrices in the layouts that linear.py's kernels read.

Plain numbers are [rows, padded columns]. Codes of 4 or 8 bits are words of 32 bits in tiles of
TILE_ROWS rows, so that a kernel reads consecutive memory and unpacks by shifts alone: field j of
word i of a row's block holds column 16 j + i of that block. What belongs to groups of columns
(scales, zero points, minima) is int32 words, too, [tiles, words, TILE_ROWS], each of consecutive
groups of one row. Added rows and columns are zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VALUES, BLOCKS = "values", "blocks"  # names of stored parts
CODES, SCALES, ZEROS = "codes", "scales", "zeros"
TILE_ROWS = 128
WORDS = 16  # of a row in a block
PLAIN = ("F32", "F16", "BF16")
BITS = {"INT4": 4, "INT8": 8, "FP8": 8, "Q8_0": 8, "Q4_K": 4}
SCALE_TYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint16): "BF16"}
COMPUTE = (torch.bfloat16, torch.float16, torch.float32)
PLAIN_BLOCK = 64  # columns
MODEST = 2.0**100  # a scale that times a code's bits neither overflows nor is no number


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [rows, cols] on a device.

    `format` is "PLAIN", "INT4", "INT8", "FP8" or "Q4_K": how `values` are read. `group` columns
    share a scale; it divides `block`, the columns of a row of words, or is a multiple of it.
    A word of `scales` has those of `per_word` groups, with `zero_byte` that of one and above it
    its zero point. Q4_K has bytes of 6 bits, minima in `zeros`, and float16 d and dmin as the low
    and the high half of a word of `supers`. `modest`: no scale is near float32's limits.
    """

    format: str
    rows: int
    cols: int
    dtype: torch.dtype  # of the tokens, and of the products' operands
    block: int
    values: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    supers: Tensor | None = None
    group: int = 0
    scale_type: str = "F32"
    per_word: int = 1
    zero_byte: bool = False
    modest: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of a row; the last may be padded."""
        return -(-self.cols // self.block)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        found = (self.values, self.scales, self.zeros, self.supers)
        return tuple(tensor for tensor in found if tensor is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def pack(
    format: str,
    rows: int,
    cols: int,
    parts: Mapping[str, NDArray[Any]],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Matrix:
    """The matrix of those stored parts, for tokens of `dtype` (bfloat16, float16 or float32).

    F32, F16 and BF16 have VALUES, Q4_K and Q8_0 BLOCKS, and INT4, INT8 and FP8 CODES, SCALES and
    perhaps ZEROS. Raises ValueError for what the kernels cannot hold.
    """
    if dtype not in COMPUTE:
        raise ValueError(f"tokens of {dtype}: the kernels take bfloat16, float16 and float32")
    if rows < 1 or cols < 1:
        raise ValueError(f"a weight of {rows} rows and {cols} columns")
    if format in PLAIN:
        return _plain(format, rows, cols, _part(parts, VALUES, (rows, cols)), dtype, device)
    if format == "Q4_K":
        return _q4_k(rows, cols, _blocks(parts, rows, cols, 256, 144), dtype, device)
    if format == "Q8_0":
        blocks = _blocks(parts, rows, cols, 32, 34)
        codes = blocks[..., 2:].reshape(rows, cols) ^ np.uint8(0x80)  # int8 as n + 128
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        parts, format = {CODES: codes, SCALES: scales}, "INT8"
    if format in BITS:
        return _grouped(format, rows, cols, parts, dtype, device)
    raise ValueError(f"no kernel reads weights of {format}")


def _plain(
    format: str,
    rows: int,
    cols: int,
    values: NDArray[Any],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Matrix:
    if SCALE_TYPES.get(values.dtype) != format:
        raise ValueError(f"values of {format} are not {values.dtype}")
    stored = _tensor(values, device)
    stored = stored.view(torch.bfloat16) if format == "BF16" else stored
    packed = _padded(stored.to(dtype), 1, PLAIN_BLOCK)
    return Matrix("PLAIN", rows, cols, dtype, PLAIN_BLOCK, packed)


def _grouped(
    format: str,
    rows: int,
    cols: int,
    parts: Mapping[str, NDArray[Any]],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Matrix:
    bits = BITS[format]
    if cols * bits % 8:
        raise ValueError(f"codes: a row of {cols} columns of {bits} bits is no number of bytes")
    codes = _part(parts, CODES, (rows, cols * bits // 8), np.uint8)
    groups = parts[SCALES].shape[-1] if SCALES in parts else 0
    scales = _part(parts, SCALES, (rows, groups))
    zeros = _part(parts, ZEROS, (rows, groups), np.uint8) if ZEROS in parts else None
    if scales.dtype not in SCALE_TYPES:
        raise ValueError(f"scales are {scales.dtype}, not float32, float16 or bfloat16's uint16")
    if not groups or cols % groups or cols // groups % WORDS:
        raise ValueError(
            f"scales: {groups} groups in {cols} columns; each has to have a multiple of {WORDS}"
        )
    if format == "FP8" and zeros is not None:
        raise ValueError("zeros: 8-bit floats have none")
    if format == "FP8" and ((codes & 0x7F) == 0x7F).any():
        raise ValueError("codes: an 8-bit float is NaN")
    block, group = 32 // bits * WORDS, cols // groups
    if group % block and block % group:  # a scale for each part that a block has of a group
        part = math.gcd(group, block)
        scales = scales.repeat(group // part, 1)
        zeros = None if zeros is None else zeros.repeat(group // part, 1)
        group = part
    levels = _tensor(codes, device)
    if bits == 4:
        levels = torch.stack((levels & 15, levels >> 4), -1).view(rows, cols)
    scale_type, stored = SCALE_TYPES[scales.dtype], _tensor(scales, device)
    widened = (stored.view(torch.bfloat16) if scale_type == "BF16" else stored).float()
    zero_words = None if zeros is None else _tensor(zeros, device).int()
    zero_byte = zero_words is not None and scale_type != "F32"
    per_word = 2 if scale_type != "F32" and zeros is None and group < block else 1
    if scale_type != "F32" and per_word == 1:
        stored = stored.view(torch.int16).int() & 0xFFFF
        if zero_words is not None:
            stored, zero_words = stored | zero_words << 16, None
    return Matrix(
        format,
        rows,
        cols,
        dtype,
        block,
        _words(levels, bits),
        _group_words(stored, block, group),
        None if zero_words is None else _group_words(zero_words, block, group),
        group=group,
        scale_type=scale_type,
        per_word=per_word,
        zero_byte=zero_byte,
        modest=bool((widened.abs() <= MODEST).all()),
    )


def _q4_k(
    rows: int, cols: int, blocks: NDArray[np.uint8], dtype: torch.dtype, device: torch.device | str
) -> Matrix:
    """Bytes of a block: d and dmin; scales and minima of 6 bits (engine/weights/formats/k_quants.py
    describes them); four runs of 32 whose low nibbles are 32 columns, and the high ones the next.
    """
    stored = _tensor(blocks, device)  # [rows, blocks, 144]
    first, second, rest = stored[..., 4:8], stored[..., 8:12], stored[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), -1)
    minima = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), -1)
    runs = stored[..., 16:].reshape(rows, -1, 4, 1, 32)
    levels = torch.cat((runs & 15, runs >> 4), -2).view(rows, cols)
    return Matrix(
        "Q4_K",
        rows,
        cols,
        dtype,
        32 // 4 * WORDS,
        _words(levels, 4),
        _group_words(scales.view(rows, -1), 128, 32),
        _group_words(minima.view(rows, -1), 128, 32),
        _group_words(stored[..., :4].contiguous().view(torch.int32).view(rows, -1), 256, 256),
        group=32,
        per_word=4,
    )


def _words(levels: Tensor, bits: int) -> Tensor:
    """uint8 [rows, cols] -> int32 [tiles, blocks, TILE_ROWS, WORDS]."""
    fields = 32 // bits
    padded = _padded(_padded(levels, 1, fields * WORDS), 0, TILE_ROWS)
    tiles = padded.view(len(padded) // TILE_ROWS, TILE_ROWS, -1, fields, WORDS)
    columns = tiles.permute(0, 2, 1, 4, 3).contiguous()
    if bits == 4:
        columns = columns[..., 0::2] | columns[..., 1::2] << 4
    return columns.contiguous().view(torch.int32)[..., 0]


def _group_words(of_group: Tensor, block: int, group: int) -> Tensor:
    """[rows, groups] of 1, 2 or 4 bytes -> int32 [tiles, words, TILE_ROWS]; the last words have
    zeros for the groups that a padded block adds."""
    per_word = 4 // of_group.element_size()
    whole = math.lcm(per_word, max(1, block // group))
    padded = _padded(_padded(of_group, 1, whole), 0, TILE_ROWS).contiguous()
    tiles = padded.view(torch.int32).view(len(padded) // TILE_ROWS, TILE_ROWS, -1)
    return tiles.transpose(1, 2).contiguous()


def _padded(tensor: Tensor, dim: int, multiple: int) -> Tensor:
    """Zeros after it, to a multiple; itself, if it is one."""
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)


def _tensor(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """A copy on the device; uint16 becomes int16, which torch can move about."""
    contiguous = np.ascontiguousarray(array)
    signed = contiguous.view(np.int16) if contiguous.dtype == np.uint16 else contiguous
    return torch.tensor(signed, device=device)


def _part(
    parts: Mapping[str, NDArray[Any]],
    name: str,
    shape: tuple[int, ...],
    dtype: type[np.generic] | None = None,
) -> NDArray[Any]:
    if name not in parts:
        raise ValueError(f"{name} are missing")
    part = parts[name]
    if part.shape != shape or (dtype is not None and part.dtype != dtype):
        wanted = "" if dtype is None else f" of {np.dtype(dtype)}"
        raise ValueError(f"{name} are {list(part.shape)} {part.dtype}, not {list(shape)}{wanted}")
    return part


def _blocks(
    parts: Mapping[str, NDArray[Any]], rows: int, cols: int, values: int, size: int
) -> NDArray[np.uint8]:
    """The part BLOCKS as [rows, blocks, bytes of a block]."""
    if cols % values:
        raise ValueError(f"blocks: a row of {cols} columns is no multiple of {values}")
    return _part(parts, BLOCKS, (rows, cols // values * size), np.uint8).reshape(rows, -1, size)
