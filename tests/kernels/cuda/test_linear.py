"""Products with weight matrices in Triton's interpreter: their values, and what the values do not
depend on.

More random cases: LINEAR_CASES=500.
"""

import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders.linear_cases import (
    BF16,
    F16,
    F32,
    KINDS,
    Parts,
    error,
    made,
    parts_of,
    tokens_for,
    values_of,
)
from fakes import triton_interpreter  # noqa: F401

from pdserve.kernels.cuda.linear import DeviceMatrix, linear, pack, splits_of
from pdserve.kernels.cuda.linear.product import product
from pdserve.kernels.cuda.linear.tiles import tiles_of

pytestmark = pytest.mark.kernels

NUM_CASES = int(os.environ.get("LINEAR_CASES", "10"))

# format, columns, columns per group, type of scales, whether there are zero points
GROUPED = [
    ("INT4", 32, 32, F16, False),
    ("INT4", 96, 96, F16, True),
    ("INT4", 128, 128, BF16, True),
    ("INT4", 192, 64, BF16, False),
    ("INT4", 160, 32, F16, True),
    ("INT4", 320, 64, F32, True),
    ("INT4", 352, 32, F32, False),
    ("INT4", 384, 192, F32, False),
    ("INT4", 512, 512, F16, True),
    ("INT4", 512, 256, BF16, False),
    ("INT4", 48, 16, F16, False),
    ("INT4", 1024, 128, F16, True),
    ("INT8", 32, 32, F32, False),
    ("INT8", 16, 16, F32, False),
    ("INT8", 80, 16, F16, False),
    ("INT8", 48, 48, F32, True),
    ("INT8", 128, 128, F16, True),
    ("INT8", 192, 64, BF16, False),
    ("INT8", 224, 32, F16, True),
    ("INT8", 256, 256, BF16, True),
    ("INT8", 288, 96, F32, True),
    ("INT8", 384, 128, F32, False),
    ("INT8", 640, 640, F32, False),
    ("INT8", 704, 64, F16, False),
    ("FP8", 32, 32, F32, False),
    ("FP8", 48, 48, BF16, False),
    ("FP8", 64, 16, F32, False),
    ("FP8", 96, 96, F16, False),
    ("FP8", 128, 128, F32, False),
    ("FP8", 160, 32, BF16, False),
    ("FP8", 192, 96, F32, False),
    ("FP8", 256, 128, BF16, False),
    ("FP8", 288, 288, F32, False),
    ("FP8", 384, 128, F32, False),
    ("FP8", 512, 512, BF16, False),
    ("FP8", 576, 64, F16, False),
]
PLAIN = [
    (form, cols, 0, kind, False)
    for form, kind in (("BF16", BF16), ("F16", F16), ("F32", F32))
    for cols in (1, 7, 16, 31, 64, 65, 100, 128, 200, 257, 321, 520)
]
BLOCKS = [("Q8_0", 32 * n, 0, F16, False) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13)]
BLOCKS += [("Q4_K", 256 * n, 0, F16, False) for n in (1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3)]
ROWS = (1, 3, 17, 64, 65, 70, 127, 128, 129, 5, 100, 66)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
CASES = GROUPED + PLAIN + BLOCKS


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: str(CASES[n]))
def test_products_equal_those_of_the_unpacked_values(number: int) -> None:
    rows, tokens = ROWS[number % len(ROWS)], (1, 3, 18, 5, 2)[number % 5]
    dtype = DTYPES[number % 2 if CASES[number][0] == "F32" else number % 3]
    matrix, weight = made(CASES[number], rows, dtype)
    x = tokens_for(matrix, tokens)
    wanted = x.double() @ weight.double().t()
    assert error(linear(x, matrix, out_dtype=torch.float32), wanted) < 1e-5
    narrow = linear(x, matrix)
    assert narrow.dtype == dtype
    assert error(narrow, wanted) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("case", [*GROUPED, *PLAIN[::5], *BLOCKS[::5]], ids=str)
