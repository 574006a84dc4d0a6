"""Sampling in Triton equals the reference: noise, edits, filters and tokens."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
from builders.sampling_kit import EDITS, sample, some_logits
from fakes import triton_interpreter  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kernels import reference
from pdserve.kernels.cuda.sampling import CudaSampling, candidates, logit_edits, samples
from pdserve.kernels.cuda.sampling.records import RECORD
from pdserve.kernels.reference.sampling import candidates as reference_candidates
from pdserve.kernels.sampling_ops import StreamSettings

pytestmark = pytest.mark.kernels

OPS = CudaSampling()
VOCABS = st.sampled_from([1, 2, 63, 64, 65, 100, 300])


@pytest.fixture(autouse=True, scope="module")
def _small_tiles() -> Iterator[None]:
    """Reduce tile and block size, so that small vocabularies have several tiles and more tokens
    than a block holds."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (logit_edits, samples):
            patch.setattr(module, "TILE", 64)
        patch.setattr(candidates, "BLOCK", 128)
        yield


@settings(max_examples=20)
@given(st.integers(0, 10_000), VOCABS, st.sampled_from(["", "coarse", "masked", "flat"]))
def test_greedy_takes_the_lowest_id_of_equal_scores(seed: int, vocab: int, kind: str) -> None:
    logits = some_logits(seed, 3, vocab)
    if kind == "coarse":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros(3, vocab)
    elif kind == "masked":
        logits[:, 1 : vocab - 1] = -math.inf
    assert sample(OPS, logits, [StreamSettings()] * 3) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [1, 40, 150])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_a_nonfinite_row_does_not_affect_others(vocab: int, bad: float) -> None:
    at = [0, vocab // 2, vocab - 1]
    logits = some_logits(1, 8, vocab)
    for row, column in enumerate(at, start=1):
        logits[row, column] = bad
    logits[4, :] = bad
    logits[5, :] = -math.inf
    logits[6, 0], logits[6, -1] = math.inf, -math.inf
    for kind in (
        StreamSettings(),
        StreamSettings(temperature=1.0),
        StreamSettings(temperature=1.0, top_p=0.5, top_k=3),
    ):
        got = sample(OPS, logits, [kind] * 8)
        assert [t < 0 for t in got] == [False, True, True, True, True, True, True, False]
        assert got == sample(reference, logits, [kind] * 8)


@settings(max_examples=30)
@given(
    st.integers(0, 10_000),
    VOCABS,
    st.sampled_from([1.0, 0.7, 0.01, 1e-6, 50.0]),
    st.sampled_from([0.0, 0.1, 3.0, 60.0]),
    st.booleans(),
)
def test_gumbel_argmax(
    seed: int, vocab: int, temperature: float, spread: float, coarse: bool
) -> None:
    logits = some_logits(seed, 3, vocab, spread)
    if coarse:
        logits = logits.round()
    logits[:, 2::3] = -math.inf
    kinds = [
        StreamSettings(
            temperature=temperature, seed=(seed * 0x9E3779B97F4A7C15) % (1 << 64), choice=c
        )
        for c in range(3)
    ]
    ids = [[1] * (vocab > 1) * n for n in (0, 3, 7)]
    assert sample(OPS, logits, kinds, ids) == sample(reference, logits, kinds, ids)


def floor_of(logits: torch.Tensor, one: StreamSettings) -> float:
    """Return the floor that the device code finds for one row of logits / T."""
    vocab = logits.shape[1]
    packed = np.frombuffer(OPS.stream(one, vocab).record, RECORD)
    records = torch.from_numpy(packed.view(np.uint8).copy())
    survey = samples.Survey(records, logits, logits, vocab, 1)
    return float(candidates.floors_of(survey, torch.zeros(1, dtype=torch.int32))[0])


def kept_by(scaled: torch.Tensor, one: StreamSettings, top_p: float) -> list[int]:
    moved = StreamSettings(top_k=one.top_k, top_p=top_p, min_p=one.min_p)
    kept: list[int] = reference_candidates(scaled, moved).tolist()
    return kept


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 127, 128, 129, 300]),
    st.integers(0, 310),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.001, 0.1, 0.9, 1.0]),
    st.sampled_from([0.0, 0.3, 3.0, 12.0, 1e30]),
    st.sampled_from(["", "coarse", "masked", "rising", "few", "steps"]),
)
def test_filters_keep_what_the_reference_keeps(
    seed: int, vocab: int, top_k: int, top_p: float, min_p: float, spread: float, kind: str
) -> None:
    """Where a running sum is within 1e-12 of top_p, the result of a slightly different top_p is
    accepted."""
    logits = some_logits(seed, 1, vocab, spread)
    if kind == "coarse":
        logits = logits.round()
    elif kind == "masked":
        logits[:, 1::3] = -math.inf
    elif kind == "rising":
        logits = logits.sort(dim=-1).values
    elif kind == "few":
        logits[:, 3:] = -math.inf
    elif kind == "steps":
        logits = logits.sign()
    temperature = (0.8, 1.0, 5.0)[seed % 3]
    one = StreamSettings(temperature, top_k, top_p, min_p, seed)
    scaled = logits[0] / one.temperature
    if not one.filters:
        return
    floor = floor_of(logits, one)
    kept = (scaled >= floor).nonzero()[:, 0].tolist()
    expected = [kept_by(scaled, one, top_p)]
    if top_p < 1:
        expected += [kept_by(scaled, one, top_p + off) for off in (-1e-12, 1e-12)]
    assert kept in expected
    if seed % 3 == 0 and kept == expected[0]:
        assert sample(OPS, logits, [one]) == sample(reference, logits, [one])


