"""Products of tokens with a weight matrix, in Triton. A token's result does not depend on others.

y^T = W x^T: weights are the rows of a tile and tokens its columns, so that on Hopper one family of
instructions (HGMMA) serves every number of tokens. Only shape and format determine how a row of
weights is divided into splits. The products of a split are summed in ascending column order, and
the splits' sums in ascending order: by a second kernel for few tokens, where each split is a
separate program, and within one program for many. The number of tokens per tile affects no sum.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.linear.packing import PLAIN_BLOCK, TILE_ROWS, DeviceMatrix
from pdserve.kernels.cuda.linear.tiles import Tiles, register_limit, splits_of, target_of, tiles_of

ADD_ROWS = 512
SIDE = tl.constexpr(8)  # row tiles whose programs run next to each other, so that reads hit L2
TILE, PLAIN_COLUMNS = tl.constexpr(TILE_ROWS), tl.constexpr(PLAIN_BLOCK)


@dataclass(frozen=True, slots=True)
class SplitSums:
    """A product [T, rows] whose splits have not been added up; the next kernel adds them with
    `added`."""

    partials: Tensor  # float32 [splits, T, rows]
    bias: Tensor | None  # [rows]
    dtype: torch.dtype  # to which the product is rounded


def operands(x: Tensor | SplitSums) -> tuple[Tensor, Tensor | None, int]:
    """Return x as the arguments of a kernel that adds splits: partials, bias and number of splits;
    if x is a plain tensor: x, None and 0."""
    if isinstance(x, SplitSums):
        return x.partials, x.bias, len(x.partials)
    return x, None, 0


def linear(
    x: Tensor,
    matrix: DeviceMatrix,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x [T, cols] times the matrix [rows, cols] transposed, plus bias [rows]: [T, rows].

    x has the matrix's dtype; the result has the dtype of `out`, else `out_dtype`, else x's. Rows of
    x and `out` may have any stride. Raises ValueError for arguments that do not match.
    """
    tiles = tiles_of(matrix, len(x), target_of(x.device))
    return product(x, matrix, bias, out, out_dtype, tiles)


def split_linear(x: Tensor, matrix: DeviceMatrix, bias: Tensor | None) -> Tensor | SplitSums:
    """Compute `linear`. If the tiling makes each split a separate program, return only the splits'
    sums, for the next kernel to add."""
    tiles = tiles_of(matrix, len(x), target_of(x.device))
    if tiles.looped or not len(x):
        return product(x, matrix, bias, None, None, tiles)
    _check(x, matrix, bias)
    return SplitSums(_partials(x, matrix, tiles), bias, x.dtype)


