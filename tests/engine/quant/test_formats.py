"""Every format against the gguf package, bit for bit, on random blocks."""

import gguf
import numpy as np
import pytest
import torch

from pdserve.engine.weights.format import RawTensor
from pdserve.engine.weights.registry import NATIVE, formats, unpack, unpack_into


def dequantized_by_gguf() -> list[str]:
    """Type names that the gguf package can expand."""
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
    """Random bytes whose float16 scales are finite: a set exponent bit 14 is cleared."""
    kind = formats()[name]
    generator = torch.Generator().manual_seed(seed)
    size = (rows, blocks_per_row * kind.block_bytes)
    data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    # Which bytes are scales differs by format; every odd byte may be a float16's upper one.
    data[:, 1::2] &= 0xBF
    return RawTensor(data, name, (rows, blocks_per_row * kind.block_values))


def test_every_type_that_gguf_expands_is_known() -> None:
    assert set(dequantized_by_gguf()) == {*formats(), *NATIVE} - {"F64"}


@pytest.mark.parametrize("name", sorted(formats()))
def test_sizes_are_ggufs(name: str) -> None:
    kind = formats()[name]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (
        kind.block_values,
        kind.block_bytes,
    )
    assert kind.row_bytes(3 * kind.block_values) == 3 * kind.block_bytes
    with pytest.raises(ValueError, match=name):
        kind.row_bytes(kind.block_values + 1)


@pytest.mark.parametrize("name", sorted(formats()))
def test_unpack_equals_gguf_bit_for_bit(name: str) -> None:
    raw = random_raw(name, rows=37, blocks_per_row=5, seed=1)
    kind = gguf.GGMLQuantizationType[name]
    expected = torch.from_numpy(gguf.quants.dequantize(raw.data.numpy(), kind))
    assert expected.shape == raw.shape
    assert len(set(expected.flatten().tolist())) > 2
    got = unpack(raw, torch.float32)
    # Equal as numbers: zero may carry either sign.
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        unpack(raw, torch.bfloat16), expected.bfloat16(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_plain_numbers_are_shared_or_rounded_once(name: str) -> None:
    data = torch.randn(4, 6).to(NATIVE[name])
    raw = RawTensor(data, name, (4, 6))
    assert unpack(raw, NATIVE[name]).data_ptr() == data.data_ptr()
    out = torch.empty(4, 6)
    unpack_into(raw, out)
    assert torch.equal(out, data.float())
