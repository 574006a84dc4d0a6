"""Weight matrices in the layouts that the kernels of product.py read.

Plain numbers are [rows, padded columns]. 4- or 8-bit codes are 32-bit words (AFFINE: 16-bit) in
tiles of TILE_ROWS rows, so that a kernel reads consecutive memory and unpacks with shifts only:
among a row's words in a block, field j of word i holds column j * (number of words) + i. Data of
column groups (scales, zero points, offsets) is int32 words [tiles, words, TILE_ROWS], each word
with consecutive groups of one row. Padding rows and columns are zero.
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
WORDS = (32, 16)  # per row and block; 16 for group sizes that are not multiples of 32
PLAIN = ("F32", "F16", "BF16")
BITS = {"INT4": 4, "INT8": 8, "FP8": 8, "Q8_0": 8, "Q4_K": 4}
SCALE_TYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.uint16): "BF16",
}
COMPUTE = (torch.bfloat16, torch.float16, torch.float32)
PLAIN_BLOCK = 64  # columns
MAX_FAST_SCALE = 2.0**100  # limit of scales whose products with 2^12 cannot overflow


@dataclass(frozen=True)
class PackedLayout:
    """The layout of a packed matrix; kernels are specialized for it.

    `kind`: PLAIN, LEVELS (integers with a scale and a zero point), FAST_LEVELS (LEVELS whose scales
    have 16 bits and are at most MAX_FAST_SCALE), FP8 or AFFINE (4-bit integers with a scale and an
    offset: Q4_K).
    """

    kind: str
    block: int  # columns multiplied per step
    bits: int = 32  # per code
    words: int = 0  # per row and block
    groups: int = 1  # groups with separate scales per block
    scale_type: str = "F32"
    per_word: int = 1  # scales per word
    zero_byte: bool = False  # an 8-bit zero point is above the 16-bit scale in a word
    word_bits: int = 32

    @property
    def word_bytes(self) -> int:
        """Bytes of the words of one block in one row."""
        return self.words * self.word_bits // 8


@dataclass(frozen=True)
class DeviceMatrix:
    """A packed weight matrix [rows, cols] on a device. AFFINE with bfloat16 tokens: a word of
    `scales` has the scale in its low half and the offset in its high half. AFFINE with other
    tokens: both have 32 bits, and `zeros` holds the offsets."""

    format: str
    rows: int
    cols: int
    dtype: torch.dtype  # of the tokens and of the products' operands
    layout: PackedLayout
    values: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group_blocks: int = 1  # blocks that share their scales

    @property
    def blocks(self) -> int:
        """Number of blocks in a row; the last block may be padded."""
        return -(-self.cols // self.layout.block)

    @property
    def plain(self) -> Tensor | None:
        """The matrix as plain numbers [rows, cols] in the tokens' dtype; None if it holds codes."""
        return self.values[:, : self.cols] if self.layout.kind == "PLAIN" else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        tensors = (self.values, self.scales, self.zeros)
        return tuple(tensor for tensor in tensors if tensor is not None)

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
) -> DeviceMatrix:
    """Pack the parts of a stored weight into a matrix for tokens of `dtype` (bfloat16, float16 or
    float32).

    F32, F16 and BF16 have VALUES; Q4_K and Q8_0 have BLOCKS; INT4, INT8 and FP8 have CODES, SCALES
    and optionally ZEROS. Raises ValueError for weights that the kernels do not support.
    """
    if dtype not in COMPUTE:
        raise ValueError(
            f"tokens of {dtype} are not supported: expected bfloat16, float16 or float32"
        )
    if rows < 1 or cols < 1:
        raise ValueError(
            f"a weight has {rows} rows and {cols} columns, expected at least one of each"
        )
    if format in PLAIN:
        return _plain(format, rows, cols, _part(parts, VALUES, (rows, cols)), dtype, device)
    if format == "Q4_K":
        return _q4_k(rows, cols, _blocks(parts, rows, cols, 256, 144), dtype, device)
    if format == "Q8_0":
        blocks = _blocks(parts, rows, cols, 32, 34)
        codes = blocks[..., 2:].reshape(rows, cols) ^ np.uint8(0x80)  # int8 to n + 128
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        parts = {CODES: codes, SCALES: scales}
    if format in BITS:
        return _grouped(format, rows, cols, parts, dtype, device)
    raise ValueError(
        f"unsupported weight format {format}: expected one of {', '.join((*PLAIN, *BITS))}"
    )


