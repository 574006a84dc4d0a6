"""Packed weights and products with them: values, error bounds, and equal bits on every path."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdserve.engine.weights import BLOCKS as STORED_BLOCKS
from pdserve.engine.weights import VALUES, BlockFormat, RawTensor, as_plain
from pdserve.engine.weights.convert import unpack
from pdserve.engine.weights.formats import FP4, FP8, INT4, INT8, float4, formats
from pdserve.engine.weights.formats import SCALES as SCALE_PART
from pdserve.engine.weights.formats.grouped import GroupedFormat, grouped
from pdserve.kernels import _native
from pdserve.kernels.cpu import SCALES as SCALE_TYPES

FLOATS = ("F32", "F16", "BF16")
BLOCKS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("MXFP4", "NVFP4", "IQ4_NL", "IQ4_XS"),
)
# Name -> (format, columns per group, 0 for the whole row, type of scales, zero points).
GROUPS: dict[str, tuple[GroupedFormat, int, type[np.generic], bool]] = {
    "INT4 of 128": (INT4, 128, np.float16, False),
    "INT4 of 128, zeros": (INT4, 128, np.float16, True),
    "INT4 of 32, bf16, zeros": (INT4, 32, np.uint16, True),
    "INT4 of 64, bf16": (INT4, 64, np.uint16, False),
    "INT4 of a row, f32": (INT4, 0, np.float32, False),
    "INT4 of 96, zeros": (INT4, 96, np.float16, True),
    "INT4 of 64, f32, zeros": (INT4, 64, np.float32, True),
    "INT8 of 128, zeros": (INT8, 128, np.float16, True),
    "INT8 of a row, bf16": (INT8, 0, np.uint16, False),
    "INT8 of a row, f32": (INT8, 0, np.float32, False),
    "INT8 of 64": (INT8, 64, np.float16, False),
    "INT8 of 32, bf16, zeros": (INT8, 32, np.uint16, True),
    "INT8 of 96": (INT8, 96, np.float32, False),
    "INT8 of 16": (INT8, 16, np.float32, False),
    "FP8 of 128": (FP8, 128, np.float32, False),
    "FP8 of a row, bf16": (FP8, 0, np.uint16, False),
    "FP4 of 16": (FP4, 16, np.uint8, False),
}
ENCODED = {*BLOCKS, *GROUPS} - {"FP8 of 128", "FP8 of a row, bf16"}  # multiplied with int8 inputs
KINDS = (*FLOATS, *BLOCKS, *GROUPS)
SUBNORMAL = 1e-38  # numbers of this size lose precision
ROW_COUNTS = (*range(2, 20), 31, 33, 70)
# Offsets of the float16 scales in a block; random bytes there could be infinite.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def context() -> _native.Context:
    return _native.Context(2)


def raw_tensor(kind: str, rows: int, cols: int, seed: int) -> tuple[NDArray[np.uint8], Floats]:
    """Return random stored bytes [rows, bytes per row] and the values that the engine reads from
    them."""
    rng = np.random.default_rng(seed)
    if kind in FLOATS:
        exact = RawTensor({VALUES: rng.normal(size=(rows, cols))}, "F64", (rows, cols))
        numbers = as_plain(exact, kind)
        return numbers.parts[VALUES].view(np.uint8), unpack(numbers)
    form = formats()[kind]
    assert isinstance(form, BlockFormat)
    blocks = rng.integers(0, 256, (rows * cols // form.block_values, form.block_bytes), np.uint8)
    for at in SCALES[kind]:
        scale = rng.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    if kind == "MXFP4":  # exponents of moderate sizes, and the smallest ones
        blocks[:, 0] = rng.integers(118, 132, len(blocks))
        blocks[:2, 0] = (0, 1)[: len(blocks)]
    data = blocks.reshape(rows, -1)
    return data, unpack(RawTensor({STORED_BLOCKS: data}, kind, (rows, cols)))


def group_tensor(kind: str, rows: int, cols: int, seed: int) -> RawTensor:
    """Return random levels in groups. No 8-bit float is NaN; the first scale is the smallest
    possible."""
    form, group, dtype, has_zeros = GROUPS[kind]
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, cols * form.bits // 8), np.uint8)
    if form is FP8:
        codes[codes & 127 == 127] = 0
    shape = (rows, cols // group if group else 1)
    if form is FP4:
        return float4(codes, rng.integers(0, 127, shape, np.uint8), np.float32(37.3))
    scales = rng.normal(size=shape).astype(np.float32)
    if dtype == np.uint16:
        scales = (scales.view(np.uint32) >> 16).astype(np.uint16)
        scales[0, 0] = seed % 2  # the smallest bfloat16, which float16 cannot hold, or 0
    else:
        scales = scales.astype(dtype)
        scales[0, 0] = np.finfo(dtype).smallest_subnormal if form is not FP8 else 1e-30
    zeros = rng.integers(0, 1 << form.bits, shape, np.uint8) if has_zeros else None
    return grouped(form, codes, scales, zeros)


def quantum(kind: str) -> int:
    if kind in GROUPS:
        return max(32, GROUPS[kind][1])
    form = formats().get(kind)
    return form.block_values if isinstance(form, BlockFormat) else 1


def cols_of(kind: str, blocks: int) -> int:
    """Return a width of about 32 * `blocks`."""
    size = quantum(kind)
    return blocks * max(32, size) if size <= 32 else (blocks % 5 + 1) * size


def packed(
    context: _native.Context, kind: str, rows: int, cols: int, seed: int = 0
) -> tuple[_native.Matrix, Floats]:
    if kind in GROUPS:
        raw = group_tensor(kind, rows, cols, seed)
        parts = {**raw.parts, SCALE_PART: raw.parts[SCALE_PART].view(np.uint8)}
        type_ = SCALE_TYPES[raw.parts[SCALE_PART].dtype.name]
        pack = _native.Matrix.pack_groups
        return pack(context, raw.format, type=type_, **parts), unpack(raw)
    data, values = raw_tensor(kind, rows, cols, seed)
    return _native.Matrix.pack(context, kind, data, rows, cols), values


def inputs(rows: int, cols: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).normal(size=(rows, cols)).astype(np.float32)


def encoded(x: Floats) -> NDArray[np.float64]:
    """Return x after encoding as int8 with one scale per block of 32."""
    blocks = x.reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(2, keepdims=True)
    levels = np.rint(blocks * (np.float32(127) / amax))
    values: NDArray[np.float64] = levels.astype(np.float64) * (amax / np.float32(127))
    return values.reshape(x.shape)


def same(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def product(
    context: _native.Context,
    x: Floats,
    matrices: list[_native.Matrix],
    bias: Floats | None = None,
) -> Floats:
    out = np.full((len(x), sum(m.rows for m in matrices)), np.nan, np.float32)
    _native.linear_into(context, x, matrices, out, bias)
    return out


@settings(max_examples=80)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 50),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_packed_weights_equal_the_stored_ones(
    context: _native.Context, kind: str, rows: int, blocks: int, seed: int
) -> None:
    matrix, values = packed(context, kind, rows, blocks * quantum(kind), seed)
    ids = np.random.default_rng(seed).permutation(rows)
    assert (matrix.rows, matrix.cols) == values.shape
    for isa in _native.isas():
        read = matrix.row_values(_native.Context(1, isa=isa), ids)
        assert np.array_equal(read, values[ids])


@settings(max_examples=120)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 80),
    blocks=st.integers(1, 50),
    tokens=st.integers(1, 40),
    isa=st.sampled_from(_native.isas()),
    seed=st.integers(0, 1 << 30),
)
def test_a_product_equals_that_of_weights_and_encoded_inputs(
    kind: str, rows: int, blocks: int, tokens: int, isa: str, seed: int
) -> None:
    context = _native.Context(2, isa=isa)
    cols = cols_of(kind, blocks)
    matrix, values = packed(context, kind, rows, cols, seed)
    x = inputs(tokens, cols, seed)
    result = product(context, x, [matrix])
    seen = x.astype(np.float64)
    if kind == "BF16":
        seen = torch.from_numpy(x).bfloat16().double().numpy()
    elif kind in ENCODED:
        seen = encoded(x)
    exact = seen @ values.T.astype(np.float64)
    # Terms of d * q and of m may cancel: bound the sum of magnitudes, with a few roundings per
    # block.
    terms = np.abs(seen) @ (np.abs(values.T.astype(np.float64)) + term_size(values, kind))
    rounding = terms * 2.0**-23 * (8 if kind in ENCODED else cols) + SUBNORMAL
    assert (np.abs(result - exact) <= rounding).all()
    # The error of int8 is half a step of 1/127 of a block's largest input; that of bf16 is 2^-8 of
    # every input.
    plain = x.astype(np.float64) @ values.T.astype(np.float64)
    off = np.abs(x).reshape(tokens, -1, 32).max(2).repeat(32, 1) if kind in ENCODED else np.abs(x)
    share = 0.51 / 127 if kind in ENCODED else {"BF16": 2.0**-8}.get(kind, 0.0)
    bound = share * (off @ np.abs(values.T)) + rounding
    assert (np.abs(result - plain) <= bound).all()


def term_size(values: Floats, kind: str) -> NDArray[np.float64]:
    """Return an upper bound of the terms d * q and m whose sum is a weight; it holds for every
    format."""
    if kind not in ENCODED:
        return np.zeros((values.shape[1], 1))
    return np.full((values.shape[1], 1), 4.0 * float(np.abs(values).max()))


def test_a_row_does_not_depend_on_other_rows(
    subtests: pytest.Subtests, context: _native.Context
) -> None:
    for kind, blocks in itertools.product(KINDS, (1, 18, 23)):
        with subtests.test(kind=kind, blocks=blocks):
            cols = cols_of(kind, blocks)
            matrix, _ = packed(context, kind, 90, cols)
            x = inputs(max(ROW_COUNTS), cols)
            single = _native.Context(1)
            alone = np.concatenate([product(single, row[None], [matrix]) for row in x])
            for count in ROW_COUNTS:
                assert same(product(context, x[:count], [matrix]), alone[:count])
                assert same(product(single, x[-count:], [matrix]), alone[-count:])


def test_every_instruction_set_gives_the_same_bits(subtests: pytest.Subtests) -> None:
    for kind, tokens in itertools.product([kind for kind in KINDS if kind != "BF16"], (1, 5, 40)):
        with subtests.test(kind=kind, tokens=tokens):
            cols = 6 * 256
            contexts = [_native.Context(1, isa=isa) for isa in _native.isas()]
            matrix, _ = packed(contexts[0], kind, 50, cols)
            x = inputs(tokens, cols)
            results = [product(context, x, [matrix]) for context in contexts]
            assert len(results) > 1
            assert all(same(result, results[0]) for result in results)


def test_several_matrices_are_written_side_by_side(context: _native.Context) -> None:
    parts = [packed(context, "Q4_1", rows, 576, rows) for rows in (17, 1, 64, 200)]
    x, bias = inputs(3, 576), inputs(1, 282)[0]
    together = product(context, x, [matrix for matrix, _ in parts], bias)
    each = np.concatenate([product(context, x, [matrix]) for matrix, _ in parts], 1)
    assert same(together, each + bias)


def test_mixed_encodings_in_one_product(context: _native.Context) -> None:
    parts = [packed(context, kind, 20, 64) for kind in ("Q8_0", "BF16", "F16", "Q5_1")]
    x = inputs(9, 64)
    together = product(context, x, [matrix for matrix, _ in parts])
    each = np.concatenate([product(context, x, [matrix]) for matrix, _ in parts], 1)
    assert same(together, each)


def test_plain_numbers_of_any_width(subtests: pytest.Subtests, context: _native.Context) -> None:
    for cols, kind in itertools.product((1, 3, 45), FLOATS):
        with subtests.test(cols=cols, kind=kind):
            matrix, values = packed(context, kind, 21, cols)
            x = torch.from_numpy(inputs(4, cols)).bfloat16().float().numpy()
            result = product(context, x, [matrix])
            assert np.allclose(result, x @ values.T, rtol=1e-5, atol=1e-5)


def test_a_nonfinite_input_affects_only_its_row(subtests: pytest.Subtests) -> None:
    for isa, kind in itertools.product(_native.isas(), KINDS):
        with subtests.test(isa=isa, kind=kind):
            context = _native.Context(1, isa=isa)
            matrix, _ = packed(context, kind, 20, 768)
            clean = product(context, inputs(40, 768), [matrix])
            for bad, count in itertools.product((np.nan, np.inf, -np.inf), (1, 5, 40)):
                x = inputs(40, 768)
                x[count - 1, 300] = bad
                result = product(context, x[:count], [matrix])
                assert not np.isfinite(result[-1]).any(), (bad, count)
                assert same(result[:-1], clean[: count - 1]), (bad, count)


def test_zero_and_tiny_inputs(context: _native.Context) -> None:
    matrix, values = packed(context, "Q8_0", 16, 64)
    x = np.zeros((2, 64), np.float32)
    x[1, 5] = 1e-42  # 127 / 1e-42 overflows
    assert (product(context, x, [matrix]) == 0).all()
    x[1, 5] = 1e-20
    assert np.allclose(product(context, x, [matrix])[1], 1e-20 * values[:, 5], rtol=1e-5)


def test_this_file_covers_every_format() -> None:
    assert _native.formats() == [*FLOATS, *BLOCKS]
    assert {form.name for form, *_ in GROUPS.values()} == {*_native.grouped_formats()}


def test_packed_weights_take_little_more_memory_than_stored_ones(
    subtests: pytest.Subtests, context: _native.Context
) -> None:
    for kind in (*BLOCKS, *GROUPS):
        with subtests.test(kind):
            rows, cols = 64, 12 * 256
            matrix, _ = packed(context, kind, rows, cols)
            if kind in GROUPS:
                form, _, _, zeros = GROUPS[kind]
                parts = group_tensor(kind, rows, cols, 0).parts
                stored = parts["codes"].nbytes + parts["scales"].nbytes
                if zeros:  # as packed in files
                    stored += parts["scales"].size * form.bits // 8
            else:
                stored = raw_tensor(kind, rows, cols, 0)[0].nbytes
            most = 1.35 if stored * 8 < 4 * rows * cols else 1.15
            assert matrix.nbytes <= most * stored


def test_wrong_arguments_raise(context: _native.Context) -> None:
    data, _ = raw_tensor("Q4_1", 4, 64, 0)
    pack = _native.Matrix.pack
    with pytest.raises(ValueError, match="IQ2_XS"):
        pack(context, "IQ2_XS", data, 4, 64)
    with pytest.raises(ValueError, match="multiples of 32"):
        pack(context, "Q4_1", data, 4, 65)
    with pytest.raises(ValueError, match="multiples of 256"):
        pack(context, "Q4_K", data, 4, 64)
    with pytest.raises(ValueError, match="do not fit"):
        pack(context, "Q4_1", data, 4, 96)
    with pytest.raises(ValueError, match="row of bytes"):
        pack(context, "Q4_1", data, 5, 64)
    with pytest.raises(ValueError, match="at least one"):
        pack(context, "Q4_1", data[:0], 0, 64)
    with pytest.raises(ValueError, match="at least one"):
        pack(context, "Q4_1", data, 4, -32)
    with pytest.raises(TypeError):
        pack(context, "Q4_1", data.astype(np.int32), 4, 64)
    with pytest.raises(TypeError):
        pack(context, "Q4_1", data[:, ::2], 4, 32)
    matrix = pack(context, "Q4_1", data, 4, 64)
    x = inputs(2, 64)
    with pytest.raises(ValueError, match="columns"):
        product(context, inputs(2, 32), [matrix])
    with pytest.raises(ValueError, match="needs a matrix"):
        product(context, x, [])
    with pytest.raises(ValueError, match="bias"):
        product(context, x, [matrix], inputs(1, 5)[0])
    with pytest.raises(ValueError, match="out is not"):
        _native.linear_into(context, x, [matrix], inputs(2, 5))
    with pytest.raises(TypeError):
        product(context, x.astype(np.float64), [matrix])
    with pytest.raises(ValueError, match="outside"):
        matrix.row_values(context, np.array([0, 4]))
    with pytest.raises(ValueError, match="outside"):
        matrix.row_values(context, np.array([-1]))


def test_no_tokens(context: _native.Context) -> None:
    matrix, _ = packed(context, "Q4_1", 20, 64)
    assert product(context, inputs(0, 64), [matrix]).shape == (0, 20)
    assert matrix.row_values(context, np.array([], np.int64)).shape == (0, 64)
