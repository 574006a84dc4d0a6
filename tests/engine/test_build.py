"""The selected chunk size takes closest to 100 ms; slow first passes are ignored."""

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine import build


@pytest.mark.parametrize(
    ("seconds", "chunk", "tried"),
    [
        ({64: [0.004], 128: [0.008], 256: [0.016], 512: [0.03], 1024: [0.07], 2048: [0.15] * 2},
         1024, [1, 64, 128, 256, 512, 1024, 2048, 2048]),
        ({size: [size / 1e5] * 2 for size in build.CHUNKS}, 8192, [1, *build.CHUNKS, 8192]),
        ({64: [0.06], 128: [0.12, 0.13]}, 128, [1, 64, 128, 128]),
        ({64: [0.9, 0.3]}, 64, [1, 64, 64]),
        # A device compiles kernels in the first chunk of each size, so the second one is measured.
        ({64: [0.9, 0.05], 128: [2.0, 0.05], 256: [0.1, 0.1]}, 256,
         [1, 64, 64, 128, 128, 256, 256]),
    ],
    ids=["fast", "faster", "slow", "slower than a chunk may be", "cold"],
)  # fmt: skip
def test_the_measured_chunk(
    seconds: dict[int, list[float]],
    chunk: int,
    tried: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def taken(model: Any, kv: Any, size: int) -> float:
        sizes.append(size)
        return 5.0 if size == 1 else seconds[size].pop(0)

    least = min(best / size for size, all_ in seconds.items() for best in [min(all_)])
    kv: Any = SimpleNamespace(num_blocks=1024, spec=SimpleNamespace(block_size=16))
    model: Any = None
    monkeypatch.setattr(build, "_chunk_seconds", taken)
    found, token_s, row_s = build.measure(model, kv, 8192)
    assert (found, sizes) == (chunk, [*tried, 1, 1])
    assert token_s == pytest.approx(least)
    assert row_s == 5.0