def _plain(
    format: str,
    rows: int,
    cols: int,
    values: NDArray[Any],
    dtype: torch.dtype,
    device: torch.device | str,
) -> DeviceMatrix:
    if SCALE_TYPES.get(values.dtype) != format:
        raise ValueError(f"values of {format} cannot be {values.dtype}")
    stored = _tensor(values, device)
    stored = stored.view(torch.bfloat16) if format == "BF16" else stored
    packed = _padded(stored.to(dtype), 1, PLAIN_BLOCK)
    return DeviceMatrix(format, rows, cols, dtype, PackedLayout("PLAIN", PLAIN_BLOCK), packed)


def _grouped(
    format: str,
    rows: int,
    cols: int,
    parts: Mapping[str, NDArray[Any]],
    dtype: torch.dtype,
    device: torch.device | str,
) -> DeviceMatrix:
    bits = BITS[format]
    if cols * bits % 8:
        raise ValueError(
            f"codes: a row of {cols} columns of {bits} bits is not a whole number of bytes"
        )
    codes = _part(parts, CODES, (rows, cols * bits // 8), np.uint8)
    groups = parts[SCALES].shape[-1] if SCALES in parts else 0
    scales = _part(parts, SCALES, (rows, groups))
    zeros = _part(parts, ZEROS, (rows, groups), np.uint8) if ZEROS in parts else None
    if scales.dtype not in SCALE_TYPES:
        raise ValueError(
            f"scales are {scales.dtype}, expected float32, float16 or uint16 (bfloat16)"
        )
    if not groups or cols % groups or cols // groups % WORDS[-1]:
        raise ValueError(
            f"scales: {groups} groups in {cols} columns; each group must have a multiple of 16 "
            "columns"
        )
    if format == "FP8" and zeros is not None:
        raise ValueError("zeros: not supported for 8-bit floats")
    if format == "FP8" and ((codes & 0x7F) == 0x7F).any():
        raise ValueError("codes: an 8-bit float is NaN, which the kernels do not support")
    group = cols // groups
    words = next(words for words in WORDS if group % words == 0)
    block = 32 // bits * words
    if group % block and block % group:  # repeat scales, so that parts divide group and block
        part = math.gcd(group, block)
        scales = scales.repeat(group // part, 1)
        zeros = None if zeros is None else zeros.repeat(group // part, 1)
        group = part
    levels = _tensor(codes, device)
    if bits == 4:
        levels = torch.stack((levels & 15, levels >> 4), -1).view(rows, cols)
    scale_type, stored = SCALE_TYPES[scales.dtype], _tensor(scales, device)
    is_wide = scale_type == "F32"
    is_in_range = (
        stored.view(torch.bfloat16) if scale_type == "BF16" else stored
    ).abs() <= MAX_FAST_SCALE
    zero_words = None if zeros is None else _tensor(zeros, device).int()
    per_word = 2 if not is_wide and zeros is None and group < block else 1
    if not is_wide and per_word == 1:
        stored = stored.view(torch.int16).int() & 0xFFFF
        if zero_words is not None:
            stored, zero_words = stored | zero_words << 16, None
    is_fast = bits == 4 and not is_wide and bool(is_in_range.all())
    layout = PackedLayout(
        "FP8" if format == "FP8" else "FAST_LEVELS" if is_fast else "LEVELS",
        block,
        bits,
        words,
        max(1, block // group),
        scale_type,
        per_word,
        zero_byte=not is_wide and zeros is not None,
    )
    return DeviceMatrix(
        format,
        rows,
        cols,
        dtype,
        layout,
        _words(levels, layout),
        _group_words(stored, layout.groups),
        None if zero_words is None else _group_words(zero_words, layout.groups),
        group_blocks=max(1, group // block),
    )


def _q4_k(
    rows: int, cols: int, blocks: NDArray[np.uint8], dtype: torch.dtype, device: torch.device | str
) -> DeviceMatrix:
    """Pack the blocks of a Q4_K weight. The bytes of a block: d and dmin; 6-bit scales and minima
    (engine/weights/formats/k_quants.py); four runs of 32 bytes, whose low nibbles are 32 columns
    and the high nibbles the next 32."""
    stored = _tensor(blocks, device)  # [rows, blocks, 144]
    first, second, rest = stored[..., 4:8], stored[..., 8:12], stored[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), -1)
    minima = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), -1)
    runs = stored[..., 16:].reshape(rows, -1, 4, 1, 32)
    levels = torch.cat((runs & 15, runs >> 4), -2).view(rows, cols)
    factors = stored[..., :4].contiguous().view(torch.float16).float()
    scale = (factors[..., :1] * scales).view(rows, -1)
    offset = (-factors[..., 1:] * minima).view(rows, -1)
    layout = PackedLayout("AFFINE", 128, 4, 32, groups=4, word_bits=16)
    if dtype == torch.bfloat16:
        pairs = torch.stack((scale.bfloat16(), offset.bfloat16()), -1).view(torch.int32)
        scale_words, offset_words = _group_words(pairs[..., 0], layout.groups), None
    else:
        scale_words, offset_words = (_group_words(n, layout.groups) for n in (scale, offset))
    words = _words(levels, layout)
    return DeviceMatrix("Q4_K", rows, cols, dtype, layout, words, scale_words, offset_words)


def _words(levels: Tensor, layout: PackedLayout) -> Tensor:
    """Pack codes, uint8 [rows, cols], into int32 or int16 [tiles, blocks, TILE_ROWS, words of a
    row]."""
    padded = _padded(_padded(levels, 1, layout.block), 0, TILE_ROWS)
    fields = layout.word_bits // layout.bits
    tiles = padded.view(len(padded) // TILE_ROWS, TILE_ROWS, -1, fields, layout.words)
    columns = tiles.permute(0, 2, 1, 4, 3).contiguous()
    if layout.bits == 4:
        columns = columns[..., 0::2] | columns[..., 1::2] << 4
    word = torch.int32 if layout.word_bits == 32 else torch.int16
    return columns.contiguous().view(word)[..., 0]


def _group_words(values: Tensor, groups: int) -> Tensor:
    """Pack one number of 1, 2 or 4 bytes per column group, [rows, all groups], into int32 [tiles,
    words, TILE_ROWS], with zeros for the groups missing in a row's last block."""
    multiple = math.lcm(4 // values.element_size(), groups)
    padded = _padded(_padded(values, 1, multiple), 0, TILE_ROWS).contiguous()
    tiles = padded.view(torch.int32).view(len(padded) // TILE_ROWS, TILE_ROWS, -1)
    return tiles.transpose(1, 2).contiguous()


def _padded(tensor: Tensor, dim: int, multiple: int) -> Tensor:
    """Pad dimension `dim` of a tensor with zeros to a multiple of `multiple`; return the tensor
    itself if its size is a multiple already."""
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)


def _tensor(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """Copy an array to the device; uint16 becomes int16, because torch lacks operations on
    uint16."""
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
        raise ValueError(f"the weight's {name} are missing")
    part = parts[name]
    if part.shape != shape or (dtype is not None and part.dtype != dtype):
        expected_type = "" if dtype is None else f" of {np.dtype(dtype)}"
        raise ValueError(
            f"{name} are {list(part.shape)} {part.dtype}, expected {list(shape)}{expected_type}"
        )
    return part


def _blocks(
    parts: Mapping[str, NDArray[Any]], rows: int, cols: int, values: int, size: int
) -> NDArray[np.uint8]:
    """Return the part BLOCKS as [rows, blocks, bytes of a block]. Raises ValueError if the part is
    missing or a row is not a whole number of blocks."""
    if cols % values:
        raise ValueError(
            f"blocks: a row of {cols} columns is not a multiple of {values}, the size of a block"
        )
    return _part(parts, BLOCKS, (rows, cols // values * size), np.uint8).reshape(rows, -1, size)
