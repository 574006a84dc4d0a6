"""Sampling is the documented function of logits, parameters and (seed, choice, position)."""

import math
from typing import Any

import pytest
import torch
from builders.engine_kit import ask
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.execution import Sampler
from pdserve.engine.kv import cache_seed
from pdserve.engine.scheduling import EngineLimits, Outcome, RequestState, Row, Sequence
from pdserve.kernels import reference
from pdserve.kernels.reference.sampling import candidates, gumbel_noise
from pdserve.kernels.sampling_ops import StreamSettings

VOCAB = 50
OPS = reference
LIMITS = EngineLimits(VOCAB, 100, 4, 100, 64, 16, eos_ids=frozenset({7}))


def row(generated: tuple[int, ...] = (), choice: int = 0, **params: Any) -> Row:
    prompt = params.pop("prompt", (1, 2, 3))
    request = ask("a", prompt, max_tokens=90, **params)
    job = RequestState(request, 1, 0.0, 90, cache_seed(b"", b""))
    job.generated[choice] += generated
    ids = [*prompt, *generated]
    sequence = Sequence(job, ids, (choice,), b"")
    return Row(sequence, len(ids) - 1, len(ids), (choice,), len(ids) - 1)


def sample(rows: list[Row], logits: torch.Tensor) -> list[Outcome]:
    return Sampler(LIMITS, OPS).sample(rows, logits, torch.clone)


def token(one: Row, logits: torch.Tensor) -> int:
    ((sampled,),) = [o.tokens for o in sample([one], logits[None])]
    assert not sampled.error
    return sampled.token


def noise(seed: int, choice: int, position: int) -> torch.Tensor:
    seed = seed - (1 << 64) if seed >> 63 else seed
    at = (torch.tensor([seed]), torch.tensor([choice]), torch.tensor([position]))
    return gumbel_noise(*at, VOCAB)[0]


def some_logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=60)
@given(st.integers(0, (1 << 64) - 1), st.integers(0, 3), st.integers(0, 5), st.floats(0.1, 3.0))
def test_the_token_is_the_argmax_of_scaled_logits_and_noise(
    seed: int, choice: int, position: int, temperature: float
) -> None:
    logits = some_logits(seed % 1000)[0]
    expected = int((logits / temperature + noise(seed, choice, position)).argmax())
    one = row((9,) * position, choice, n=4, seed=seed, temperature=temperature)
    assert token(one, logits) == expected
    # A filter that excludes nothing changes nothing.
    one = row((9,) * position, choice, n=4, seed=seed, temperature=temperature, top_k=VOCAB)
    assert token(one, logits) == expected


def test_greedy_takes_the_lowest_id_of_equal_scores() -> None:
    logits = torch.zeros(VOCAB)
    logits[[11, 30]] = 2.0
    assert token(row(), logits) == 11
    assert token(row(temperature=1e-6), logits) == 11


def test_a_batch_gives_the_same_tokens_as_each_row_alone() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_p": 0.8},
        {"temperature": 1.0, "seed": 3, "top_k": 5, "min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"logit_bias": {4: 100.0}},
        {"min_tokens": 5},
        {"temperature": 1.0, "seed": 8, "logprobs": 3},
    ]
    logits = some_logits(4, len(kinds))
    rows = [row((5, 6, 5), **kind) for kind in kinds]
    together = [o.tokens[0].token for o in sample(rows, logits)]
    alone = [token(row((5, 6, 5), **kind), one) for kind, one in zip(kinds, logits, strict=True)]
    assert together == alone


def test_choices_of_one_row_differ_in_their_noise() -> None:
    one = row(n=8, temperature=1.0, seed=5)
    shared = Row(one.sequence, one.start, one.end, tuple(range(8)), one.first_output)
    logits = some_logits(1)
    (outcome,) = sample([shared], logits)
    expected = [int((logits[0] + noise(5, c, 0)).argmax()) for c in range(8)]
    assert [p.token for p in outcome.tokens] == expected
    assert len(set(expected)) > 1


