"""Grammars on both backends: generated text matches, and does not depend on how a request runs."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, tokens
from builders.grammar_kit import Maker, Runner, of_regex
from llguidance import LLMatcher
from tokenizers import Tokenizer

from pdserve.engine.api import (
    ChoiceState,
    Finished,
    FinishReason,
    Grammar,
    InvalidRequest,
    NewTokens,
    RequestFailed,
    ThinkingBudget,
)

PATTERN = "[a-f]{2}(-[0-9]{3,5}){6,9}!"
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9999},
        "seen": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["kind", "legs", "seen"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
EOS_ID = 258
LETTERS = {chr(c): c - 33 for c in range(33, 127)}  # ids in the tiny vocabulary


REGEX = of_regex(PATTERN)
JSON = Grammar(LLMatcher.grammar_from_json_schema(SCHEMA))
ANYTHING = of_regex("(.|\n)*")
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 120}


@pytest.fixture(scope="module")
def text_of(folder: Path) -> Any:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(256) for _ in range(1 + 5 * i)] for i in range(count)]


def make_requests(count: int, grammar: Grammar | None = REGEX, **options: Any) -> list[Any]:
    return [
        ask(f"r{i}", prompt, i, grammar=grammar, **(SAMPLED | options))
        for i, prompt in enumerate(prompts(count))
    ]


def ends(events: Any) -> set[FinishReason | None]:
    return {e.finish for e in of(events, NewTokens) if e.finish is not None}


@pytest.fixture(scope="module")
def alone(engine_of: Maker) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of sixteen requests with the pattern, each run alone."""
    by_itself = Runner(engine_of(prefix_cache=False))
    found = {k: v for one in make_requests(16) for k, v in tokens(by_itself.run(one)).items()}
    assert max(by_itself.widths) == 1
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pattern_is_matched_and_ends_the_choice(
    runner: Runner, text_of: Any, temperature: float
) -> None:
    events = runner.run(*make_requests(8, temperature=temperature, ignore_eos=True))
    assert ends(events) == {FinishReason.STOP}
    for ids in tokens(events).values():
        assert re.fullmatch(PATTERN, text_of(ids))
        assert EOS_ID not in ids


def test_a_schema_is_matched(runner: Runner, text_of: Any) -> None:
    events = runner.run(*make_requests(8, JSON))
    assert ends(events) == {FinishReason.STOP}
    answers = [json.loads(text_of(ids)) for ids in tokens(events).values()]
    for answer in answers:
        jsonschema.validate(answer, SCHEMA)
    assert len({json.dumps(answer) for answer in answers}) > 3


def test_a_truncated_answer_is_the_beginning_of_a_match(runner: Runner, text_of: Any) -> None:
    events = runner.run(*make_requests(4, max_tokens=9))
    assert ends(events) == {FinishReason.LENGTH}
    assert all(re.match("[a-f]{2}-[0-9]{3}", text_of(ids)) for ids in tokens(events).values())


def test_eos_appears_only_where_the_grammar_may_end(runner: Runner, text_of: Any) -> None:
    bias = {EOS_ID: 50.0}
    events = runner.run(*make_requests(4, of_regex("[a-c]{2,9}"), logit_bias=bias))
    assert ends(events) == {FinishReason.STOP}
    for ids in tokens(events).values():
        assert ids[-1] == EOS_ID
        assert re.fullmatch("[a-c]{2}", text_of(ids))


def test_a_grammar_of_all_texts_changes_no_token(runner: Runner) -> None:
    """Allows the ids of visible ASCII, since other bytes alone are not valid text, and eos."""
    rest = {"max_tokens": 40, "allowed_token_ids": tuple(range(94))}
    free = tokens(runner.run(*make_requests(6, None, **rest)))
    bound = tokens(runner.run(*make_requests(6, ANYTHING, **rest)))
    assert free == bound
    assert sum(map(len, free.values())) > 100


def test_several_choices_share_a_grammar_and_differ(runner: Runner, text_of: Any) -> None:
    events = runner.run(ask("n", range(20), 5, n=4, grammar=REGEX, **SAMPLED))
    found = [text_of(ids) for ids in tokens(events).values()]
    assert len(set(found)) == 4
    assert all(re.fullmatch(PATTERN, text) for text in found)


def test_a_full_batch_gives_the_same_tokens_as_each_request_alone(
    engine_of: Maker, alone: Any
) -> None:
    together = Runner(engine_of())
    events = together.run(*make_requests(16))
    assert max(together.widths) == 16
    assert tokens(events) == alone
    assert_at_rest(together.engine)