def test_each_value_is_rounded_once(case: tuple[Any, ...]) -> None:
    """A token with a one in a single column gets that column of the weight, bit for bit."""
    matrix, weight = made(case, 5, torch.bfloat16)
    columns = torch.arange(0, matrix.cols, matrix.cols // 15 + 1)
    x = torch.zeros(len(columns), matrix.cols, dtype=torch.bfloat16)
    x[torch.arange(len(columns)), columns] = 1
    assert torch.equal(linear(x, matrix), weight[:, columns].t())


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_token_does_not_depend_on_the_rest_of_the_batch(
    case: tuple[Any, ...], dtype: torch.dtype
) -> None:
    """Compares a token alone with batches of 2 to 17, and of 33 and 65, which use wider tiles."""
    matrix, _ = made(case, 10, dtype)
    assert splits_of(matrix)[0] > 1
    x = tokens_for(matrix, 65)
    batches = [*range(2, 18), 33, 65] if dtype == torch.bfloat16 else [17, 65]
    bias = torch.randn(10, dtype=dtype)
    alone = linear(x[5:6], matrix, bias)
    first = linear(x[:1], matrix, bias)
    for batch in batches:
        together = linear(x[:batch], matrix, bias)
        assert torch.equal(together[:1], first)
        if batch > 5:
            assert torch.equal(together[5:6], alone)
    moved = linear(x[3:20], matrix, bias)
    assert torch.equal(moved[2:3], alone)


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_random_batches_do_not_change_a_token(seed: int) -> None:
    draw = random.Random(seed)
    matrix, _ = made(draw.choice([*GROUPED, *PLAIN, *BLOCKS]), draw.randint(1, 40), torch.bfloat16)
    batch = draw.choice((2, 3, 15, 16, 17, 31, 33, 64, 65, 90))
    at, x = draw.randrange(batch), tokens_for(matrix, batch)
    assert torch.equal(linear(x, matrix)[at : at + 1], linear(x[at : at + 1], matrix))


@pytest.mark.parametrize("case", KINDS, ids=str)
@pytest.mark.parametrize("tokens", [1, 18, 40, 70])
def test_one_program_and_many_add_splits_in_the_same_order(
    case: tuple[Any, ...], tokens: int
) -> None:
    matrix, _ = made(case, 70, torch.bfloat16)
    x, tiles = tokens_for(matrix, tokens), tiles_of(matrix, tokens)
    assert not tiles.looped
    bias = torch.randn(70)
    apart = product(x, matrix, bias, None, torch.float32, tiles)
    looped = product(x, matrix, bias, None, torch.float32, replace(tiles, looped=True))
    assert torch.equal(apart, looped)


def test_splits_depend_only_on_the_shape() -> None:
    layout = made(KINDS[0], 1, torch.bfloat16)[0].layout

    def shaped(rows: int, cols: int) -> DeviceMatrix:
        return DeviceMatrix("BF16", rows, cols, torch.bfloat16, layout, torch.empty(0))

    assert splits_of(shaped(151936, 1024))[0] == 1
    for rows, cols in ((4096, 4096), (1024, 14336), (6144, 4096), (2048, 8192)):
        matrix = shaped(rows, cols)
        splits, length = splits_of(matrix)
        assert splits * -(-rows // 64) > 240  # about two per multiprocessor
        assert (splits - 1) * length < matrix.blocks <= splits * length
        few, many = tiles_of(matrix, 8), tiles_of(matrix, 8192)
        assert (few.tokens, few.looped, many.tokens, many.looped) == (16, False, 128, True)
    some = [tiles_of(shaped(rows, 1024), 256) for rows in (6144, 4096, 1024)]
    assert [(t.tokens, t.warps, t.looped) for t in some] == [
        (128, 8, True), (64, 4, True), (128, 8, False)
    ]  # fmt: skip
    assert splits_of(shaped(64, 512)) == (1, 8)  # a split has at least 512 columns


@pytest.mark.parametrize("case", KINDS[:2], ids=str)
@pytest.mark.parametrize("looped", [False, True])
def test_a_product_writes_only_its_slice_of_the_output(case: tuple[Any, ...], looped: bool) -> None:
    """`x` and `out` are slices of wider rows."""
    matrix, weight = made(case, 70, torch.bfloat16)
    wide = torch.randn(19, matrix.cols + 24).bfloat16()
    x = wide[:, 8 : 8 + matrix.cols]
    out = torch.full((19, 90), 7.0)
    tiles = replace(tiles_of(matrix, 19), looped=looped)
    found = product(x, matrix, None, out[:, 10:80], None, tiles)
    assert found.data_ptr() == out[:, 10:80].data_ptr()
    assert error(found, x.double() @ weight.double().t()) < 1e-5
    assert (out[:, :10] == 7).all()
    assert (out[:, 80:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_is_added_before_rounding(dtype: torch.dtype) -> None:
    matrix, _ = made(KINDS[0], 70, torch.bfloat16)
    x, bias = tokens_for(matrix, 3), torch.randn(70).to(dtype)
    exact = linear(x, matrix, out_dtype=torch.float32)
    assert torch.equal(linear(x, matrix, bias), (exact + bias.float()).bfloat16())


def test_no_tokens() -> None:
    matrix, _ = made(KINDS[3], 70, torch.float32)
    assert linear(torch.empty(0, matrix.cols), matrix).shape == (0, 70)


@pytest.mark.parametrize("form", ["INT4", "INT8", "FP8", "Q4_K"])
def test_infinite_and_nan_scales_affect_only_their_row(form: str) -> None:
    """A row has the result of its values; other rows are unaffected."""
    cols = 256
    parts = parts_of(form, 6, cols, 32, F16, zeros=False)
    odd = np.array([np.inf, -np.inf, np.nan], F16)
    if form == "Q4_K":
        parts["blocks"][1:4, :2] = odd.view(np.uint8).reshape(3, 2)
        parts["blocks"][1:4, 4:16] |= 1
    else:
        parts["scales"][1:4, 2] = odd
        parts["codes"] = parts["codes"] & 0x33 | 0x11  # avoids zero points and NaN
    matrix = pack(form, 6, cols, parts, torch.bfloat16, "cpu")
    weight = values_of(form, parts, 6, cols, torch.bfloat16)
    x = tokens_for(matrix, 2)
    x[1] = 0
    x[1, 64:96] = 0.5
    with np.errstate(all="ignore"):
        wanted = x.float() @ weight.float().t()
    found = linear(x, matrix, out_dtype=torch.float32)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())
    assert torch.equal(found[wanted.isinf()], wanted[wanted.isinf()])
    assert wanted[:, [0, 4, 5]].isfinite().all()
    assert not wanted[:, 1:4].isfinite().any()


def test_packed_sizes_are_near_the_stored_sizes() -> None:
    for case, bits in (
        (("Q4_K", 512, 0, F16, False), 5.0),
        (("INT4", 512, 128, F16, True), 4.25),
    ):
        matrix, _ = made(case, 128, torch.bfloat16)
        assert matrix.nbytes * 8 / (128 * 512) == bits


def test_parts_of_wrong_shape_or_type_are_refused() -> None:
    codes, scales = np.zeros((4, 64), np.uint8), np.ones((4, 2), np.float32)

    def refused(form: str, cols: int, parts: Parts, why: str, dtype: Any = torch.bfloat16) -> None:
        with pytest.raises(ValueError, match=why):
            pack(form, 4, cols, parts, dtype, "cpu")

    good = {"codes": codes, "scales": scales}
    pack("INT8", 4, 64, good, torch.bfloat16, "cpu")
    refused("INT8", 64, good, "tokens of torch.float64", torch.float64)
    refused("Q6_K", 64, good, "unsupported weight format Q6_K")
    refused("INT8", 0, good, "4 rows and 0 columns")
    refused("INT8", 64, {"scales": scales}, "codes are missing")
    refused("INT8", 64, {"codes": codes}, "scales are missing")
    refused(
        "INT8", 64, good | {"codes": codes[:3]}, r"codes are \[3, 64\] uint8, expected \[4, 64\]"
    )
    refused("INT4", 64, good, r"codes are \[4, 64\] uint8, expected \[4, 32\]")
    refused("INT4", 63, good, "not a whole number of bytes")
    refused("INT8", 64, good | {"codes": codes.view(np.int8)}, "of uint8")
    refused("INT8", 64, good | {"scales": np.ones((4, 3), F32)}, "3 groups in 64 columns")
    refused("INT8", 64, good | {"scales": np.ones((4, 8), F32)}, "a multiple of 16")
    refused("INT8", 64, good | {"scales": np.ones((4, 2))}, "scales are float64")
    refused("INT8", 64, good | {"zeros": np.zeros((4, 1), np.uint8)}, r"zeros are \[4, 1\]")
    refused(
        "FP8",
        64,
        good | {"zeros": np.zeros((4, 2), np.uint8)},
        "zeros: not supported for 8-bit floats",
    )
    refused("FP8", 64, good | {"codes": codes + 0xFF}, "8-bit float is NaN")
    refused("Q4_K", 64, {"blocks": codes}, "not a multiple of 256")
    refused("Q8_0", 64, {"blocks": codes}, r"blocks are \[4, 64\] uint8, expected \[4, 68\]")
    refused("BF16", 64, {"values": np.zeros((4, 64), F16)}, "values of BF16 cannot be float16")
    refused("F32", 63, {"values": np.zeros((4, 64), F32)}, r"values are \[4, 64\]")


def test_tensors_of_wrong_shape_or_dtype_are_refused() -> None:
    matrix, _ = made(("F32", 64, 0, F32, False), 5, torch.float32)
    x = torch.zeros(3, 64)
    for tokens in (x[:, :63], x.half(), torch.zeros(64, 3).t()):
        with pytest.raises(ValueError, match="expected rows of 64"):
            linear(tokens, matrix)
    with pytest.raises(ValueError, match=r"bias is \[4\], expected \[5\]"):
        linear(x, matrix, torch.zeros(4))
    for out in (torch.zeros(3, 4), torch.zeros(2, 5), torch.zeros(5, 3).t()):
        with pytest.raises(ValueError, match="out is"):
            linear(x, matrix, out=out)
    with pytest.raises(ValueError, match="out is"):
        linear(x, matrix, out=torch.zeros(3, 5), out_dtype=torch.bfloat16)
