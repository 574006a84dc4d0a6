"""Products of tokens with a weight matrix, in Triton. A token's result does not depend on others.

y^T = W x^T: weights are the rows of a tile and tokens its columns, so that on Hopper one family of
instructions (HGMMA) serves every number of tokens. A row of weights is cut into splits by its shape
alone. The products of a split are summed in ascending order of columns, and the splits' sums are
added in ascending order: with few tokens by a second kernel, since each split is a program of its
own, with many in one program. How many tokens share a tile has no part in any sum.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from pdserve.kernels.cuda.linear.packing import PLAIN_BLOCK, TILE_ROWS, DeviceMatrix

PROCESSORS = 132  # of an H100: it is the aim; the results of another device are the same
SPLIT_COLUMNS = 256  # at least: shorter splits take longer to add than to multiply
ADD_ROWS = 512
NARROW_BYTES, WIDE_BYTES = 72 << 10, 144 << 10  # of shared memory for loads under way
OTHER_BYTES = 16 << 10  # of shared memory, for what is not loads
REGISTERS = {4: 168, 8: 255}  # or the compiler spills, for more programs than have shared memory
SIDE = tl.constexpr(8)  # row tiles whose programs run side by side: what they read stays in L2
TILE, PLAIN_COLUMNS = tl.constexpr(TILE_ROWS), tl.constexpr(PLAIN_BLOCK)


class ProductTarget(NamedTuple):
    """What of a device decides how products are cut."""

    is_hopper: bool = True
    shared_bytes: int = 227 << 10  # that a block may have


@dataclass(frozen=True)
class Tiles:
    """How a product is cut; none of it changes a bit of the result."""

    rows: int
    tokens: int
    warps: int
    stages: int
    looped: bool  # one program adds all splits of its tile


def splits_of(matrix: DeviceMatrix) -> tuple[int, int]:
    """The number of splits of a row, and the blocks of each but the last; by the shape alone."""
    wanted = -(-2 * PROCESSORS // -(-matrix.rows // 64))
    length = max(-(-matrix.blocks // wanted), SPLIT_COLUMNS // matrix.layout.block)
    return -(-matrix.blocks // length), length


LARGEST = ProductTarget()


@cache
def target_of(device: torch.device) -> ProductTarget:
    """That of a device of this machine; a CPU, where kernels are interpreted, counts as the
    largest."""
    if device.type != "cuda":
        return LARGEST
    shared = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return ProductTarget(torch.cuda.get_device_capability(device)[0] == 9, shared)


def tiles_of(matrix: DeviceMatrix, tokens: int, target: ProductTarget = LARGEST) -> Tiles:
    """Few tokens: narrow tiles, several programs a multiprocessor, and a program for each split as
    long as there are too few tiles to occupy the device. Many: wide tiles, which read less often.
    Before Hopper products of 4 bits have too few registers for the widest.
    """
    layout, size = matrix.layout, matrix.dtype.itemsize
    single = matrix.dtype == torch.float32  # no tensor cores: products take registers, too
    widest = 32 if single else 128 if target.is_hopper or layout.bits > 4 else 64
    width = next(n for n in (16, 32, 64, 128) if tokens <= n or n == widest)
    many = tokens > 64 and not single
    height = 128 if many else 64
    programs = -(-matrix.rows // height) * -(-tokens // width)
    looped = splits_of(matrix)[0] == 1 or programs >= PROCESSORS
    row_bytes = layout.words * 4 or layout.block * size
    stage_bytes = height * row_bytes + width * layout.block * size
    room = min(WIDE_BYTES if many else NARROW_BYTES, target.shared_bytes - OTHER_BYTES)
    stages = room // stage_bytes
    return Tiles(height, width, 8 if many else 4, min(6, max(2, stages)), looped)


def linear(
    x: Tensor,
    matrix: DeviceMatrix,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [T, cols] times the matrix [rows, cols] transposed, plus bias [rows]: [T, rows].

    x is of the matrix's dtype; the result is of out's dtype, or of out_dtype, or of x's. Rows of x
    and of `out` may lie apart. Raises ValueError for what does not fit together.
    """
    tiles = tiles_of(matrix, len(x), target_of(x.device))
    return product(x, matrix, bias, out, out_dtype, tiles)