def test_the_order_of_edits() -> None:
    logits = some_logits(2)[0]
    prompt, generated = (1, 2, 3), (5, 6, 5)
    expected = logits.clone()
    expected[2] += 4.0
    for i in {*prompt, *generated}:
        expected[i] = expected[i] / 1.4 if expected[i] > 0 else expected[i] * 1.4
    for i, count in ((5, 2), (6, 1)):
        expected[i] -= 0.3 + 0.6 * count
    expected[[7, 9]] = -math.inf
    expected = expected / 0.8 + noise(3, 0, 3)
    params = {
        "logit_bias": {2: 4.0},
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.6,
        "min_tokens": 10,
        "stop_token_ids": (9,),
        "temperature": 0.8,
        "seed": 3,
    }
    assert token(row(generated, **params), logits) == int(expected.argmax())


def test_penalty_counts_follow_the_generated_ids() -> None:
    """A job that is sampled again after more tokens equals a new job with those tokens."""
    params = {"repetition_penalty": 1.7, "frequency_penalty": 1.1, "temperature": 1.0, "seed": 2}
    one = row((), **params)
    sampler, job = Sampler(LIMITS, OPS), one.sequence.job
    for turn in range(12):
        logits = some_logits(turn) * 0.3
        (outcome,) = sampler.sample([one], logits, torch.clone)
        fresh = row(tuple(job.generated[0]), **params)
        assert outcome.tokens[0].token == token(fresh, logits[0])
        job.generated[0].append(outcome.tokens[0].token)
    assert len(set(job.generated[0])) > 3


def test_min_tokens_masks_eos_and_stop_ids_or_only_stop_ids_with_ignore_eos() -> None:
    logits = torch.zeros(VOCAB)
    logits[7], logits[9], logits[11] = 5.0, 4.0, 3.0  # 7 is eos
    options: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (9,)}
    assert token(row((), **options), logits) == 11
    assert token(row((1,), **options), logits) == 11
    assert token(row((1, 1), **options), logits) == 7
    assert token(row((), ignore_eos=True, **options), logits) == 7


def reference_candidates(scaled: torch.Tensor, params: StreamSettings) -> set[int]:
    """Return the candidates after top_k, then top_p of the rest, then min_p, one token at a
    time."""
    order = sorted(range(len(scaled)), key=lambda i: -float(scaled[i]))
    if params.top_k:
        order = order[: params.top_k]
    weights = torch.softmax(scaled[order].double(), 0).tolist()
    kept, mass = [], 0.0
    for i, weight in zip(order, weights, strict=True):
        kept.append(i)
        mass += weight
        if mass >= params.top_p:
            break
    best = float(scaled.max())
    return {i for i in kept if math.exp(float(scaled[i]) - best) >= params.min_p * (1 - 1e-6)}


@settings(max_examples=150)
@given(
    st.integers(0, 10_000),
    st.integers(2, 3000),
    st.integers(0, 40),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.001, 0.1, 0.9, 1.0]),
)
def test_filters(seed: int, vocab: int, top_k: int, top_p: float, min_p: float) -> None:
    scaled = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * (seed % 5 + 0.1)
    params = StreamSettings(top_k=top_k, top_p=top_p, min_p=min_p)
    got = candidates(scaled, params).tolist()
    assert got == sorted(got)
    # Rounding of a sum may shift the border of the nucleus by one token.
    assert len(set(got) ^ reference_candidates(scaled, params)) <= (top_p < 1)
    assert int(scaled.argmax()) in got