def product(
    x: Tensor,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    tiles: Tiles,
) -> Tensor:
    """Compute `linear` with the given tiling instead of the default one."""
    tokens, rows = len(x), matrix.rows
    _check(x, matrix, bias)
    if out is None:
        out = torch.empty(tokens, rows, dtype=out_dtype or x.dtype, device=x.device)
    elif out.shape != (tokens, rows) or out.stride(1) != 1 or out_dtype not in (None, out.dtype):
        raise ValueError(
            f"out is {list(out.shape)} {out.dtype}, strides {out.stride()}, "
            f"expected [{tokens}, {rows}]"
        )
    if not tokens:
        return out
    if tiles.looped:
        arguments, constants = _arguments(x, matrix, tiles)
        programs = -(-rows // tiles.rows) * -(-tokens // tiles.tokens)
        splits = splits_of(matrix)[0]
        _looped[(programs,)](x, *arguments, bias, out, out.stride(0), splits, **constants)
        return out
    partials = _partials(x, matrix, tiles)
    grid = (-(-rows // ADD_ROWS), tokens)
    _add_splits[grid](partials, bias, out, tokens, rows, out.stride(0), len(partials), ADD_ROWS)
    return out


def _check(x: Tensor, matrix: DeviceMatrix, bias: Tensor | None) -> None:
    if x.shape != (len(x), matrix.cols) or x.dtype != matrix.dtype or x.stride(1) != 1:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype}, strides {x.stride()}, expected rows of {matrix.cols} "
            f"{matrix.dtype}"
        )
    if bias is not None and (bias.shape != (matrix.rows,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {list(bias.shape)}, expected [{matrix.rows}]")


def _partials(x: Tensor, matrix: DeviceMatrix, tiles: Tiles) -> Tensor:
    """Compute the sums of each split of a product, float32 [splits, T, rows], with one program per
    split."""
    splits, tokens, rows = splits_of(matrix)[0], len(x), matrix.rows
    partials = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    arguments, constants = _arguments(x, matrix, tiles)
    grid = (-(-rows // tiles.rows), splits, -(-tokens // tiles.tokens))
    _separate[grid](x, *arguments, partials, **constants)
    return partials


def _arguments(
    x: Tensor, matrix: DeviceMatrix, tiles: Tiles
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments and constants that the kernels `_separate` and `_looped` have in common;
    the arguments follow x."""
    weights = (matrix.values, matrix.scales, matrix.zeros)
    strides = tuple(0 if tensor is None else tensor.stride(0) for tensor in weights)
    shape = (len(x), matrix.rows, matrix.cols, x.stride(0), matrix.blocks, splits_of(matrix)[1])
    constants = {
        "LAYOUT": matrix.layout,
        "BM": tiles.rows,
        "BN": tiles.tokens,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "maxnreg": register_limit(tiles, x.dtype),
        "enable_fp_fusion": False,
    }
    return (weights, strides, matrix.group_blocks, *shape), constants


@triton.jit
def _add(total, sum):
    """Add the sums of one split to the total; all kernels use this function, so that their bits are
    equal."""
    return total + sum


@triton.jit
def finish(total, bias, rows, valid):
    """Return the total of all splits plus the bias of the rows, if there is a bias."""
    if bias is not None:
        total = total + tl.load(bias + rows, mask=valid, other=0.0).to(tl.float32)
    return total


@triton.jit
def added(partials, bias, SPLITS: tl.constexpr, tokens, rows, token, r, valid):
    """Add up the splits of SplitSums: return its rows `r` for one token (int64), float32, where
    `valid`. SPLITS is a constant, so that no load waits for the previous sum."""
    total = tl.zeros(r.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        index = (split * tokens + token) * rows + r
        total = _add(total, tl.load(partials + index, mask=valid, other=0.0))
    return finish(total, bias, r, valid)


@triton.jit
def _float(word, shift, TYPE: tl.constexpr):
    """Return the float32 in a word, or the 16-bit float that starts at bit `shift` of the word."""
    if TYPE == "F32":
        return word.to(tl.float32, bitcast=True)
    elif TYPE == "F16":
        return (word >> shift).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (word >> shift << 16).to(tl.float32, bitcast=True)


@triton.jit
def _weights(words, scale, zero, LAYOUT: tl.constexpr, FIELD: tl.constexpr):
    """Expand field FIELD of each word to a weight, float32 [BM, words]. scale, zero: float32 [BM,
    1].

    The unsigned n of a field becomes the lower bits of a mantissa, base + n, because conversion of
    integers has a fourth of the speed; two fields need the same shift. FAST_LEVELS multiplies
    before it subtracts: a scale has 11 bits and base + n has 12, so the product is exact and the
    result equals that of LEVELS for scales up to MAX_FAST_SCALE.
    """
    if LAYOUT.kind == "FP8":  # sign and 7 bits where float32 has them; exponents differ by 120
        bits = ((words << (24 - 8 * FIELD)) >> 4) & -0x78100000
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * scale
    else:
        position: tl.constexpr = 16 - 4 * (FIELD % 2) if LAYOUT.bits == 4 else 8 * (FIELD % 2)
        shift: tl.constexpr = position - LAYOUT.bits * FIELD
        shifted = words << shift if shift > 0 else words >> -shift
        mask: tl.constexpr = ((1 << LAYOUT.bits) - 1) << position
        bits = (shifted & mask) | ((127 + 23 - position) << 23)
        base: tl.constexpr = 1 << (23 - position)
        level = bits.to(tl.float32, bitcast=True)
        if LAYOUT.kind == "FAST_LEVELS":
            return tl.fma(level, scale, -((zero + base) * scale))
        else:
            return (level - (zero + base)) * scale


@triton.jit
def _affine_weights(words, scale, offset, FIELD: tl.constexpr):
    """Expand field FIELD of each int16 word to a weight, n * scale + offset: [BM, words] of the
    dtype of scale and offset [BM, 1].

    In bfloat16, two weights share a 32-bit register: n is the mantissa of 128 + n; subtracting 128
    is exact; then times the scale plus the offset is rounded once.
    """
    shift: tl.constexpr = 4 * FIELD
    if scale.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            f"""{{ .reg .b32 n, one, base;
            mov.b32 one, 0x3F803F80;
            mov.b32 base, 0xC300C300;
            shr.b32 n, $1, {shift};
            lop3.b32 n, n, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 n, n, one, base;
            fma.rn.bf16x2 $0, n, $2, $3; }}""",
            "=r,r,r,r",
            [words, scale, offset],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        bits = (words.to(tl.int32) >> shift) & 15 | 0x4B000000  # n + 2^23
        return tl.fma(bits.to(tl.float32, bitcast=True) - 8388608.0, scale, offset)


@triton.jit
def _add_affine(acc, block, x, valid, weights, lanes, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Add the products of one block of columns like `_add_block`, for AFFINE weights, whose rows
    have whole blocks."""
    values, scales, offsets = weights
    lane = tl.arange(0, WIDTH)
    words = tl.load(values + (block * TILE + lanes[:, None]) * WIDTH + lane[None, :])
    x += block * (GROUPS * WIDTH) + lane[:, None]
    for group in tl.static_range(GROUPS):
        index = (block * GROUPS + group) * TILE + lanes
        word = tl.load(scales + index)
        if offsets is None:
            scale = word.to(tl.int16).to(tl.bfloat16, bitcast=True)
            offset = (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            scale = word.to(tl.float32, bitcast=True)
            offset = tl.load(offsets + index).to(tl.float32, bitcast=True)
        w = _affine_weights(words, scale[:, None], offset[:, None], group)
        tokens = tl.load(x + group * WIDTH, mask=valid, other=0.0)
        acc = tl.dot(w.to(x.dtype.element_ty), tokens, acc, input_precision="ieee")
    return acc


@triton.jit
def _add_block(
    acc, block, x, cols, weights, row_stride, group_blocks, rows, lanes, valid, LAYOUT: tl.constexpr
):  # fmt: skip
    """Return acc [BM, BN] plus the products of one block of columns, in ascending order.

    x: pointers to the tokens' first column, [1, BN]; valid: which tokens exist. weights: pointers
    to the first word of the tile or, for plain numbers, of the first row.
    """
    values, scales, zeros = weights
    if LAYOUT.kind == "PLAIN":
        k = block * PLAIN_COLUMNS + tl.arange(0, PLAIN_COLUMNS)
        w = tl.load(values + rows[:, None] * row_stride + k[None, :])
        tokens = tl.load(x + k[:, None], mask=valid & (k[:, None] < cols), other=0.0)
        acc = tl.dot(w, tokens, acc, input_precision="ieee")
    elif LAYOUT.kind == "AFFINE":
        acc = _add_affine(acc, block, x, valid, weights, lanes, LAYOUT.words, LAYOUT.groups)
    else:
        fields: tl.constexpr = 32 // LAYOUT.bits
        groups: tl.constexpr = LAYOUT.groups
        shared: tl.constexpr = fields // groups  # fields with the same scale
        width: tl.constexpr = LAYOUT.words
        scale_type: tl.constexpr = LAYOUT.scale_type  # Triton 3.6 cannot pass an object's string on
        lane = tl.arange(0, width)
        words = tl.load(values + (block * TILE + lanes[:, None]) * width + lane[None, :])
        first = block // group_blocks * groups // LAYOUT.per_word * TILE + lanes
        k = block * (fields * width) + lane[:, None]
        x = x + k
        zero = 128.0 if LAYOUT.bits == 8 else 8.0
        for group in tl.static_range(groups):
            if group % LAYOUT.per_word == 0:
                word = tl.load(scales + first + group // LAYOUT.per_word * TILE)
            scale = _float(word, group % LAYOUT.per_word * 16, scale_type)[:, None]
            if zeros is not None:
                zero = tl.load(zeros + first + group * TILE).to(tl.float32)[:, None]
            elif LAYOUT.zero_byte:
                zero = ((word >> 16) & 255).to(tl.float32)[:, None]
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
    """Return the sum of the products of the blocks [first, last), float32 [BM, BN], for BM rows
    from `row` on and the valid tokens that x points to, [1, BN]. `weights` are pointers to the
    start of the matrix."""
    values, scales, zeros = weights
    value_stride, scale_stride, zero_stride = strides
    lanes = tl.arange(0, BM)
    row_lanes = tl.minimum(lanes, rows - 1 - row)  # lanes past the last row read it again
    if LAYOUT.kind == "PLAIN":
        values += row.to(tl.int64) * value_stride
    else:
        tile = (row // TILE).to(tl.int64)
        values += tile * value_stride + row % TILE * LAYOUT.words
        scales += tile * scale_stride + row % TILE
        if zeros is not None:
            zeros += tile * zero_stride + row % TILE
    acc = tl.zeros((BM, BN), tl.float32)
    for block in range(first, last):
        acc = _add_block(
            acc, block, x, cols, (values, scales, zeros), value_stride, group_blocks,
            row_lanes, lanes, valid, LAYOUT,
        )  # fmt: skip
    return acc


@triton.jit
def row_sum(
    splits, split_blocks, blocks, row, x, valid, rows, cols, weights, strides, group_blocks,
    LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return the products of BM whole rows with BN tokens, float32 [BM, BN]; one program adds all
    splits."""
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
    """Return pointers to BN tokens of x from `token` on, [1, BN], and which of them exist."""
    lanes = tl.arange(0, BN)[None, :]
    return x + token.to(tl.int64) * x_stride + lanes * x_stride, lanes < tokens - token


@triton.jit(do_not_specialize=["tokens", "blocks", "split_blocks"])
def _separate(
    x, weights, strides, group_blocks, tokens, rows, cols, x_stride, blocks, split_blocks, partials,
    LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the sums of one split and tile to `partials`, float32 [splits, tokens, rows]. Grid: row
    tiles, splits, token tiles."""
    row, split, token = tl.program_id(0) * BM, tl.program_id(1), tl.program_id(2) * BN
    first = split * split_blocks
    x, valid = _tokens_at(x, token, x_stride, tokens, BN)
    acc = _split_sum(
        first, tl.minimum(first + split_blocks, blocks), row, x, valid, rows, cols, weights,
        strides, group_blocks, LAYOUT, BM, BN,
    )  # fmt: skip
    r, t = row + tl.arange(0, BM)[:, None], token + tl.arange(0, BN)[None, :]
    index = (split * tokens + t).to(tl.int64) * rows + r
    tl.store(partials + index, acc, mask=(r < rows) & (t < tokens))


@triton.jit(do_not_specialize=["tokens"])
def _add_splits(
    partials, bias, out, tokens, rows, out_stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the sums of all splits and the bias, and write the product. Grid: blocks of rows,
    tokens."""
    r, t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    valid = r < rows
    total = added(partials, bias, SPLITS, tokens, rows, t, r, valid)
    tl.store(out + t * out_stride + r, total.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["tokens", "blocks", "split_blocks", "splits"])
def _looped(
    x, weights, strides, group_blocks, tokens, rows, cols, x_stride, blocks, split_blocks,
    bias, out, out_stride, splits,
    LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute one tile of a product, all splits one after the other. Grid: row tiles times token
    tiles, in runs of SIDE row tiles."""
    row_tiles, token_tiles = tl.cdiv(rows, BM), tl.cdiv(tokens, BN)
    run = tl.program_id(0) // (SIDE * token_tiles)
    program = tl.program_id(0) % (SIDE * token_tiles)
    side = tl.minimum(row_tiles - run * SIDE, SIDE)
    row, token = (run * SIDE + program % side) * BM, program // side * BN
    x, valid = _tokens_at(x, token, x_stride, tokens, BN)
    total = row_sum(
        splits, split_blocks, blocks, row, x, valid, rows, cols, weights, strides, group_blocks,
        LAYOUT, BM, BN,
    )  # fmt: skip
    r, t = row + tl.arange(0, BM)[:, None], token + tl.arange(0, BN)[None, :]
    total = finish(total, bias, r, r < rows)
    index = t.to(tl.int64) * out_stride + r
    tl.store(out + index, total.to(out.dtype.element_ty), mask=(r < rows) & (t < tokens))