def register_limit(tiles: Tiles, dtype: torch.dtype) -> int:
    """Of a thread."""
    return 255 if dtype == torch.float32 else REGISTERS[tiles.warps]


def product(
    x: Tensor,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    tiles: Tiles,
) -> Tensor:
    """`linear`, cut as told."""
    tokens, rows = len(x), matrix.rows
    if x.shape != (tokens, matrix.cols) or x.dtype != matrix.dtype or x.stride(1) != 1:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype}, strides {x.stride()}, not rows of {matrix.cols} "
            f"{matrix.dtype}"
        )
    if bias is not None and (bias.shape != (rows,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {list(bias.shape)}, not [{rows}]")
    if out is None:
        out = torch.empty(tokens, rows, dtype=out_dtype or x.dtype, device=x.device)
    elif out.shape != (tokens, rows) or out.stride(1) != 1 or out_dtype not in (None, out.dtype):
        raise ValueError(
            f"out is {list(out.shape)} {out.dtype}, strides {out.stride()}, not [{tokens}, {rows}]"
        )
    if not tokens:
        return out
    splits, split_blocks = splits_of(matrix)
    weights = (matrix.values, matrix.scales, matrix.zeros, matrix.supers)
    strides = tuple(0 if tensor is None else tensor.stride(0) for tensor in weights)
    stored = (weights, strides, matrix.group_blocks)
    row_tiles, token_tiles = -(-rows // tiles.rows), -(-tokens // tiles.tokens)
    shape = (tokens, rows, matrix.cols, x.stride(0), matrix.blocks, split_blocks)
    constants = {
        "LAYOUT": matrix.layout,
        "BM": tiles.rows,
        "BN": tiles.tokens,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "maxnreg": register_limit(tiles, x.dtype),
        "enable_fp_fusion": False,
    }
    if tiles.looped:
        _looped[(row_tiles * token_tiles,)](
            x, *stored, bias, out, *shape, out.stride(0), splits, **constants
        )
        return out
    partials = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    _separate[(row_tiles, splits, token_tiles)](x, *stored, partials, *shape, **constants)
    grid = (-(-rows // ADD_ROWS), tokens)
    _add_splits[grid](partials, bias, out, tokens, rows, out.stride(0), splits, BLOCK=ADD_ROWS)
    return out


@triton.jit
def _add(total, sum):
    """The one way in which sums of splits are added."""
    return total + sum


@triton.jit
def finish(total, bias, rows, valid):
    """Adds the bias of those rows."""
    if bias is not None:
        total = total + tl.load(bias + rows, mask=valid, other=0.0).to(tl.float32)
    return total


@triton.jit
def _float(word, shift, TYPE: tl.constexpr):
    """The float32 in a word, or the float of 16 bits from bit `shift` on."""
    if TYPE == "F32":
        return word.to(tl.float32, bitcast=True)
    elif TYPE == "F16":
        return (word >> shift).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (word >> shift << 16).to(tl.float32, bitcast=True)


@triton.jit
def _weights(words, scale, zero, LAYOUT: tl.constexpr, FIELD: tl.constexpr):
    """float32 [BM, words]: that field of each word as a weight. scale and zero: float32 [BM, 1],
    of Q4_K the minimum.

    The unsigned n of a field becomes the lower bits of a mantissa, base + n, since integers are
    converted at a fourth of the speed; two fields need the same shift. FAST_LEVELS multiplies
    before it subtracts: a scale has 11 bits and base + n 12, so all of it is exact, and the result
    that of LEVELS, unless a scale is not modest.
    """
    if LAYOUT.kind == "FP8":  # sign and 7 bits where float32 has them; exponents differ by 120
        bits = ((words << (24 - 8 * FIELD)) >> 4) & -0x78100000
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * scale
    else:
        at: tl.constexpr = 16 - 4 * (FIELD % 2) if LAYOUT.bits == 4 else 8 * (FIELD % 2)
        up: tl.constexpr = at - LAYOUT.bits * FIELD
        moved = words << up if up > 0 else words >> -up
        mask: tl.constexpr = ((1 << LAYOUT.bits) - 1) << at
        bits = (moved & mask) | ((127 + 23 - at) << 23)
        base: tl.constexpr = 1 << (23 - at)
        level = bits.to(tl.float32, bitcast=True)
        if LAYOUT.kind == "FAST_LEVELS":
            return tl.fma(level, scale, -((zero + base) * scale))
        elif LAYOUT.kind == "LEVELS":
            return (level - (zero + base)) * scale
        else:
            return tl.fma(level - base, scale, -zero)


@triton.jit
def _add_block(
    acc, block, x, cols, weights, row_stride, group_blocks, rows, lanes, valid, LAYOUT: tl.constexpr
):  # fmt: skip
    """acc [BM, BN] plus the products of one block of columns, in ascending order.

    x: pointers to the tokens' first column, [1, BN]; valid: which of them there are. weights:
    pointers to the first word of the tile, or, for plain numbers, to the first row's.
    """
    values, scales, zeros, supers = weights
    if LAYOUT.kind == "PLAIN":
        k = block * PLAIN_COLUMNS + tl.arange(0, PLAIN_COLUMNS)
        w = tl.load(values + rows[:, None] * row_stride + k[None, :])
        tokens = tl.load(x + k[:, None], mask=valid & (k[:, None] < cols), other=0.0)
        acc = tl.dot(w, tokens, acc, input_precision="ieee")
    else:
        fields: tl.constexpr = 32 // LAYOUT.bits
        groups: tl.constexpr = LAYOUT.groups
        shared: tl.constexpr = fields // groups  # fields with the same scale
        width: tl.constexpr = LAYOUT.words
        scale_type: tl.constexpr = LAYOUT.scale_type  # Triton 3.6 passes on no string of an object
        lane = tl.arange(0, width)
        words = tl.load(values + (block * TILE + lanes[:, None]) * width + lane[None, :])
        first = block // group_blocks * groups // LAYOUT.per_word * TILE + lanes
        k = block * (fields * width) + lane[:, None]
        x = x + k
        zero = 128.0 if LAYOUT.bits == 8 else 8.0
        if LAYOUT.kind == "Q4_K":
            super = tl.load(supers + block * TILE + lanes)
        for group in tl.static_range(groups):
            if group % LAYOUT.per_word == 0:
                word = tl.load(scales + first + group // LAYOUT.per_word * TILE)
                if LAYOUT.kind == "Q4_K":
                    minima = tl.load(zeros + first + group // LAYOUT.per_word * TILE)
            if LAYOUT.kind == "Q4_K":
                scale = ((word >> group % 4 * 8) & 255).to(tl.float32) * _float(super, 0, "F16")
                zero = ((minima >> group % 4 * 8) & 255).to(tl.float32) * _float(super, 16, "F16")
                zero = zero[:, None]
            else:
                scale = _float(word, group % LAYOUT.per_word * 16, scale_type)
                if zeros is not None:
                    zero = tl.load(zeros + first + group * TILE).to(tl.float32)[:, None]
                elif LAYOUT.zero_byte:
                    zero = ((word >> 16) & 255).to(tl.float32)[:, None]
            scale = scale[:, None]
            for part in tl.static_range(shared):
                w = _weights(words, scale, zero, LAYOUT, group * shared + part)
                ahead = (group * shared + part) * width
                tokens = tl.load(x + ahead, mask=valid & (k < cols - ahead), other=0.0)
                acc = tl.dot(w.to(x.dtype.element_ty), tokens, acc, input_precision="ieee")
    return acc


@triton.jit
def _split_sum(
    first, last, row, x, valid, rows, cols, weights, strides, group_blocks,
    LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """float32 [BM, BN]: the products of the blocks [first, last), for the rows from `row` on and
    the tokens that x points to, [1, BN], where they are valid. `weights` point to the matrix, of
    whatever table it is taken from.
    """
    values, scales, zeros, supers = weights
    value_stride, scale_stride, zero_stride, super_stride = strides
    lanes = tl.arange(0, BM)
    row_lanes = tl.minimum(lanes, rows - 1 - row)  # those after the last row read it again
    if LAYOUT.kind == "PLAIN":
        values += row.to(tl.int64) * value_stride
    else:
        tile = (row // TILE).to(tl.int64)
        values += tile * value_stride + row % TILE * LAYOUT.words
        scales += tile * scale_stride + row % TILE
        if zeros is not None:
            zeros += tile * zero_stride + row % TILE
        if supers is not None:
            supers += tile * super_stride + row % TILE
    acc = tl.zeros((BM, BN), tl.float32)
    for block in range(first, last):
        acc = _add_block(
            acc, block, x, cols, (values, scales, zeros, supers), value_stride, group_blocks,
            row_lanes, lanes, valid, LAYOUT,
        )  # fmt: skip
    return acc


@triton.jit
def row_sum(
    splits, split_blocks, blocks, row, x, valid, rows, cols, weights, strides, group_blocks,
    LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """float32 [BM, BN]: the products of whole rows, all splits by one program."""
    total = tl.zeros((BM, BN), tl.float32)
    for split in range(splits):
        first = split * split_blocks
        acc = _split_sum(
            first, tl.minimum(first + split_blocks, blocks), row, x, valid, rows, cols, weights,
            strides, group_blocks, LAYOUT, BM, BN,
        )  # fmt: skip
        total = _add(total, acc)
    return total


@triton.jit
def _tokens_at(x, token, x_stride, tokens, BN: tl.constexpr):
    """Pointers to the tokens from `token` on, [1, BN], and which of them there are."""
    lanes = tl.arange(0, BN)[None, :]
    return x + token.to(tl.int64) * x_stride + lanes * x_stride, lanes < tokens - token


@triton.jit(do_not_specialize=["tokens", "blocks", "split_blocks"])
def _separate(
    x, weights, strides, group_blocks, partials, tokens, rows, cols, x_stride, blocks, split_blocks,
    LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Writes partials, float32 [splits, tokens, rows]. Grid: row tiles, splits, token tiles."""
    row, split, token = tl.program_id(0) * BM, tl.program_id(1), tl.program_id(2) * BN
    first = split * split_blocks
    x, valid = _tokens_at(x, token, x_stride, tokens, BN)
    acc = _split_sum(
        first, tl.minimum(first + split_blocks, blocks), row, x, valid, rows, cols, weights,
        strides, group_blocks, LAYOUT, BM, BN,
    )  # fmt: skip
    r, t = row + tl.arange(0, BM)[:, None], token + tl.arange(0, BN)[None, :]
    at = (split * tokens + t).to(tl.int64) * rows + r
    tl.store(partials + at, acc, mask=(r < rows) & (t < tokens))


@triton.jit(do_not_specialize=["tokens", "splits"])
def _add_splits(partials, bias, out, tokens, rows, out_stride, splits, BLOCK: tl.constexpr):
    """Adds the splits' sums. Grid: blocks of rows, tokens."""
    r, t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    valid = r < rows
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        at = (split * tokens + t) * rows + r
        total = _add(total, tl.load(partials + at, mask=valid, other=0.0))
    total = finish(total, bias, r, valid)
    tl.store(out + t * out_stride + r, total.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["tokens", "blocks", "split_blocks", "splits"])
def _looped(
    x, weights, strides, group_blocks, bias, out, tokens, rows, cols, x_stride, blocks,
    split_blocks, out_stride, splits,
    LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """All splits of a tile. Grid: row tiles times token tiles, in runs of SIDE tiles of rows."""
    row_tiles, token_tiles = tl.cdiv(rows, BM), tl.cdiv(tokens, BN)
    run = tl.program_id(0) // (SIDE * token_tiles)
    within = tl.program_id(0) % (SIDE * token_tiles)
    side = tl.minimum(row_tiles - run * SIDE, SIDE)
    row, token = (run * SIDE + within % side) * BM, within // side * BN
    x, valid = _tokens_at(x, token, x_stride, tokens, BN)
    total = row_sum(
        splits, split_blocks, blocks, row, x, valid, rows, cols, weights, strides, group_blocks,
        LAYOUT, BM, BN,
    )  # fmt: skip
    r, t = row + tl.arange(0, BM)[:, None], token + tl.arange(0, BN)[None, :]
    total = finish(total, bias, r, r < rows)
    at = t.to(tl.int64) * out_stride + r
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(r < rows) & (t < tokens))
