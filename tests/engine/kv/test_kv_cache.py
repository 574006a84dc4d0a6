"""Blocks leave and enter the pool as canonical bytes; payloads that do not fit are refused."""

import numpy as np
import pytest

from pdserve.engine.kv import BlockCopy, KvSpec, LayerGroup
from pdserve.engine.kv.cache import KvCache


def cache(dtype: str = "float32") -> KvCache:
    groups = (
        LayerGroup((0, 2, 3), "full", 0, 2, 6, dtype, 0, 2),
        LayerGroup((1,), "window", 8, 2, 6, dtype, 0, 2),
    )
    kv = KvCache(KvSpec(4, groups), [9, 9])
    for data in kv.data:
        data[:] = (9 * np.random.default_rng(3).normal(size=data.shape)).astype(data.dtype)
    return kv


def test_read_returns_the_canonical_order(subtests: pytest.Subtests) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        with subtests.test(dtype):
            kv = cache(dtype)
            blocks = [7, 2, 9]
            out = bytearray(b"".join(kv.read(0, range(1, 3), blocks)))
            expected = kv.data[0][1:3][:, blocks]
            got = np.frombuffer(out, expected.dtype).reshape(expected.shape)
            assert expected.shape == (2, 3, 2, 2, 4, 6)
            assert np.array_equal(got, expected)
            assert len(out) == 2 * 3 * kv.spec.groups[0].block_bytes(4)


@pytest.mark.parametrize("read_only", [False, True])
def test_write_is_the_inverse_of_read(read_only: bool) -> None:
    source, target = cache("bfloat16"), KvCache(cache("bfloat16").spec, [9, 9])
    payload = b"".join(source.read(0, range(3), [1, 5]))
    view = memoryview(payload) if read_only else memoryview(bytearray(payload))
    target.write(0, range(3), [8, 3], view)
    assert np.array_equal(target.data[0][:, [8, 3]], source.data[0][:, [1, 5]])
    assert not target.data[0][:, [0, 1, 2, 4, 5, 6, 7, 9]].any()
    assert not target.data[1].any()


def test_layers_map_to_their_group() -> None:
    kv = cache()
    for layer, (group, at) in {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (0, 2)}.items():
        data, found = kv.layer(layer)
        assert found == group
        assert data.ctypes.data == kv.data[group][at].ctypes.data


def test_copies_are_in_order() -> None:
    kv = cache()
    first = kv.data[0][:, 1].copy()
    kv.copy([BlockCopy(0, 1, 2), BlockCopy(0, 2, 3)])
    assert np.array_equal(kv.data[0][:, 3], first)


def test_blocks_and_layers_out_of_range_are_refused(subtests: pytest.Subtests) -> None:
    for group, layers, blocks, size in (
        (0, range(3), [1], 100),
        (0, range(2, 4), [1], None),
        (0, range(-1, 1), [1], None),
        (0, range(3), [10], None),
        (0, range(3), [0], None),
        (2, range(1), [1], 4),
    ):
        with subtests.test(group=group, layers=layers, blocks=blocks, size=size):
            kv = cache()
            payload = memoryview(bytearray(size or kv.num_bytes(group, layers, blocks)))
            before = [d.copy() for d in kv.data]
            with pytest.raises(ValueError):
                kv.write(group, layers, blocks, payload)
            if size is None:
                with pytest.raises(ValueError):
                    kv.read(group, layers, blocks)
            assert all(np.array_equal(a, b) for a, b in zip(before, kv.data, strict=True))


def test_empty_copies_are_allowed() -> None:
    kv = cache()
    assert kv.read(0, range(3), []) == []
    kv.write(0, range(0), [1], memoryview(b""))


def test_int8_blocks_carry_their_scales() -> None:
    kv = cache("int8")
    assert kv.spec.groups[0].block_bytes(4) == 2 * 2 * 4 * (6 + 4)
    payload = b"".join(kv.read(0, range(3), [2]))
    assert len(payload) == 3 * kv.spec.groups[0].block_bytes(4)
    other = KvCache(kv.spec, [9, 9])
    other.write(0, range(3), [5], memoryview(payload))
    assert np.array_equal(other.data[0][:, 5], kv.data[0][:, 2])
    assert kv.data[0][:, 2].any()
