"""Conditions that end or refuse a request: stop ids, lengths, limits of the pool and of the
queue."""

import pytest
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, run, tokens
from fakes.decoder import fake_spec, reference

from pdserve.engine.api import (
    ChoiceState,
    ContextLengthExceeded,
    Finished,
    FinishReason,
    InvalidRequest,
    NewTokens,
    QueueFull,
)


def expected(prompt: list[int], count: int = 8, window: int = 0) -> list[int]:
    return reference(prompt, fake_spec(4, window), count)


def test_stop_ids_end_a_choice_and_min_tokens_masks_them() -> None:
    free = expected(list(range(10)), 8)
    stop = free[2]
    (ids,) = tokens(run(fake_engine(), ask("a", range(10), stop_token_ids=(stop,)))).values()
    assert ids == free[: free.index(stop) + 1]
    events = run(fake_engine(), ask("a", range(10), stop_token_ids=(stop,), min_tokens=6))
    (ids,) = tokens(events).values()
    assert stop not in ids[:6]
    assert len(ids) >= 6


def test_eos_ends_unless_ignored() -> None:
    free = expected(list(range(10)), 8)
    engine = fake_engine(eos_ids=frozenset({free[0]}))
    events = run(engine, ask("a", range(10)), ask("b", range(10), ignore_eos=True))
    assert tokens(events) == {("a", 0): free[:1], ("b", 0): free}
    assert of(events, NewTokens, "a")[0].finish is FinishReason.STOP


def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    engine = fake_engine(context_len=24)
    events = run(engine, ask("a", range(10), max_tokens=None))
    assert len(tokens(events)["a", 0]) == 14
    assert of(events, NewTokens)[-1].finish is FinishReason.LENGTH
    small = fake_engine(num_blocks=4, context_len=200)
    assert len(tokens(run(small, ask("a", range(10), max_tokens=None)))["a", 0]) == 7


def test_a_request_that_never_fits_is_refused_and_one_that_fits_later_waits() -> None:
    engine = fake_engine(num_blocks=6, context_len=40)
    with pytest.raises(ContextLengthExceeded) as too_long:
        engine.submit(ask("a", range(10), max_tokens=31))
    assert too_long.value.param == "max_tokens"
    with pytest.raises(ContextLengthExceeded):
        engine.submit(ask("a", range(25), max_tokens=1))  # the pool holds 24 tokens, the context 40
    with pytest.raises(ContextLengthExceeded):
        engine.submit(ask("a", range(8), n=4, max_tokens=6))
    assert not engine.has_work
    events = run(engine, *(ask(k, range(12), max_tokens=13) for k in "abc"))
    assert len(of(events, Finished)) == 3
    assert_at_rest(engine)


def test_choices_without_max_tokens_share_a_pool_of_the_size_of_the_context() -> None:
    engine = fake_engine(num_blocks=6, context_len=24)
    found = tokens(run(engine, ask("a", range(10), n=2, max_tokens=None, ignore_eos=True)))
    assert [len(ids) for ids in found.values()] == [7, 7]
    assert_at_rest(engine)


WRONG_PARAMETERS = (
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": -1.0}),
    ("top_p", {"top_p": 0.0}),
    ("top_k", {"top_k": -1}),
    ("min_p", {"min_p": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("presence_penalty", {"presence_penalty": float("inf")}),
    ("frequency_penalty", {"frequency_penalty": float("nan")}),
    ("logit_bias", {"logit_bias": {64: 1.0}}),
    ("logit_bias", {"logit_bias": {1: float("nan")}}),
    ("stop_token_ids", {"stop_token_ids": (-1,)}),
    ("max_tokens", {"max_tokens": 0}),
    ("min_tokens", {"min_tokens": 9}),
    ("logprobs", {"logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("n", {"n": 0}),
    ("n", {"n": 9}),
    ("n", {"n": 2, "choices": (ChoiceState(),)}),
    ("seed", {"seed": 1 << 64}),
)


def test_invalid_parameters_are_named(subtests: pytest.Subtests) -> None:
    for param, fields in WRONG_PARAMETERS:
        with subtests.test(param, **fields):
            engine = fake_engine()
            with pytest.raises(InvalidRequest) as refused:
                engine.submit(ask("a", range(5), **fields))  # type: ignore[arg-type]
            assert refused.value.param == param
            assert not engine.has_work


def test_invalid_prompts_are_refused(subtests: pytest.Subtests) -> None:
    for prompt in ([], [64], [-1]):
        with subtests.test(prompt=prompt):
            with pytest.raises(InvalidRequest) as refused:
                fake_engine().submit(ask("a", prompt))
            assert refused.value.param == "prompt"


def test_the_queue_is_limited_and_keys_are_unique() -> None:
    engine = fake_engine(max_waiting=2)
    engine.submit(ask("a", range(5)))
    with pytest.raises(InvalidRequest):
        engine.submit(ask("a", range(5)))
    engine.submit(ask("b", range(5)))
    with pytest.raises(QueueFull):
        engine.submit(ask("c", range(5)))
    assert len(of(run(engine), Finished)) == 2
