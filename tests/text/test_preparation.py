"""The engine's parameters for what clients request, and the choices made of the engine's tokens."""

from dataclasses import dataclass
from typing import Any

import pytest
from builders.byte_tokenizer import VOCAB_SIZE, write_tokenizer

from pdserve.engine.api import TokenLogprob
from pdserve.text import (
    Choice,
    Constraints,
    ContextExceeded,
    ParserChoice,
    Preparation,
    RequestedSampling,
    TextCompletionRequest,
    TextError,
    text_of,
)
from pdserve.text.generation_config import GenerationDefaults
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import Tokenizer

A, B, EOS = 64, 65, 258
CONTEXT_LEN = 100
PLAIN = GenerationDefaults()
RECOMMENDED = GenerationDefaults(temperature=0.25, top_k=7, top_p=0.0)
SHORT = GenerationDefaults(max_tokens=30)


@dataclass(frozen=True)
class Limits:
    context_len: int = CONTEXT_LEN
    vocab_size: int = VOCAB_SIZE
    pooling: str = ""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    model_info = TextModelInfo(VOCAB_SIZE, (EOS,))
    return Tokenizer((folder / "tokenizer.json").read_bytes(), model_info)


def preparation(
    vocabulary: Tokenizer, defaults: GenerationDefaults = PLAIN, *, strict: bool = False
) -> Preparation:
    return Preparation(Limits(), vocabulary, defaults, ParserChoice(), "", "", strict)


def request(**sampling: Any) -> TextCompletionRequest:
    return TextCompletionRequest("", (), RequestedSampling(**sampling))


# the client's sampling, the model's defaults, the length of the prompt, parameters of the engine
PARAMS: list[tuple[dict[str, Any], GenerationDefaults, int, dict[str, Any]]] = [
    ({}, PLAIN, 2, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "n": 1}),
    ({}, PLAIN, 2, {"repetition_penalty": 1.0, "max_tokens": None, "logprobs": None}),
    ({}, RECOMMENDED, 2, {"temperature": 0.25, "top_k": 1, "top_p": 1.0, "min_p": 0.0}),
    ({"top_p": 0.5}, RECOMMENDED, 2, {"temperature": 0.25, "top_k": 7, "top_p": 0.5}),
    ({"temperature": 0.0, "top_p": 1.0}, RECOMMENDED, 2, {"temperature": 0.0, "top_k": 7}),
    ({"top_p": 0.0, "top_k": 9}, PLAIN, 2, {"top_p": 1.0, "top_k": 1}),
    ({"top_k": -1}, RECOMMENDED, 2, {"top_k": 1}),  # top_p is 0
    ({"top_k": -1}, PLAIN, 2, {"top_k": 0}),
    ({"top_k": 5}, PLAIN, 2, {"top_k": 5}),
    ({"top_k": 10**6}, PLAIN, 2, {"top_k": VOCAB_SIZE}),
    ({"max_tokens": 98}, PLAIN, 2, {"max_tokens": 98}),
    ({"max_tokens": 99}, PLAIN, 2, {"max_tokens": None}),
    ({}, SHORT, 2, {"max_tokens": 30}),
    ({}, SHORT, 71, {"max_tokens": None}),
    ({"min_tokens": 40}, SHORT, 2, {"max_tokens": 40}),
    ({"max_tokens": 60}, SHORT, 2, {"max_tokens": 60}),
    ({"n": 2, "best_of": 3}, PLAIN, 2, {"n": 3, "logprobs": 0}),
    ({"n": 2, "best_of": 3, "logprobs": 4}, PLAIN, 2, {"n": 3, "logprobs": 4}),
    ({"n": 3, "best_of": 3}, PLAIN, 2, {"n": 3, "logprobs": None}),
    ({"prompt_logprobs": 1}, PLAIN, 2, {"prompt_logprobs": 1}),
    ({"prompt_logprobs": 1}, PLAIN, 1, {"prompt_logprobs": None}),
    ({"penalty_window": 9}, PLAIN, 2, {"penalty_window": 0}),
    ({"penalty_window": 9, "presence_penalty": 1.0}, PLAIN, 2, {"penalty_window": 9}),
    ({"penalty_window": 999, "frequency_penalty": 1.0}, PLAIN, 2, {"penalty_window": CONTEXT_LEN}),
    ({"penalty_window": 9, "repetition_penalty": 1.5}, PLAIN, 2, {"penalty_window": 9}),
    ({"stop_token_ids": [5, 6]}, PLAIN, 2, {"stop_token_ids": (5, 6)}),
]


def test_parameters_of_the_engine(vocabulary: Tokenizer, subtests: pytest.Subtests) -> None:
    for sampling, defaults, prompt_len, expected in PARAMS:
        with subtests.test(sampling=sampling, defaults=defaults, prompt_len=prompt_len):
            sent, steps = request(**sampling), preparation(vocabulary, defaults)
            params = steps.params(sent, sent.sampling, Constraints(), [A] * prompt_len)
            assert {name: getattr(params, name) for name in expected} == expected


