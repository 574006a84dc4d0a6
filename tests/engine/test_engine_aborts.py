"""Requests that end early: aborted, or failed by the model."""

import pytest
import torch
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, run, tokens
from fakes.decoder import FakeDecoder, fake_spec, reference

from pdserve.engine.api import (
    ChoiceState,
    Finished,
    FinishReason,
    NewTokens,
    PrefillComputed,
    RequestFailed,
)
from pdserve.engine.execution import Batch, Ints
from pdserve.engine.kv.cache import KvCache

WINDOWS = (0, 6)  # layers with full attention; and those combined with window layers


def expected(prompt: list[int], count: int = 8, window: int = 0) -> list[int]:
    return reference(prompt, fake_spec(4, window), count)


def test_a_choice_aborted_early_leaves_its_slot_to_others() -> None:
    engine = fake_engine(max_running=4)
    engine.submit(ask("a", range(60), n=3))
    engine.step()
    engine.abort("a", [1])
    engine.submit(ask("b", range(4), n=2))  # fits into a step next to a chunk
    engine.step()
    assert engine.stats().running == 2
    run(engine)
    assert_at_rest(engine)


def test_abort_in_every_state() -> None:
    engine = fake_engine(num_blocks=30, max_running=4)
    assert not engine.abort("nobody")
    engine.submit(ask("queued", range(10)))
    assert engine.abort("queued")
    engine.submit(ask("chunked", range(40)))
    step = engine.step()
    assert step is not None
    assert of(step.events, Finished, "queued")
    assert of(step.events, PrefillComputed, "chunked")
    engine.abort("chunked")
    engine.submit(ask("decoding", range(4)))
    for _ in range(3):
        engine.step()
    assert engine.stats().running == 1
    engine.abort("decoding")
    run(engine, ask("held", range(9), prefill_only=True))
    engine.abort("held")
    engine.submit(ask("prefilling", range(40), prefill_only=True))
    engine.step()
    engine.abort("prefilling")
    assert_at_rest(engine)
    assert run(engine) == []


def test_single_choices_are_aborted() -> None:
    engine = fake_engine(num_blocks=60)
    options = {"n": 3, "seed": 4, "temperature": 1.0}
    whole = tokens(run(fake_engine(), ask("a", range(33), **options)))
    engine.submit(ask("a", range(33), **options))
    engine.step()
    engine.abort("a", [1])  # during prefill
    events = list(run(engine, max_steps=2000))
    got = tokens(events)
    assert got["a", 0] == whole["a", 0]
    assert got["a", 2] == whole["a", 2]
    assert got["a", 1] == []
    engine.submit(ask("b", range(33), **options))
    for _ in range(5):
        engine.step()
    engine.abort("b", [0, 7])
    engine.abort("b", [0])
    rest = run(engine)
    ended = [(e.choice, e.finish) for e in of(rest, NewTokens, "b") if e.finish]
    assert ended[0] == (0, FinishReason.ABORTED)
    assert sorted(c for c, _ in ended) == [0, 1, 2]
    engine.submit(ask("c", range(5), n=2))
    engine.abort("c", [0])
    engine.abort("c", [1])
    last = run(engine)
    assert [e.finish for e in of(last, NewTokens)] == [FinishReason.ABORTED] * 2
    assert len(of(last, Finished)) == 1
    assert_at_rest(engine)


def test_a_request_resumed_with_all_choices_ended_ends_at_once() -> None:
    engine = fake_engine()
    done = (ChoiceState((3, 4), FinishReason.STOP), ChoiceState(tuple(range(8))))
    events = run(engine, ask("a", range(5), n=2, choices=done))
    assert events == [NewTokens("a", 1, 8, (), (), FinishReason.LENGTH), Finished("a", 0)]


class Poisoned(FakeDecoder):
    """A decoder that returns NaN logits for rows whose first token is `poison`, and raises if it is
    14."""

    poison = 13

    def forward(self, batch: Batch[Ints], kv: KvCache) -> torch.Tensor:
        logits = super().forward(batch, kv)
        for output, token in enumerate(batch.logit_tokens.tolist()):
            row = next(r for r in range(len(batch.kv_lens)) if batch.starts[r + 1] > token)
            first = int(kv.layer(0)[0][batch.groups[0].block_table[row, 0], 0, 0, 0, 0])
            if first == self.poison:
                logits[output, 5] = float("nan")
            if first == 14:
                raise RuntimeError("no luck")
        return logits


def test_nan_fails_only_its_request(subtests: pytest.Subtests) -> None:
    for options in ({}, {"temperature": 1.0}, {"top_k": 3, "temperature": 1.0}):
        with subtests.test(options=options):
            engine = fake_engine(model=Poisoned(fake_spec()))
            events = run(engine, ask("bad", [13, 1], **options), ask("good", [12, 1], max_tokens=4))
            (failed,) = of(events, RequestFailed)
            assert failed.key == "bad"
            assert "finite" in failed.message
            assert not of(events, NewTokens, "bad")
            assert tokens(events)["good", 0] == expected([12, 1], 4)
            assert_at_rest(engine)


def test_kv_that_led_to_nan_is_not_cached(subtests: pytest.Subtests) -> None:
    for window in WINDOWS:
        with subtests.test(window=window):
            model = Poisoned(fake_spec(window=window))
            engine = fake_engine(model=model, window=window)
            prompt = [13, *range(20)]
            assert of(run(engine, ask("bad", prompt)), RequestFailed)
            assert engine.take_prefix_events() == ([], [])
            model.poison = 15
            after = run(engine, ask("good", prompt))
            assert of(after, Finished)[0].cached_tokens == 0
            assert tokens(after)["good", 0] == expected(prompt, window=window)
            model.poison = 13
            assert of(run(engine, ask("bad", prompt)), RequestFailed)
            added, removed = engine.take_prefix_events()
            assert not removed
            assert len(added) == 2  # the blocks of "good" after the prompt
            assert_at_rest(engine)


def test_a_model_that_raises_fails_the_step_and_later_ones_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = fake_engine(model=Poisoned(fake_spec()), max_running=1)
    events = run(engine, ask("bad", [14, 1]), ask("good", [12, 1], max_tokens=4))
    assert [e.key for e in of(events, RequestFailed)] == ["bad"]
    assert "no luck" in caplog.text
    assert tokens(events)["good", 0] == expected([12, 1], 4)
    assert_at_rest(engine)
