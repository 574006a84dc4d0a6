"""The engine through its public methods, over a decoder that reads every key through block
tables."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, run, tokens, until
from fakes.decoder import fake_spec, reference, words

from pdserve.engine.api import (
    ChoiceState,
    Finished,
    FinishReason,
    NewTokens,
    PrefillComputed,
    PromptScored,
    Scheduled,
)

WINDOWS = (0, 6)  # layers with full attention; and those combined with window layers


def expected(prompt: list[int], count: int = 8, window: int = 0) -> list[int]:
    return reference(prompt, fake_spec(4, window), count)


def test_any_prompt_length(subtests: pytest.Subtests) -> None:
    for window, length in product(WINDOWS, (1, 3, 4, 5, 15, 16, 17, 32, 50)):
        with subtests.test(window=window, length=length):
            engine = fake_engine(window=window)
            prompt = [(7 * i) % 60 for i in range(length)]
            events = run(engine, ask("a", prompt))
            assert tokens(events) == {("a", 0): expected(prompt, window=window)}
            (last,) = of(events, Finished)
            assert events[-1] is last
            assert of(events, NewTokens)[-1].finish is FinishReason.LENGTH
            assert_at_rest(engine)


def test_concurrent_requests_give_the_same_tokens_as_each_alone(subtests: pytest.Subtests) -> None:
    for window in WINDOWS:
        with subtests.test(window=window):
            engine = fake_engine(num_blocks=200, window=window)
            prompts = {f"r{i}": [(i + 3 * j) % 60 for j in range(1 + 7 * i)] for i in range(8)}
            events = run(
                engine, *(ask(key, prompt, max_tokens=24) for key, prompt in prompts.items())
            )
            assert engine.model.widest == 8
            assert tokens(events) == {
                (key, 0): expected(prompt, 24, window) for key, prompt in prompts.items()
            }
            assert_at_rest(engine)


def test_a_warm_cache_does_not_change_tokens(subtests: pytest.Subtests) -> None:
    for window, length in product(WINDOWS, (16, 17, 19, 33)):
        with subtests.test(window=window, length=length):
            engine = fake_engine(window=window)
            prompt = [(5 * i) % 60 for i in range(length)]
            cold = run(engine, ask("cold", prompt))
            warm = run(engine, ask("warm", prompt))
            assert of(warm, Finished)[0].cached_tokens == min((length // 4) * 4, length - 1)
            assert of(cold, Finished)[0].cached_tokens == 0
            wanted = expected(prompt, window=window)
            assert tokens(warm)["warm", 0] == tokens(cold)["cold", 0] == wanted
            # Blocks of generated tokens are cached, too.
            longer = [*prompt, *tokens(warm)["warm", 0]]
            more = run(engine, ask("more", longer))
            assert of(more, Finished)[0].cached_tokens >= length
            assert tokens(more)["more", 0] == expected(longer, window=window)
            assert_at_rest(engine)


def test_a_full_cache_hit_in_a_pool_without_room_for_the_copy() -> None:
    engine = fake_engine(num_blocks=2)
    prompt = list(range(8))
    run(engine, ask("cold", prompt, max_tokens=1))
    warm = run(engine, ask("warm", prompt, max_tokens=1))
    assert of(warm, Finished)[0].cached_tokens == 4
    assert tokens(warm)["warm", 0] == expected(prompt, 1)


def test_tenants_share_no_blocks() -> None:
    engine = fake_engine()
    run(engine, ask("a", range(20), cache_salt=b"one"))
    other = run(engine, ask("b", range(20), cache_salt=b"two"))
    same = run(engine, ask("c", range(20), cache_salt=b"one"))
    assert of(other, Finished)[0].cached_tokens == 0
    assert of(same, Finished)[0].cached_tokens == 19


def test_without_a_prefix_cache_no_block_is_kept() -> None:
    engine = fake_engine(prefix_cache=False)
    events = [run(engine, ask(key, range(20))) for key in ("a", "b")]
    assert of(events[1], Finished)[0].cached_tokens == 0
    assert engine.stats().blocks.cached == 0


def test_preemption_does_not_change_tokens(subtests: pytest.Subtests) -> None:
    for window in WINDOWS:
        with subtests.test(window=window):
            engine = fake_engine(num_blocks=14, window=window, prefix_cache=False)
            prompts = {f"r{i}": [(i + j) % 60 for j in range(9)] for i in range(4)}
            events = run(engine, *(ask(k, p, max_tokens=16) for k, p in prompts.items()))
            assert engine.stats().preemptions > 0
            assert tokens(events) == {(k, 0): expected(p, 16, window) for k, p in prompts.items()}
            assert len(of(events, Scheduled)) == len(of(events, Finished)) == 4
            assert_at_rest(engine)


def test_a_penalty_window_covers_only_prompt_and_generated_tokens() -> None:
    """A request that is preempted, batched or resumed elsewhere gives the same tokens as alone."""
    options: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.9}
    options["max_tokens"] = 24
    prompts = {f"r{i}": [(i * 5 + j) % 60 for j in range(9)] for i in range(4)}
    windows = {"r0": 4, "r1": 9, "r2": 15, "r3": 0}
    requests = {
        key: ask(key, prompt, penalty_window=windows[key], **options)
        for key, prompt in prompts.items()
    }
    alone = {key: tokens(run(fake_engine(200), r))[key, 0] for key, r in requests.items()}
    engine = fake_engine(num_blocks=14, prefix_cache=False)
    events = run(engine, *requests.values())
    assert engine.stats().preemptions > 0
    assert tokens(events) == {(key, 0): ids for key, ids in alone.items()}
    for key, cut in product(requests, (1, 5, 12)):
        states = (ChoiceState(tuple(alone[key][:cut])),)
        rest = tokens(run(fake_engine(), replace(requests[key], choices=states)))
        assert rest[key, 0] == alone[key][cut:]
    everything = {key: ask(key, prompt, **options) for key, prompt in prompts.items()}
    for key, request in everything.items():
        (ids,) = tokens(run(fake_engine(200), request)).values()
        assert (ids == alone[key]) == (not windows[key])


def test_the_youngest_request_is_preempted() -> None:
    engine = fake_engine(num_blocks=8, prefix_cache=False)
    events = run(engine, ask("old", range(8), max_tokens=20), ask("new", range(8), max_tokens=20))
    assert engine.stats().preemptions > 0
    assert [e.key for e in of(events, Finished)] == ["old", "new"]


def test_chunk_borders_are_multiples_of_the_chunk(subtests: pytest.Subtests) -> None:
    for window, chunk_size in product(WINDOWS, (4, 7, 16, 64)):
        with subtests.test(window=window, chunk_size=chunk_size):
            engine = fake_engine(window=window, chunk_size=chunk_size)
            prompt = [(3 * i) % 60 for i in range(41)]
            events = run(engine, ask("a", prompt))
            borders = [e.num_tokens for e in of(events, PrefillComputed)]
            assert borders == [*range(chunk_size, 41, chunk_size), 41]
            assert tokens(events)["a", 0] == expected(prompt, window=window)


def test_chunk_borders_after_a_hit_count_from_token_0() -> None:
    engine = fake_engine(chunk_size=16)
    run(engine, ask("a", range(20), max_tokens=1))
    events = run(engine, ask("b", [*range(20), *range(30)], max_tokens=1))
    assert [e.num_tokens for e in of(events, PrefillComputed)] == [32, 48, 50]


def test_choices_share_the_prompt(subtests: pytest.Subtests) -> None:
    for window, length in product(WINDOWS, (7, 8, 16, 21)):
        with subtests.test(window=window, length=length):
            engine = fake_engine(window=window)
            prompt = list(range(length))
            request = ask("a", prompt, n=3, seed=5, temperature=1.0)
            together = tokens(run(engine, request))
            assert len({tuple(ids) for ids in together.values()}) > 1
            # Each choice is a function of (prompt, choice): resuming it alone gives the same
            # tokens.
            for choice in range(3):
                states = tuple(
                    ChoiceState() if c == choice else ChoiceState((1,), FinishReason.STOP)
                    for c in range(3)
                )
                alone = run(engine, ask("x", prompt, n=3, seed=5, temperature=1.0, choices=states))
                assert tokens(alone)["x", choice] == together["a", choice]
            assert_at_rest(engine)


def test_choices_take_no_more_blocks_than_they_write() -> None:
    engine = fake_engine(num_blocks=100, prefix_cache=False)
    engine.submit(ask("a", range(30), n=4, max_tokens=2, seed=3, temperature=1.0))
    for _ in range(2):
        engine.step()
    assert engine.stats().blocks.used == 8
    engine.step()  # the second token of each choice copies the partial last block: three copies
    assert engine.stats().blocks.total == 100
    run(engine)
    assert_at_rest(engine)


def test_a_request_resumed_at_any_token_gives_the_same_tokens(subtests: pytest.Subtests) -> None:
    for window, cut in product(WINDOWS, range(9)):
        with subtests.test(window=window, cut=cut):
            request = {"seed": 2, "temperature": 0.9}
            whole = tokens(run(fake_engine(window=window), ask("a", range(13), **request)))
            ids = whole["a", 0]
            engine = fake_engine(window=window)
            begun = (ChoiceState(tuple(ids[:cut])),)
            rest = run(engine, ask("a", range(13), choices=begun, **request))
            assert tokens(rest).get(("a", 0), []) == ids[cut:]
            assert of(rest, NewTokens)[-1].finish is FinishReason.LENGTH
            assert len(of(rest, Finished)) == 1
            assert_at_rest(engine)


def test_a_resume_of_several_choices(subtests: pytest.Subtests) -> None:
    for window, cuts in product(WINDOWS, ((0, 3, 5), (2, 2, 2), (7, 0, 0), (1, 8, 4))):
        with subtests.test(window=window, cuts=cuts):
            request = {"n": 3, "seed": 4, "temperature": 1.1}
            whole = tokens(run(fake_engine(window=window), ask("a", range(17), **request)))
            states = tuple(ChoiceState(tuple(whole["a", c][:cut])) for c, cut in enumerate(cuts))
            engine = fake_engine(window=window)
            rest = run(engine, ask("a", range(17), choices=states, **request))
            for c, cut in enumerate(cuts):
                assert tokens(rest).get(("a", c), []) == whole["a", c][cut:]
            # The prompt is computed once; all other computed tokens belong to single choices.
            assert engine.stats().prompt_tokens == 17
            assert_at_rest(engine)


def test_choices_are_preempted_together_and_continue() -> None:
    free = tokens(run(fake_engine(200), ask("a", range(9), n=2, seed=1, temperature=1.0)))
    engine = fake_engine(num_blocks=9, prefix_cache=False)
    old = ask("old", range(8), max_tokens=24)
    events = run(engine, old, ask("a", range(9), n=2, seed=1, temperature=1.0))
    assert engine.stats().preemptions > 0
    got = tokens(events)
    assert {at: ids for at, ids in got.items() if at[0] == "a"} == free
    assert_at_rest(engine)


def test_short_prompts_overtake_but_long_ones_finish() -> None:
    now = [0.0]
    engine = fake_engine(num_blocks=500, chunk_size=16, step_tokens=24, clock=lambda: now[0])
    engine.submit(ask("long", [i % 60 for i in range(160)], max_tokens=1))
    engine.submit(ask("short", range(8), max_tokens=1))
    first = engine.step()
    assert first is not None
    assert [e.key for e in of(first.events, Scheduled)] == ["short", "long"]
    # A steady stream of short prompts, each shorter than the remainder of the long one.
    for turn in range(200):
        now[0] += 0.1
        engine.submit(ask(f"s{turn}", [turn % 60] * 16, max_tokens=1))
        step = engine.step()
        assert step is not None
        if of(step.events, Finished, "long"):
            break
    else:
        raise AssertionError("the long prompt starved")
    assert turn > 5


def test_a_long_prompt_does_not_delay_a_short_one() -> None:
    """However long a prompt takes, a short one gets the next chunk."""
    now = [0.0]
    engine = fake_engine(num_blocks=500, chunk_size=16, step_tokens=24, clock=lambda: now[0])
    engine.submit(ask("long", [i % 60 for i in range(160)], max_tokens=1))
    for _ in range(8):  # two chunks remain after eight seconds
        assert engine.step() is not None
        now[0] += 1.0
    engine.submit(ask("short", range(20), max_tokens=1))
    now[0] += 0.5
    done = []
    while engine.has_work:
        step = engine.step()
        assert step is not None
        done += [e.key for e in of(step.events, Finished)]
        now[0] += 1.0
    assert done == ["short", "long"]


def test_waiting_time_counts_in_proportion_to_the_length() -> None:
    """Of two long prompts, the second has waited and is not overtaken indefinitely."""
    now = [0.0]
    engine = fake_engine(num_blocks=500, chunk_size=16, step_tokens=24, clock=lambda: now[0])
    for key, odd in (("first", 7), ("second", 11)):
        engine.submit(ask(key, [(odd * i) % 60 for i in range(160)], max_tokens=1))
    done: list[str] = []
    for turn in range(200):
        engine.submit(ask(f"s{turn}", [turn % 60] * 7 + [59], max_tokens=1))
        step = engine.step()
        assert step is not None
        done += [e.key for e in of(step.events, Finished)]
        now[0] += 0.1
        if "second" in done:
            break
    assert done.index("first") + 5 < done.index("second") < 60, "the long prompts ran side by side"
    assert any(key.startswith("s") for key in done[: done.index("first")])


def test_a_prefill_only_request_holds_its_blocks() -> None:
    engine = fake_engine(prefix_cache=False)
    events = run(engine, ask("p", range(21), prefill_only=True))
    assert [(e.num_tokens, e.done) for e in of(events, PrefillComputed)] == [
        (16, False),
        (21, True),
    ]
    assert engine.model.kv_only_steps == 2
    assert not of(events, NewTokens)
    assert not of(events, Finished)
    (blocks,) = engine.held_blocks("p")
    assert len(blocks) == 6
    assert engine.stats().held == 1
    keys = torch.from_numpy(engine.kv.data[0][0][blocks, 0, 0]).flatten(0, 1)
    assert torch.equal(keys[:21], words(torch.arange(21), torch.arange(21))[:, 0])
    engine.release_held("p")
    assert_at_rest(engine)
    with pytest.raises(KeyError):
        engine.release_held("p")
    with pytest.raises(KeyError):
        engine.held_blocks("p")


def test_a_cached_prefill_only_request_computes_nothing(subtests: pytest.Subtests) -> None:
    for window in WINDOWS:
        with subtests.test(window=window):
            engine = fake_engine(window=window)
            run(engine, ask("p", range(16), prefill_only=True))
            engine.release_held("p")
            steps = engine.model.steps
            events = run(engine, ask("q", range(16), prefill_only=True))
            assert engine.model.steps == steps
            assert events == [Scheduled("q", 16), PrefillComputed("q", 16, True)]
            for group, blocks in enumerate(engine.held_blocks("q")):
                first = max(0, 16 - window + 1) // 4 if engine.kv.spec.groups[group].window else 0
                assert all(blocks[first:])
                assert not any(blocks[:first])
            engine.release_held("q")
            assert_at_rest(engine)


def test_a_prefill_only_request_is_never_preempted() -> None:
    engine = fake_engine(num_blocks=14, chunk_size=2, prefix_cache=False, context_len=120)
    engine.submit(ask("old", range(4), max_tokens=50))
    while engine.stats().blocks.used < 9:
        engine.step()
    for _ in range(2):  # to the end of its block
        engine.step()
    engine.submit(ask("p", range(16), prefill_only=True))
    until(engine, Scheduled, "p")
    blocks = engine.held_blocks("p")
    while engine.stats().preemptions == 0:
        assert engine.step() is not None
    assert engine.stats().held == 0  # it was in progress when blocks ran out
    assert engine.held_blocks("p") == blocks
    while engine.step() is not None:
        pass
    assert engine.held_blocks("p") == blocks
    engine.release_held("p")
    assert len(of(run(engine), Finished, "old")) == 1
    assert_at_rest(engine)


def test_a_reused_slot_keeps_nothing_of_its_previous_sequence() -> None:
    engine = fake_engine(max_running=1)
    run(engine, ask("long", range(50)))
    engine.submit(ask("short", range(5)))
    engine.step()
    (blocks,) = engine.jobs.running[0].sequences[0].block_tables
    line = engine._runner._tables[0][0].tolist()
    assert line[: len(blocks)] == blocks
    assert not any(line[len(blocks) :])


def test_a_window_releases_its_blocks_during_prefill() -> None:
    engine = fake_engine(num_blocks=40, window=6, prefix_cache=False, context_len=160)
    engine.submit(ask("a", range(4), max_tokens=100))
    for _ in range(80):
        engine.step()
    full, window = (pool.counts().used for pool in engine.jobs.tables.pools)
    assert full >= 20
    assert window <= 3
    run(engine)
    assert_at_rest(engine)


def test_launch_and_collect_can_be_called_separately() -> None:
    engine = fake_engine()
    engine.submit(ask("a", range(5), max_tokens=1))
    plan = engine.schedule()
    assert plan is not None
    step = engine.collect(engine.launch(plan))
    assert (step.index, plan.num_tokens, len(plan.rows)) == (1, 5, 1)
    assert [type(e) for e in step.events] == [Scheduled, PrefillComputed, NewTokens, Finished]
    assert engine.schedule() is None
    assert engine.step() is None


def test_stats_and_prefix_events() -> None:
    engine = fake_engine(num_blocks=20)
    engine.submit(ask("a", range(30)))
    engine.submit(ask("b", range(3)))
    assert engine.stats().waiting == 2
    assert engine.stats().waiting_tokens == 33
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.step) == (2, 0, 1)
    assert stats.waiting_tokens == 14
    assert stats.blocks.used == 9
    run(engine)
    stats = engine.stats()
    assert stats.prompt_tokens == 33
    assert stats.generation_tokens == 16
    assert stats.prefill_tokens_s > 0
    added, removed = engine.take_prefix_events()
    assert len(added) == stats.blocks.cached
    assert removed == []
    run(engine, ask("c", range(40, 60), max_tokens=50))  # evicts the cached blocks
    added_later, removed = engine.take_prefix_events()
    assert added_later
    assert set(removed) <= set(added)
    assert removed


def test_prompt_scores_are_sent_once_despite_preemption() -> None:
    request = ask("a", range(40), prompt_logprobs=0, max_tokens=2)
    (whole,) = of(run(fake_engine(chunk_size=8), request), PromptScored)
    engine = fake_engine(chunk_size=8)
    engine.submit(request)
    engine.step()
    engine.step()
    engine.jobs.preempt(engine.jobs.by_key["a"])
    (scored,) = of(run(engine), PromptScored)
    assert len(scored.logprobs) == 39
    assert scored == whole