def test_filters_terminate_with_many_equal_scores() -> None:
    """There are more equal scores than a block holds, and the best scores are where the initial
    sample does not look."""
    logits = torch.zeros(1, 400)
    logits[0, 1:60:6] = 5.0
    logits[0, 200:] = -math.inf
    for top_k in (1, 10, 11, 200, 201):
        one = StreamSettings(temperature=1.0, top_k=top_k)
        expected = float(logits[0].topk(top_k).values[-1])
        assert floor_of(logits, one) == expected
    for top_p in (0.5, 0.98, 1 - 1e-15):
        one = StreamSettings(temperature=1.0, top_p=top_p)
        kept = (logits[0] >= floor_of(logits, one)).nonzero()[:, 0].tolist()
        assert kept in [kept_by(logits[0], one, top_p + off) for off in (-1e-12, 0, 1e-12)]


@pytest.mark.parametrize("edits", EDITS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_edits_equal_the_reference_at_every_token(
    edits: dict[str, Any], temperature: float
) -> None:
    vocab, prompt = 100, (9, 8, 9, 50, 99)
    one = StreamSettings(**{"temperature": temperature, **edits}, prompt_ids=prompt, seed=77)
    fast, slow = OPS.stream(one, vocab), reference.stream(one, vocab)
    generated: list[int] = []
    seen = set()
    for turn in range(9):
        logits = some_logits(turn % 5, 1, vocab, 1.0)
        before = logits.clone()
        (expected,) = reference.sample(logits, [0], [slow], [generated])
        assert OPS.sample(logits, [0], [fast], [generated]) == [expected]
        assert torch.equal(logits, before)
        # A fresh stream that gets all ids at once agrees: marks are only a cache.
        if turn % 4 == 3:
            assert sample(OPS, logits, [one], [generated]) == [expected]
        generated.append(expected if expected >= 0 else turn)
        seen.add(expected)
    assert len(seen) > 1


def test_edited_scores_are_bit_identical(subtests: pytest.Subtests) -> None:
    for window in (0, 1, 12, 60, 900):
        with subtests.test(window=window):
            _same_floats(window)


def _same_floats(window: int) -> None:
    vocab = 300
    one = StreamSettings(
        presence_penalty=0.3,
        frequency_penalty=0.07,
        repetition_penalty=1.17,
        penalty_window=window,
        logit_bias={i: 0.1 * i for i in range(0, vocab, 3)},
        masked_ids=(4, 4, 299),
        min_tokens=50,
        prompt_ids=tuple(range(0, vocab, 2)) * 2,
    )
    logits, ids = some_logits(3, 1, vocab), [i * i % vocab for i in range(40)]
    stream, slow = OPS.stream(one, vocab), reference.stream(one, vocab)
    seen: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pdserve.kernels.cuda.sampling.step.edit",
            lambda *args: seen.append(logit_edits.edit(*args)) or seen[-1],
        )
        for length in (0, 1, 11, 13, 40):
            generated = ids[:length]
            expected = logits[0].clone()
            slow.edits(expected.device).apply(expected, generated)
            OPS.sample(logits, [0], [stream], [generated])
            assert torch.equal(seen.pop()[0], expected)
    assert not seen


MIX = [
    StreamSettings(),
    StreamSettings(temperature=1.0, seed=1),
    StreamSettings(temperature=0.7, seed=2, top_p=0.8),
    StreamSettings(temperature=1.0, seed=3, top_k=5, min_p=0.05),
    StreamSettings(repetition_penalty=1.3),
    StreamSettings(logit_bias={4: 100.0}, temperature=1.0, seed=(1 << 64) - 1),
]


def test_a_token_depends_only_on_its_stream() -> None:
    logits = some_logits(4, 4, 500)
    rows = [3, 0, 0, 2, 1, 0]
    ids = [[5, 6, 5]] * 6
    together = sample(OPS, logits, MIX, ids, rows)
    for i, kind in enumerate(MIX):
        assert sample(OPS, logits[rows[i]][None], [kind], [ids[i]]) == [together[i]]
    assert together == sample(reference, logits, MIX, ids, rows)