def test_requests_with_and_without_grammars_do_not_affect_each_other(
    engine_of: Maker, alone: Any
) -> None:
    mixed = Runner(engine_of())
    free = [ask(f"free{i}", p, 9, **SAMPLED) for i, p in enumerate(prompts(4))]
    calm = {k: v for one in free for k, v in tokens(Runner(engine_of()).run(one)).items()}
    mixed.run(ask("first", [1], grammar=REGEX, **SAMPLED))  # so that the grammar is compiled
    found = tokens(mixed.run(*make_requests(6), *free))
    assert max(mixed.widths) >= 8
    assert found == calm | {k: v for k, v in alone.items() if int(k[0][1:]) < 6}


def test_preempted_requests_give_the_same_tokens(engine_of: Maker, alone: Any) -> None:
    small = Runner(engine_of(kv_tokens=256, prefix_cache=False))
    assert tokens(small.run(*make_requests(16))) == alone
    assert small.engine.stats().preemptions > 0


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_continue_elsewhere_give_the_same_tokens(
    runner: Runner, alone: Any, seed: int
) -> None:
    rng = random.Random(seed)
    resumed, cuts = [], {}
    for one in make_requests(8):
        whole = alone[one.key, 0]
        cuts[one.key] = cut = rng.randrange(1, len(whole))
        state = (ChoiceState(tuple(whole[:cut])),)
        resumed.append(
            ask(one.key, one.prompt_ids, one.seed, grammar=REGEX, choices=state, **SAMPLED)
        )
    found = tokens(runner.run(*resumed))
    assert found == {(key, 0): alone[key, 0][cut:] for key, cut in cuts.items()}


def test_a_resumed_complete_choice_ends_without_a_token(runner: Runner, alone: Any) -> None:
    whole = tuple(alone["r3", 0])
    for states in ((ChoiceState(whole),), (ChoiceState(whole), ChoiceState(()))):
        one = ask("r", prompts(4)[3], 3, n=len(states), grammar=REGEX, choices=states, **SAMPLED)
        events = runner.run(one)
        assert events.count(NewTokens("r", 0, len(whole), (), (), FinishReason.STOP)) == 1
        assert len(of(events, Finished)) == 1
        assert [c for (_, c), ids in tokens(events).items() if ids] == list(range(1, len(states)))


@pytest.mark.parametrize("more", [0, 1])
def test_a_resumed_choice_with_its_last_token_has_finish_reason_stop(
    runner: Runner, alone: Any, more: int
) -> None:
    """The reason equals that of an uninterrupted run: the grammar's end counts, and max_tokens does
    not."""
    whole = tuple(alone["r3", 0])
    one = ask("r", prompts(4)[3], 3, grammar=REGEX, **SAMPLED | {"max_tokens": len(whole) + more})
    calm = of(runner.run(one), NewTokens)
    assert calm[-1].finish is FinishReason.STOP
    events = runner.run(replace(one, choices=(ChoiceState(whole),)))
    assert of(events, NewTokens) == [
        NewTokens("r", 0, len(whole), (), (), FinishReason.STOP),
    ]
    assert len(of(events, Finished)) == 1
    assert_at_rest(runner.engine)


def test_a_resumed_choice_without_the_end_of_its_grammar_has_finish_reason_length(
    runner: Runner, alone: Any
) -> None:
    whole = tuple(alone["r3", 0][:9])
    params: dict[str, Any] = SAMPLED | {"max_tokens": 9, "n": 2}
    states = (ChoiceState(whole), ChoiceState(()))
    one = ask("r", prompts(4)[3], 3, grammar=REGEX, choices=states, **params)
    events = runner.run(one)
    assert NewTokens("r", 0, 9, (), (), FinishReason.LENGTH) in events
    assert ends(events) == {FinishReason.LENGTH}
    assert len(tokens(events)["r", 1]) == 9
    assert_at_rest(runner.engine)


def test_generated_ids_that_do_not_match_fail_the_request(runner: Runner) -> None:
    state = (ChoiceState((5, 6, 7)),)
    (failed,) = of(runner.run(ask("r", [1], grammar=REGEX, choices=state)), RequestFailed)
    assert failed.param == "grammar"
    assert "satisfy" in failed.message
    assert_at_rest(runner.engine)


def test_a_grammar_begins_after_its_sequence(runner: Runner, text_of: Any) -> None:
    """The budget ends the thinking, and the text after it matches."""
    end = (97, 40, 41)
    budget = ThinkingBudget(7, end)
    grammar = of_regex("[xyz]{4}", end)
    params: dict[str, Any] = SAMPLED | {"logit_bias": {EOS_ID: -100.0}}
    events = runner.run(
        *(ask(f"{i}", [i], i, grammar=grammar, thinking=budget, **params) for i in range(6))
    )
    assert ends(events) == {FinishReason.STOP}
    for ids in tokens(events).values():
        assert ids[7:10] == list(end)
        assert re.fullmatch("[xyz]{4}", text_of(ids[10:]))
    whole = tokens(events)["2", 0]
    for cut in (3, 7, 8, 9, 10, 12):
        states = (ChoiceState(tuple(whole[:cut])),)
        one = ask("r", [2], 2, grammar=grammar, thinking=budget, choices=states, **params)
        assert tokens(runner.run(one)) == {("r", 0): whole[cut:]}


