"""Every format equals the gguf package's bit for bit, on random blocks."""

from itertools import product

import gguf
import numpy as np
import pytest
import torch

from pdserve.engine.checkpoints.gguf.reader import TYPES, block_size
from pdserve.engine.weights import (
    BLOCKS,
    PLAIN,
    VALUES,
    BlockFormat,
    RawTensor,
    as_plain,
    empty,
    unpack_into,
)
from pdserve.engine.weights.convert import unpack
from pdserve.engine.weights.formats import formats
from pdserve.engine.weights.formats.i_quants import LevelFormat

BLOCK_FORMATS = {name: kind for name, kind in formats().items() if isinstance(kind, BlockFormat)}


def dequantized_by_gguf() -> list[str]:
    """Return the names of the types that the gguf package can expand."""
    names = []
    for kind in gguf.GGMLQuantizationType:
        values, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        assert values > 0
        names.append(kind.name)
    return names


def random_raw(name: str, rows: int, blocks_per_row: int, seed: int) -> RawTensor:
    """Return random bytes with finite float16 scales: bit 14, an exponent bit, is cleared."""
    kind = BLOCK_FORMATS[name]
    size = (rows, blocks_per_row * kind.block_bytes)
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    # Which bytes are scales depends on the format; every odd byte may be a float16's upper byte.
    data[:, 1::2] &= 0xBF
    return RawTensor({BLOCKS: data}, name, (rows, blocks_per_row * kind.block_values))


def test_every_type_that_gguf_expands_is_known() -> None:
    assert set(dequantized_by_gguf()) == {*BLOCK_FORMATS, *PLAIN} - {"F64"}


LEVEL_FORMATS = sorted(n for n, kind in BLOCK_FORMATS.items() if isinstance(kind, LevelFormat))


def test_8_bit_levels_have_the_same_values(subtests: pytest.Subtests) -> None:
    for tame, name in product((True, False), LEVEL_FORMATS):
        with subtests.test(tame=tame, name=name):
            raw = random_raw(name, rows=37, blocks_per_row=5, seed=2)
            if not tame:
                size = raw.parts[BLOCKS].shape
                data = np.random.default_rng(3).integers(0, 256, size, np.uint8)
                one = BLOCK_FORMATS[name].block_bytes
                data[:, :one] = 0  # scale 0
                data[:, one : 2 * one] = 255  # scale is NaN
                raw = RawTensor({BLOCKS: data}, name, raw.shape)
            packed = BLOCK_FORMATS[name].packable(raw)
            assert (packed.format, packed.shape) == ("INT8", raw.shape)
            assert packed.parts["codes"].min() >= 1, "a level is -128"
            expected = unpack(raw)
            same = np.isfinite(expected)
            assert same.all() == tame
            np.testing.assert_array_equal(unpack(packed)[same], expected[same])
            assert not np.isfinite(unpack(packed)[~same]).any()


def test_types_below_4_bits_without_a_packed_layout_have_levels() -> None:
    small = {
        name for name, kind in BLOCK_FORMATS.items() if kind.block_bytes * 2 < kind.block_values
    }
    assert set(LEVEL_FORMATS) == small - {"Q2_K", "Q3_K"}


def test_sizes_equal_those_of_gguf(subtests: pytest.Subtests) -> None:
    for name in sorted(BLOCK_FORMATS):
        with subtests.test(name):
            kind = BLOCK_FORMATS[name]
            assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (
                kind.block_values,
                kind.block_bytes,
            )
            assert kind.row_bytes(3 * kind.block_values) == 3 * kind.block_bytes
            with pytest.raises(ValueError, match=name):
                kind.row_bytes(kind.block_values + 1)


def test_type_numbers_of_the_reader_equal_those_of_gguf() -> None:
    assert {
        int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType
    } == {number: (name, *block_size(name)) for number, name in TYPES.items()}


def test_unpack_equals_gguf_bit_for_bit(subtests: pytest.Subtests) -> None:
    for name in sorted(BLOCK_FORMATS):
        with subtests.test(name):
            raw = random_raw(name, rows=37, blocks_per_row=5, seed=1)
            kind = gguf.GGMLQuantizationType[name]
            with np.errstate(over="ignore"):
                expected = gguf.quants.dequantize(raw.parts[BLOCKS], kind)
            assert expected.shape == raw.shape
            assert len(set(expected.flatten().tolist())) > 2
            # Equal as numbers: zero may have either sign.
            np.testing.assert_array_equal(unpack(raw), expected)
            half = as_plain(raw, "BF16").parts[VALUES].view(np.int16)
            torch.testing.assert_close(
                torch.from_numpy(half).view(torch.bfloat16),
                torch.from_numpy(expected).bfloat16(),
                rtol=0,
                atol=0,
                equal_nan=True,
            )


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def test_plain_numbers_are_shared_or_rounded_once(subtests: pytest.Subtests) -> None:
    for name in sorted(PLAIN):
        with subtests.test(name):
            data = torch.randn(4, 6).to(DTYPES[name])
            stored = data.view(torch.uint8).numpy().view(PLAIN[name])
            raw = RawTensor({VALUES: stored}, name, (4, 6))
            assert as_plain(raw, name) is raw
            assert np.shares_memory(unpack(raw), stored) == (name == "F32")
            assert np.array_equal(unpack(raw), data.float().numpy())
            for other, dtype in DTYPES.items():
                out = empty((4, 6), other)
                unpack_into(raw, out, other)
                assert torch.equal(
                    torch.from_numpy(out.view(np.uint8)), data.to(dtype).view(torch.uint8)
                )


def test_bfloat16_is_rounded_as_in_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)
    edges = [0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0x7F7FFFFF, 0x3F808000, 0x3F818000]
    values = np.concatenate([bits, np.array(edges, np.uint32)]).view(np.float32)
    out = empty(values.shape, "BF16")
    unpack_into(RawTensor({VALUES: values}, "F32", values.shape), out, "BF16")
    expected = torch.from_numpy(values).bfloat16()
    got = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