@pytest.mark.parametrize("num_samples", [1, 2, 17, 33])
def test_the_number_of_launches_does_not_depend_on_the_number_of_samples(num_samples: int) -> None:
    logits = some_logits(8, 5, 200)
    kinds = [MIX[i % len(MIX)] for i in range(num_samples)]
    rows = [i * 3 % 5 for i in range(num_samples)]
    ids = [[i, 2 * i] for i in range(num_samples)]
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        run = triton.runtime.interpreter.InterpretedFunction.run

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            names.append(self.fn.__name__)
            return run(self, *args, **kwargs)

        patch.setattr(triton.runtime.interpreter.InterpretedFunction, "run", noted)
        assert sample(OPS, logits, kinds, ids, rows) == sample(reference, logits, kinds, ids, rows)
    assert len(names) == (2 if num_samples < 3 else 5)


def test_rows_of_a_wider_tensor() -> None:
    wide = some_logits(8, 3, 230)
    logits = wide[:, 30:]
    assert sample(OPS, logits, MIX[:3]) == sample(reference, logits, MIX[:3])


@settings(max_examples=15)
@given(
    st.integers(0, 10_000),
    VOCABS,
    st.sampled_from([0.02, 0.5, 0.98]),
    st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1}, {"logit_bias": {0: 3.0}}]),
    st.sampled_from([0.0, 1.0]),
)
def test_masked_samples_equal_the_reference(
    seed: int, vocab: int, share: float, options: dict[str, Any], temperature: float
) -> None:
    """The last of three rows has no mask. Masks have more bits than there are tokens."""
    logits = some_logits(seed, 3, vocab)
    rng = np.random.default_rng(seed)
    allowed = rng.random((2, (vocab + 31) // 32 * 32)) < share
    masks = [*np.packbits(allowed, axis=1, bitorder="little").view(np.uint32), None]
    kinds = [StreamSettings(temperature=temperature, seed=seed + i, **options) for i in range(3)]
    found = sample(OPS, logits, kinds, masks=masks)
    assert found == sample(reference, logits, kinds, masks=masks)
    for token, bits in zip(found[:2], allowed[:, :vocab], strict=True):
        assert bits[token] if bits.any() else token == -1


@pytest.mark.parametrize("inside", [None, math.nan, math.inf, -math.inf])
def test_masked_scores_may_have_any_value(inside: float | None) -> None:
    vocab = 200
    ids = np.arange(3, vocab, 7)
    bits = np.zeros(224, dtype=bool)
    bits[ids] = True
    logits = torch.full((1, vocab), 9.0)
    logits[0, ::2], logits[0, 1::4] = math.nan, math.inf
    logits[0, ids] = torch.from_numpy(np.arange(len(ids)) % 5).float()
    if inside is not None:
        logits[0, ids[4]] = inside
    mask = np.packbits(bits, bitorder="little").view(np.uint32)
    for kind in (StreamSettings(), StreamSettings(temperature=0.7), MIX[3]):
        found = sample(OPS, logits, [kind], masks=[mask])
        assert found == sample(reference, logits, [kind], masks=[mask])
        assert (found == [-1]) == (inside is not None and inside != -math.inf)


def test_bad_input_raises() -> None:
    logits = some_logits(0, 2, 10)
    stream = OPS.stream(StreamSettings(), 10)
    counting = OPS.stream(StreamSettings(presence_penalty=1.0), 10)
    for rows, streams, ids in (
        ([2], [stream], [[]]),
        ([-1], [stream], [[]]),
        ([0, 1], [stream], [[]]),
        ([0], [OPS.stream(StreamSettings(), 11)], [[]]),
        ([0], [counting], [[10]]),
    ):
        with pytest.raises(ValueError):
            OPS.sample(logits, rows, streams, ids)
    for bad_logits in (logits.double(), logits.t(), logits[0]):
        with pytest.raises(TypeError, match="logits"):
            OPS.sample(bad_logits, [0], [stream], [[]])
    for masks in ([], [np.zeros(2, np.uint32)], [None, None]):
        with pytest.raises(ValueError, match="mask"):
            OPS.sample(logits, [0], [stream], [[]], masks)
    for mask in (np.zeros(1, np.int32), np.zeros((1, 1), np.uint32)):
        with pytest.raises(TypeError, match="mask"):
            OPS.sample(logits, [0], [stream], [[]], [mask])  # type: ignore[list-item]
    OPS.sample(logits, [0], [counting], [[1, 2]])
    with pytest.raises(ValueError, match="shorter"):
        OPS.sample(logits, [0], [counting], [[1]])
    assert OPS.sample(logits, [], [], []) == []
    for bad in (
        StreamSettings(logit_bias={10: 1.0}),
        StreamSettings(masked_ids=(-1,)),
        StreamSettings(prompt_ids=(10,), repetition_penalty=2.0),
        StreamSettings(prompt_ids=(10, 1), presence_penalty=2.0, penalty_window=2),
        StreamSettings(temperature=math.nan),
        StreamSettings(min_p=1.5),
        StreamSettings(top_p=0.0),
    ):
        with pytest.raises(ValueError):
            OPS.stream(bad, 10)