# the client's sampling, strict, the length of the prompt, the field at fault (None: accepted)
CHECKED: list[tuple[dict[str, Any], bool, int, str | None]] = [
    ({}, False, 99, None),
    ({}, False, 0, "prompt"),
    ({}, False, 100, "prompt"),
    ({"max_tokens": 98}, True, 2, None),
    ({"max_tokens": 99}, False, 2, None),
    ({"max_tokens": 99}, True, 2, "max_tokens"),
    ({"max_tokens": 99, "max_tokens_field": "max_new"}, True, 2, "max_new"),
    ({"min_tokens": 98}, False, 2, None),
    ({"min_tokens": 99}, False, 2, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, False, 2, "min_tokens"),
    ({"min_tokens": 99, "max_tokens": 100}, False, 2, "min_tokens"),
]


def test_a_prompt_leaves_room_for_its_answer(
    vocabulary: Tokenizer, subtests: pytest.Subtests
) -> None:
    for sampling, strict, prompt_len, param in CHECKED:
        with subtests.test(sampling=sampling, strict=strict, prompt_len=prompt_len):
            steps, ids = preparation(vocabulary, strict=strict), [A] * prompt_len
            if param is None:
                steps.check_prompt(request(**sampling), ids)
                continue
            with pytest.raises(TextError) as refused:
                steps.check_prompt(request(**sampling), ids)
            assert refused.value.param == param
            is_about_context = param != "min_tokens" and prompt_len > 0
            assert isinstance(refused.value, ContextExceeded) == is_about_context


def test_token_ids_are_in_the_vocabulary(vocabulary: Tokenizer, subtests: pytest.Subtests) -> None:
    steps = preparation(vocabulary)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
        with subtests.test(name):

            def sampling(token: int, name: str = name) -> RequestedSampling:
                value: Any = {token: 1.0} if name == "logit_bias" else [token]
                return RequestedSampling(**{name: value})

            steps.check_model_bounds(sampling(VOCAB_SIZE - 1))
            for token in (-1, VOCAB_SIZE):
                with pytest.raises(TextError, match=f"from 0 to {VOCAB_SIZE - 1}, not") as refused:
                    steps.check_model_bounds(sampling(token))
                assert refused.value.param == name


# the client's sampling, ids, the engine's finish; text, finish and stop_reason of the choice
ENDS: list[tuple[dict[str, Any], list[int], str | None, str, str | None, str | int | None]] = [
    ({}, [A, EOS], "stop", "a", "stop", None),
    ({}, [A, B], "length", "ab", "length", None),
    ({}, [A, B], None, "ab", None, None),
    ({"stop_token_ids": [B]}, [A, B], "stop", "a", "stop", B),
    ({"stop_token_ids": [B], "include_stop": True}, [A, B], "stop", "ab", "stop", B),
    ({"stop_token_ids": [B]}, [A, B], "length", "ab", "length", None),
    ({"stop_token_ids": [EOS]}, [A, EOS], "stop", "a", "stop", None),
    ({"stop_token_ids": [EOS], "ignore_eos": True}, [A, EOS], "stop", "a", "stop", EOS),
    ({"stop": ["b"]}, [A, B, A], None, "a", "stop", "b"),
    ({"stop": ["b"], "include_stop": True}, [A, B, A], None, "ab", "stop", "b"),
]


def test_ends_of_a_choice(vocabulary: Tokenizer, subtests: pytest.Subtests) -> None:
    for sampling, ids, engine_finish, text, finish, stop_reason in ENDS:
        with subtests.test(sampling=sampling, ids=ids, finish=engine_finish):
            choice = Choice(0, vocabulary, RequestedSampling(**sampling), continues=True)
            delta = choice.push(ids, engine_finish)
            assert (text_of(delta.content), delta.finish) == (text, finish)
            assert delta.stop_reason == stop_reason
            assert choice.closed == (finish is not None)
            assert choice.num_tokens == len(delta.ids)


def test_candidates_of_best_of_are_ranked_without_showing_scores(vocabulary: Tokenizer) -> None:
    scores = [TokenLogprob(-0.5, ((A, -0.5),)), TokenLogprob(-2.0, ((A, -0.25),))]
    ranked = Choice(0, vocabulary, RequestedSampling(best_of=2), continues=True)
    assert ranked.push([A, B], None, scores).tokens == ()
    assert ranked.total_logprob == -2.5
    shown = Choice(0, vocabulary, RequestedSampling(logprobs=1), continues=True)
    first, second = shown.push([A, B], None, scores).tokens
    assert (first.chosen.text, first.chosen.raw, first.chosen.logprob) == ("a", b"a", -0.5)
    assert [(entry.id, entry.logprob) for entry in second.top] == [(A, -0.25)]
    assert (first.offset, second.offset) == (0, 1)
