"""Log-probabilities in Triton equal the reference's to double precision."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fakes import triton_interpreter  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kernels import reference
from pdserve.kernels.cuda.sampling import CudaSampling, logprobs

pytestmark = pytest.mark.kernels

OPS = CudaSampling()
VOCABS = st.sampled_from([1, 2, 63, 64, 65, 100, 300])


@pytest.fixture(autouse=True, scope="module")
def _small_tiles() -> Iterator[None]:
    """Reduce the tile size so that small vocabularies have several tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "TILE", 64)
        yield


def some_logits(seed: int, rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=12)
@given(st.integers(0, 10_000), VOCABS, st.integers(0, 20), st.booleans())
def test_logprobs(seed: int, vocab: int, count: int, coarse: bool) -> None:
    logits = some_logits(seed, 3, vocab)
    if coarse:
        logits = logits.round()
    logits[:, 3::7] = -math.inf
    count = min(count, vocab)
    tokens, also = logits.argmax(-1).tolist(), [vocab - 1, 0]
    got = OPS.logprobs(logits, tokens, count, also)
    expected = reference.logprobs(logits, tokens, count, also)
    raw = torch.log_softmax(logits.double(), -1)
    for row, ((own, top), (_, best)) in enumerate(zip(got, expected, strict=True)):
        assert own == pytest.approx(float(raw[row, tokens[row]]), abs=1e-12)
        assert [i for i, _ in top] == [i for i, _ in best]
        assert [v for _, v in top] == pytest.approx([float(raw[row, i]) for i, _ in top], abs=1e-12)
    assert OPS.logprobs(logits[1:2], tokens[1:2], count, also) == got[1:2]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_of_a_bad_row(bad: float, count: int) -> None:
    logits = some_logits(0, 3, 100)
    logits[0, 50] = bad
    logits[2] = bad
    got = OPS.logprobs(logits, [1, 2, 3], count)
    (own, best), good, (all_bad, _) = got
    assert math.isfinite(own) == (bad == -math.inf)
    assert not math.isfinite(all_bad)
    assert good == OPS.logprobs(logits[1:2], [2], count)[0]
    assert [len(b) for _, b in got] == [count] * 3
    if count and bad != -math.inf:
        assert best[0][0] == 50
        assert not math.isfinite(best[0][1])
    if bad in (math.inf, -math.inf):
        expected = reference.logprobs(logits, [1, 2, 3], count)
        assert [i for _, b in got for i, _ in b] == [i for _, b in expected for i, _ in b]
        assert np.array_equal(np.isnan([a for a, _ in got]), np.isnan([a for a, _ in expected]))


def test_bad_input_raises() -> None:
    logits = some_logits(0, 2, 10)
    for tokens, count, also in (
        ([1], 0, ()),
        ([1, 10], 0, ()),
        ([1, 2], 11, ()),
        ([1, 2], -1, ()),
        ([1, 2], 0, (10,)),
    ):
        with pytest.raises(ValueError):
            OPS.logprobs(logits, tokens, count, also)