def test_all_kinds_together(runner: Runner, text_of: Any) -> None:
    a, b = (LETTERS[c] for c in "ab")
    events = runner.run(
        *make_requests(
            6,
            of_regex("[abc]{30}"),
            allowed_token_ids=tuple(t for t in range(256) if t != LETTERS["c"]),
            bad_words=((a, a), (b, b, b)),
        )
    )
    assert ends(events) == {FinishReason.STOP}
    for ids in tokens(events).values():
        assert re.fullmatch("[ab]{30}", text := text_of(ids))
        assert "aa" not in text
        assert "bbb" not in text


CONTRADICTIONS = (
    ("grammar", {"grammar": of_regex("a+b"), "bad_words": ((LETTERS["a"],),)}),
    ("grammar", {"grammar": of_regex("a+b"), "thinking": ThinkingBudget(1, (9,))}),
    ("allowed_token_ids", {"allowed_token_ids": (7,), "bad_words": ((7,), (EOS_ID,))}),
    ("bad_words", {"thinking": ThinkingBudget(0, (5,)), "bad_words": ((5,),)}),
    ("allowed_token_ids", {"allowed_token_ids": (EOS_ID,), "min_tokens": 1}),
)


def test_contradictory_constraints_fail_only_their_request(
    subtests: pytest.Subtests, runner: Runner
) -> None:
    for row, (param, params) in enumerate(CONTRADICTIONS):
        with subtests.test(param, row=row):
            events = runner.run(ask("bad", range(9), **params), ask("good", range(9), max_tokens=5))
            (failed,) = of(events, RequestFailed)
            assert (failed.key, failed.param) == ("bad", param)
            assert "allow no further token" in failed.message
            assert len(tokens(events)["good", 0]) == 5
            assert_at_rest(runner.engine)


def test_a_choice_without_an_allowed_token_ends_without_failing_the_others(runner: Runner) -> None:
    a, b, c, d = (LETTERS[letter] for letter in "abcd")
    bias = dict.fromkeys((a, c), 50.0)
    params: dict[str, Any] = {
        "grammar": of_regex("ab|cd"), "bad_words": ((a, b),), "logit_bias": bias
    }  # fmt: skip
    events = runner.run(ask("r", range(9), n=8, temperature=1.5, max_tokens=9, **params))
    assert not of(events, RequestFailed)
    given = {choice: tuple(ids) for (_, choice), ids in tokens(events).items()}
    assert set(given.values()) == {(a,), (c, d)}
    for event in of(events, NewTokens):
        if event.finish is not None:
            stuck = given[event.choice] == (a,)
            assert event.finish is (FinishReason.LENGTH if stuck else FinishReason.STOP)
    assert len(of(events, Finished)) == 1
    assert_at_rest(runner.engine)
    # A single choice then has no answer, so the request fails.
    params["allowed_token_ids"] = (a, b)
    for n in (1, 3):
        failed = runner.run(ask("one", range(9), n=n, max_tokens=9, **params))
        assert bool(of(failed, RequestFailed)) is (n == 1)


def test_named_log_probabilities_follow_the_best(runner: Runner) -> None:
    params: dict[str, Any] = {"logprobs": 2, "logprob_token_ids": (7, 3), "grammar": REGEX}
    (free,) = of(runner.run(ask("f", [1, 2], logprobs=5, max_tokens=1)), NewTokens)
    event = of(runner.run(ask("a", [1, 2], max_tokens=30, **params)), NewTokens)[0]
    (scores,) = event.logprobs
    assert [token for token, _ in scores.top[2:]] == [7, 3]
    # Scores come from the model's distribution before the grammar is applied.
    best = free.logprobs[0].top[:2]
    assert [token for token, _ in scores.top[:2]] == [token for token, _ in best]
    assert scores.top[0][1] == pytest.approx(best[0][1])


def test_a_prefill_only_request_ignores_grammars(runner: Runner) -> None:
    wrong = Grammar("no grammar")
    runner.engine.submit(ask("p", range(40), grammar=wrong, prefill_only=True))
    while runner.engine.has_work:
        runner.step()
    assert runner.engine.held_blocks("p")
    runner.engine.release_held("p")


def test_without_a_tokenizer_grammars_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        fake_engine().submit(ask("r", [1], grammar=REGEX))
