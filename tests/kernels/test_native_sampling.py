"""Native sampling equals the reference on every ISA: noise, edits, filters and tokens."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from builders.sampling_kit import EDITS, sample, some_logits
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kernels import _native, reference
from pdserve.kernels.cpu import CpuSampling
from pdserve.kernels.reference.sampling import candidates, gumbel_at
from pdserve.kernels.sampling_ops import StreamSettings

CONTEXTS = {isa: _native.Context(2, isa=isa, spin_us=0) for isa in _native.isas()}
ISAS = sorted(CONTEXTS)
VOCABS = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 100, 1000, 1040, 3000])


def native(isa: str) -> CpuSampling:
    return CpuSampling(CONTEXTS[isa])


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40)
@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 127), st.integers(0, 1 << 30))
def test_noise_bit_for_bit(isa: str, seed: int, choice: int, position: int) -> None:
    ids = torch.arange(400) * 379
    out = torch.empty(400)
    _native.gumbel_at(CONTEXTS[isa], seed, choice, position, ids, out)
    where = torch.tensor([seed]), torch.tensor([choice]), torch.tensor([position])
    assert torch.equal(out, gumbel_at(*where, ids[None])[0])


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60)
@given(st.integers(0, 10_000), VOCABS, st.sampled_from(["", "coarse", "masked", "flat"]))
def test_greedy_takes_the_lowest_id_of_equal_scores(
    isa: str, seed: int, vocab: int, kind: str
) -> None:
    logits = some_logits(seed, 5, vocab)
    if kind == "coarse":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros(5, vocab)
    elif kind == "masked":
        logits[:, 1 : vocab - 1] = -math.inf
    assert sample(native(isa), logits, [StreamSettings()] * 5) == logits.argmax(-1).tolist()


def test_a_nonfinite_row_does_not_affect_others(subtests: pytest.Subtests) -> None:
    for isa, vocab, bad in product(ISAS, (1, 40, 1030), (math.nan, -math.nan, math.inf)):
        with subtests.test(isa=isa, vocab=vocab, bad=bad):
            at = [0, vocab // 2, vocab - 1]
            logits = some_logits(1, 8, vocab)
            for row, column in enumerate(at, start=1):
                logits[row, column] = bad
            logits[4, :] = bad
            logits[5, :] = -math.inf
            logits[6, 0], logits[6, -1] = math.inf, -math.inf
            kinds = [StreamSettings(), StreamSettings(temperature=1.0, top_p=0.5, top_k=3)]
            for kind in kinds:
                got = sample(native(isa), logits, [kind] * 8)
                assert [t < 0 for t in got] == [False, True, True, True, True, True, True, False]


def test_infinities_do_not_hide_a_nan(subtests: pytest.Subtests) -> None:
    for isa in ISAS:
        with subtests.test(isa):
            logits = some_logits(2, 1, 1000)
            logits[0, ::2] = -math.inf
            logits[0, 333] = 50.0
            assert sample(native(isa), logits, [StreamSettings()]) == [333]
            logits[0, 700] = math.nan
            assert sample(native(isa), logits, [StreamSettings()]) == [-1]


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60)
@given(
    st.integers(0, 10_000),
    VOCABS,
    st.sampled_from([1.0, 0.7, 0.01, 1e-6, 50.0]),
    st.sampled_from([0.0, 0.1, 3.0, 60.0]),
    st.booleans(),
)
def test_gumbel_argmax(
    isa: str, seed: int, vocab: int, temperature: float, spread: float, coarse: bool
):
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
    assert sample(native(isa), logits, kinds, ids) == sample(reference, logits, kinds, ids)


def near(scaled: torch.Tensor, one: StreamSettings) -> list[set[int]]:
    """Return the candidates, and those with top_p moved by the error that a sum may have."""
    found = []
    for top_p in {one.top_p, min(1.0, one.top_p * (1 + 1e-9)), one.top_p * (1 - 1e-9)}:
        moved = StreamSettings(top_k=one.top_k, top_p=top_p, min_p=one.min_p)
        found.append(set(candidates(scaled, moved).tolist()))
    return found


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=120)
@given(
    st.integers(0, 10_000),
    VOCABS,
    st.integers(0, 3100),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.001, 0.1, 0.9, 1.0]),
    st.sampled_from([0.0, 0.3, 3.0, 12.0]),
    st.sampled_from(["", "coarse", "masked", "rising"]),
)
def test_filters(
    isa: str,
    seed: int,
    vocab: int,
    top_k: int,
    top_p: float,
    min_p: float,
    spread: float,
    kind: str,
) -> None:
    """Native and reference sampling can choose the same tokens, as a large number of draws shows.

    At a high temperature the noise decides: each draw takes some kept token, and the best of the
    kept tokens equals the reference's.
    """
    logits = some_logits(seed, 1, vocab, spread)
    if kind == "coarse":
        logits = logits.round()
    elif kind == "masked":
        logits[:, 1::3] = -math.inf
    elif kind == "rising":
        logits = logits.sort(dim=-1).values
    temperature = (0.8, 1.0, 5.0)[seed % 3]
    base = StreamSettings(top_k=top_k, top_p=top_p, min_p=min_p)
    scaled = logits[0] / temperature
    options = near(scaled, base)
    for draw in range(6):
        one = StreamSettings(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, choice=draw
        )
        where = torch.tensor([seed]), torch.tensor([draw]), torch.tensor([0])
        allowed = []
        for kept in options:
            ids = torch.tensor(sorted(kept))
            values = scaled[ids] + gumbel_at(*where, ids[None])[0]
            allowed.append(int(ids[values.argmax()]))
        (got,) = sample(native(isa), logits, [one])
        assert got in allowed


def test_edits_equal_the_reference_at_every_token(subtests: pytest.Subtests) -> None:
    for isa, edits, temperature in product(ISAS, EDITS, (0.0, 1.0)):
        with subtests.test(isa=isa, edits=edits, temperature=temperature):
            vocab, prompt = 100, (9, 8, 9, 50, 99)
            one = StreamSettings(
                **{"temperature": temperature, **edits}, prompt_ids=prompt, seed=77
            )
            ops = native(isa)
            fast, slow = ops.stream(one, vocab), reference.stream(one, vocab)
            generated: list[int] = []
            seen = set()
            for turn in range(25):
                logits = some_logits(turn % 5, 1, vocab, 1.0)
                before = logits.clone()
                (expected,) = reference.sample(logits, [0], [slow], [generated])
                assert ops.sample(logits, [0], [fast], [generated]) == [expected]
                assert torch.equal(logits, before)
                # A fresh stream that gets all ids at once agrees: notes are only a cache.
                assert ops.sample(logits, [0], [ops.stream(one, vocab)], [generated]) == [expected]
                generated.append(expected if expected >= 0 else turn)
                seen.add(expected)
            assert len(seen) > 1


def test_a_token_depends_only_on_its_stream(subtests: pytest.Subtests) -> None:
    for isa in ISAS:
        with subtests.test(isa):
            kinds = [
                StreamSettings(),
                StreamSettings(temperature=1.0, seed=1),
                StreamSettings(temperature=0.7, seed=2, top_p=0.8),
                StreamSettings(temperature=1.0, seed=3, top_k=5, min_p=0.05),
                StreamSettings(repetition_penalty=1.3),
                StreamSettings(logit_bias={4: 100.0}, temperature=1.0, seed=(1 << 64) - 1),
            ]
            logits = some_logits(4, 4, 1000)
            rows = [3, 0, 0, 2, 1, 0]
            ids = [[5, 6, 5]] * 6
            together = sample(native(isa), logits, kinds, ids, rows)
            for i, kind in enumerate(kinds):
                assert sample(native(isa), logits[rows[i]][None], [kind], [ids[i]]) == [together[i]]
            assert together == sample(reference, logits, kinds, ids, rows)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40)
@given(st.integers(0, 10_000), VOCABS, st.integers(0, 20), st.booleans())
def test_logprobs(isa: str, seed: int, vocab: int, count: int, coarse: bool) -> None:
    logits = some_logits(seed, 4, vocab)
    if coarse:
        logits = logits.round()
    logits[:, 3::7] = -math.inf
    count = min(count, vocab)
    tokens = logits.argmax(-1).tolist()
    got = native(isa).logprobs(logits, tokens, count)
    expected = reference.logprobs(logits, tokens, count)
    raw = torch.log_softmax(logits.double(), -1)
    for row, ((own, top), (_, best)) in enumerate(zip(got, expected, strict=True)):
        assert own == pytest.approx(float(raw[row, tokens[row]]), abs=1e-12)
        assert [i for i, _ in top] == [i for i, _ in best]
        assert [v for _, v in top] == pytest.approx([float(raw[row, i]) for i, _ in top], abs=1e-12)


def test_logprobs_of_a_bad_row_are_nan(subtests: pytest.Subtests) -> None:
    for isa in ISAS:
        with subtests.test(isa):
            logits = some_logits(0, 2, 100)
            logits[0, 50] = math.nan
            bad, good = native(isa).logprobs(logits, [1, 2], 5)
            assert math.isnan(bad[0])
            assert math.isfinite(good[0])


def test_all_targets_and_thread_counts_give_the_same_bits() -> None:
    logits = some_logits(9, 6, 5000, 0.5)
    seen = set()
    for isa in ISAS:
        for threads in (1, 2, 3):
            ops = CpuSampling(_native.Context(threads, isa=isa, spin_us=0))
            seen.add(repr(ops.logprobs(logits, [4] * 6, 20)))
    assert len(seen) == 1


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60)
@given(
    st.integers(0, 10_000),
    VOCABS,
    st.sampled_from([0.02, 0.5, 0.98]),
    st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1}, {"logit_bias": {0: 3.0}}]),
    st.sampled_from([0.0, 1.0]),
)
def test_masked_samples_equal_the_reference(
    isa: str, seed: int, vocab: int, share: float, options: dict[str, Any], temperature: float
) -> None:
    """The last of three rows has no mask. Masks have more bits than there are tokens."""
    logits = some_logits(seed, 3, vocab)
    rng = np.random.default_rng(seed)
    allowed = rng.random((2, (vocab + 31) // 32 * 32)) < share
    masks = [*np.packbits(allowed, axis=1, bitorder="little").view(np.uint32), None]
    chosen = [StreamSettings(temperature=temperature, seed=seed + i, **options) for i in range(3)]
    answers = []
    for ops in (reference, native(isa)):
        streams = [ops.stream(one, vocab) for one in chosen]
        answers.append(ops.sample(logits, [0, 1, 2], streams, [[], [], []], masks))
    found, same = answers
    assert found == same
    assert found[2] == sample(native(isa), logits, chosen[2:], rows=[2])[0]
    for n, (token, bits) in enumerate(zip(found[:2], allowed[:, :vocab], strict=True)):
        assert bits[token] if bits.any() else token == -1
        if bits.any() and not temperature and not options:
            row = logits[n].numpy()
            assert row[token] == row[bits].max()


def test_masked_samples_do_not_depend_on_the_number_of_allowed_tokens(
    subtests: pytest.Subtests,
) -> None:
    """Scores have ties; scores of forbidden tokens are higher or not finite."""
    for isa, count, inside, temperature in product(
        ISAS, (1, 2, 255, 256, 257), (None, math.nan, math.inf, -math.inf), (0.0, 0.7)
    ):
        with subtests.test(isa=isa, count=count, inside=inside, temperature=temperature):
            vocab = 700
            rng = np.random.default_rng(count)
            ids = np.sort(rng.choice(vocab, count, replace=False))
            bits = np.zeros(704, dtype=bool)
            bits[ids] = True
            logits = torch.full((1, vocab), 9.0)
            logits[0, ::2], logits[0, 1::4] = math.nan, math.inf
            logits[0, ids] = torch.from_numpy(rng.integers(-2, 3, count).astype(np.float32))
            if inside is not None:
                logits[0, ids[count // 2]] = inside
            mask = np.packbits(bits, bitorder="little").view(np.uint32)
            found = []
            for seed in range(20):
                settings = StreamSettings(temperature=temperature, seed=seed)
                (token,), (same,) = (
                    ops.sample(logits, [0], [ops.stream(settings, vocab)], [[]], [mask])
                    for ops in (native(isa), reference)
                )
                assert token == same
                found.append(token)
            lost = inside is not None and (inside != -math.inf or count == 1)
            if lost:
                assert set(found) == {-1}
            else:
                assert all(bits[token] for token in found)
                assert len(set(found)) > 1 or not temperature or count < 3


def test_a_full_mask_changes_nothing_and_an_empty_one_allows_no_token() -> None:
    logits = some_logits(5, 1, 100)
    settings = [StreamSettings(temperature=1.0, seed=9)]
    free = sample(native(ISAS[0]), logits, settings)
    for ops in (reference, native(ISAS[0])):
        streams = [ops.stream(settings[0], 100)]
        for words, expected in ((np.full(4, 2**32 - 1, np.uint32), free), (None, free)):
            assert ops.sample(logits, [0], streams, [[]], [words]) == expected
        assert ops.sample(logits, [0], streams, [[]], [np.zeros(4, np.uint32)]) == [-1]


def test_log_probabilities_of_named_tokens_follow_the_best(subtests: pytest.Subtests) -> None:
    for isa, count in product(ISAS, (0, 3)):
        with subtests.test(isa=isa, count=count):
            logits = some_logits(3, 2, 50)
            also = [7, 0, 7, 49]
            expected = torch.log_softmax(logits, -1)
            for ops in (reference, native(isa)):
                for row, (_, top) in enumerate(ops.logprobs(logits, [1, 2], count, also)):
                    assert [token for token, _ in top[count:]] == also
                    values = [value for _, value in top[count:]]
                    assert values == pytest.approx(expected[row, also].tolist(), abs=1e-5)
                    assert top[:count] == ops.logprobs(logits, [1, 2], count)[row][1]
            with pytest.raises(ValueError, match="outside"):
                native(isa).logprobs(logits, [1, 2], count, [50])


def test_bad_input_raises() -> None:
    ops = native(ISAS[0])
    logits = some_logits(0, 2, 10)
    stream = ops.stream(StreamSettings(), 10)
    counting = ops.stream(StreamSettings(presence_penalty=1.0), 10)
    for rows, streams, ids in (
        ([2], [stream], [[]]),
        ([-1], [stream], [[]]),
        ([0, 1], [stream], [[]]),
        ([0], [ops.stream(StreamSettings(), 11)], [[]]),
        ([0], [counting], [[10]]),
        ([0], [counting], [(1,)]),
    ):
        with pytest.raises(ValueError):
            ops.sample(logits, rows, streams, ids)  # type: ignore[arg-type]
    for what in (object(), None):
        with pytest.raises(TypeError):
            ops.sample(logits, [0], [what], [[]])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        ops.sample(logits, ["0"], [stream], [[]])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        ops.sample(logits, [0], [counting], [[None]])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        ops.sample(logits.double(), [0], [stream], [[]])
    with pytest.raises(TypeError):
        ops.sample(logits.t(), [0], [stream], [[]])
    for masks in ([], [np.zeros(2, np.uint32)], [None, None]):
        with pytest.raises(ValueError, match="mask"):
            ops.sample(logits, [0], [stream], [[]], masks)
    for mask in (np.zeros(1, np.int32), np.zeros((1, 1), np.uint32), "x"):
        with pytest.raises(TypeError):
            ops.sample(logits, [0], [stream], [[]], [mask])  # type: ignore[list-item]
    ops.sample(logits, [0], [stream], [[1, 2]])
    with pytest.raises(ValueError, match="shorter"):
        ops.sample(logits, [0], [stream], [[1]])
    for bad in (
        StreamSettings(logit_bias={10: 1.0}),
        StreamSettings(masked_ids=(-1,)),
        StreamSettings(prompt_ids=(10,), repetition_penalty=2.0),
        StreamSettings(prompt_ids=(10, 1), presence_penalty=2.0, penalty_window=2),
        StreamSettings(penalty_window=-1),
        StreamSettings(temperature=math.nan),
        StreamSettings(min_p=1.5),
        StreamSettings(top_p=0.0),
    ):
        with pytest.raises(ValueError):
            ops.stream(bad, 10)
    for tokens, count in (([1], 0), ([1, 10], 0), ([1, 2], 11), ([1, 2], -1)):
        with pytest.raises(ValueError):
            ops.logprobs(logits, tokens, count)