def test_filters_treat_equal_logits_alike_and_need_no_finite_floor() -> None:
    scaled = torch.tensor([1.0, 2.0, 2.0, 2.0, -math.inf])
    assert candidates(scaled, StreamSettings(top_k=2)).tolist() == [1, 2, 3]
    assert candidates(scaled, StreamSettings(top_k=1, min_p=1.0)).tolist() == [1, 2, 3]
    flat = torch.zeros(5000)
    assert len(candidates(flat, StreamSettings(top_p=0.5))) == 5000
    assert candidates(torch.arange(5000.0), StreamSettings(top_p=1e-9)).tolist() == [4999]


def test_logprobs_come_from_the_raw_distribution() -> None:
    logits = some_logits(3, 2)
    logits[1, [20, 21, 22]] = 30.0
    rows = [
        row(logprobs=4, temperature=0.5, logit_bias={8: 100.0}),
        row(logprobs=2),
    ]
    first, second = sample(rows, logits)
    raw = torch.log_softmax(logits, dim=-1)
    assert first.tokens[0].token == 8
    found = first.tokens[0].logprob
    assert found is not None
    assert found.logprob == pytest.approx(float(raw[0, 8]), abs=1e-5)
    best = raw[0].topk(4)
    assert [i for i, _ in found.top] == best.indices.tolist()
    assert [v for _, v in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    tied = second.tokens[0].logprob
    assert tied is not None
    assert [i for i, _ in tied.top] == [20, 21]
    assert sample([row(logprobs=0)], logits[:1])[0].tokens[0].logprob.top == ()
    assert sample([row()], logits[:1])[0].tokens[0].logprob is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_fails_alone(bad: float) -> None:
    logits = some_logits(0, 3)
    logits[1, 3] = bad
    rows = [row(), row(temperature=1.0, top_p=0.5, logprobs=1), row(temperature=1.0)]
    outcomes = sample(rows, logits)
    assert [bool(o.tokens[0].error) for o in outcomes] == [False, True, False]


def test_a_row_without_allowed_tokens_fails() -> None:
    everything = {"min_tokens": 3, "stop_token_ids": tuple(range(VOCAB))}
    (outcome,) = sample([row((), **everything)], some_logits())
    assert outcome.tokens[0].error


def test_prompt_scores_follow_the_prompt() -> None:
    request = ask("a", range(10, 15), prompt_logprobs=1, max_tokens=5)
    job = RequestState(request, 1, 0.0, 5, b"")
    sequence = Sequence(job, list(range(10, 15)), (0,), b"")
    logits = some_logits(5, 5)
    raw = torch.log_softmax(logits, dim=-1)
    (first,) = sample([Row(sequence, 0, 3, (), 0)], logits[:3])
    (last,) = sample([Row(sequence, 3, 5, (0,), 3)], logits[3:])
    scores = [*first.scores, *last.scores]
    expected = [float(raw[i, 11 + i]) for i in range(4)]
    assert [s.logprob for s in scores] == pytest.approx(expected, abs=1e-5)
    assert [s.top[0][0] for s in scores] == raw[:4].argmax(-1).tolist()
    assert last.tokens[0].token == int(logits[4].argmax())


def test_prompt_scores_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.engine.execution.sampler.SCORED_BYTES", 3 * 4 * VOCAB)
    request = ask("a", range(10, 20), prompt_logprobs=1, max_tokens=5)
    job = RequestState(request, 1, 0.0, 5, b"")
    sequence = Sequence(job, list(range(10, 20)), (0,), b"")
    sizes: list[int] = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden.clone()

    logits = some_logits(6, 12)
    rows = [row(), Row(sequence, 0, 10, (0,), 0), row()]
    outcomes = Sampler(LIMITS, OPS).sample(rows, logits, head)
    assert sizes == [3, 3, 3, 3]  # the last rows are the three samples
    raw = torch.log_softmax(logits[1:10], dim=-1)
    expected = [float(raw[i, 11 + i]) for i in range(9)]
    assert [s.logprob for s in outcomes[1].scores] == pytest.approx(expected, abs=1e-5)
    best = logits[[0, 10, 11]].argmax(-1).tolist()
    assert [o.tokens[0].token for o in outcomes] == best
