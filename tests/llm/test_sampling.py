"""Sampling parameters are validated when they are constructed."""

from dataclasses import replace

import pytest

from pdserve import InvalidRequest, SamplingParams, StructuredOutputsParams

WRONG = [
    ("temperature", -1, "must be from 0 to 2, not -1"),
    ("temperature", "hot", "must be a number, not 'hot'"),
    ("temperature", float("nan"), "must be from 0 to 2, not nan"),
    ("temperature", True, "must be a number, not True"),
    ("top_p", -0.1, "must be from 0 to 1, not -0.1"),
    ("top_k", -2, "must be from -1 to"),
    ("penalty_window", -1, "must be from 0 to"),
    ("penalty_window", 2**31, "must be from 0 to"),
    ("n", 0, "must be from 1 to 128, not 0"),
    ("n", None, "must be a whole number, not None"),
    ("n", 1.5, "must be a whole number, not 1.5"),
    ("max_tokens", 0, "must be at least 1, not 0"),
    ("min_tokens", -1, "must be at least 0, not -1"),
    ("logprobs", 21, "must be from 0 to 20, not 21"),
    ("seed", 2**64, "must be from"),
    ("thinking_token_budget", -1, "must be from 0"),
    ("stop", [1], "must be a string or a list of strings"),
    ("logprob_token_ids", [1], "requires logprobs"),
    ("bad_words", 5, "must be a string or a list of strings, not 5"),
    ("stop_token_ids", "ab", "must be a list of token ids"),
    ("allowed_token_ids", [1, 2.5], "contains 2.5, which is not a token id"),
    ("logit_bias", [1], "must be a dict by token id"),
    ("logit_bias", {"a": 1.0}, "contains 'a', which is not a token id"),
    ("logit_bias", {1: "a"}, "contains 'a', which is not a number"),
    ("structured_outputs", {"regex": "a"}, "must be StructuredOutputsParams, not dict"),
]


def test_an_invalid_value_is_named(subtests: pytest.Subtests) -> None:
    for name, value, why in WRONG:
        with subtests.test(name=name, value=value):
            with pytest.raises(InvalidRequest) as refused:
                SamplingParams(**{name: value})
            assert str(refused.value).startswith(f"{name} {why}")
            assert refused.value.param == name


def test_texts_are_bounded(subtests: pytest.Subtests) -> None:
    for name, limit in (("stop", 16), ("bad_words", 128)):
        texts = {
            "must have 1 to 256 characters": (["a", "a" * 257],),
            f"^{name}: at most {limit} entries, not {limit + 1}$": (["a"] * (limit + 1),),
        }
        for why, values in texts.items():
            for value in values:
                with subtests.test(name=name, why=why):
                    with pytest.raises(InvalidRequest, match=why) as refused:
                        SamplingParams(**{name: value})
                    assert refused.value.param == name


def test_an_empty_stop_string_is_dropped_and_an_empty_bad_word_is_refused() -> None:
    assert SamplingParams(stop=["", "a"]).requested().stop == ("a",)
    assert SamplingParams(stop="").requested().stop == ()
    with pytest.raises(InvalidRequest, match="must have 1 to 256 characters"):
        SamplingParams(bad_words=[""])


def test_a_structure_is_parsed_once() -> None:
    form = StructuredOutputsParams(json='{"enum": [1]}')
    first, again = (SamplingParams(structured_outputs=form).requested() for _ in range(2))
    assert first.structure is again.structure is form.structure()
    assert form == StructuredOutputsParams(json='{"enum": [1]}')
    assert "_structure" not in repr(form)
    assert replace(form, json='{"enum": [2]}').structure().value == {"enum": [2]}


def test_an_unknown_name_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_a_structural_tag_is_accepted_with_its_schema_as_text_or_dict() -> None:
    for schema in ({"enum": [1]}, '{"enum": [1]}'):
        tags = {"begin": "<n>", "schema": schema, "end": "</n>"}
        request = StructuredOutputsParams(structural_tag={"structures": (tags,), "triggers": "<n"})
        assert request.structure().value == {
            "structures": [{"begin": "<n>", "schema": {"enum": [1]}, "end": "</n>"}],
            "triggers": ["<n"],
        }


def test_valid_values_are_accepted() -> None:
    SamplingParams(top_k=-1, seed=-5, stop="a", logit_bias={3: -1}, max_tokens=1, temperature=2)
    SamplingParams(seed=2**63 - 1, temperature=None, top_p=0, logprobs=0, logprob_token_ids=[1])
