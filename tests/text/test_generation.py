"""Defaults from generation_config.json."""

import json
import logging

import pytest

from pdserve.text import UnsupportedTokenizer
from pdserve.text.generation_config import GenerationDefaults


def test_known_values_are_used_and_others_ignored() -> None:
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 1,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_new_tokens": 7,
        "do_sample": False,
        "eos_token_id": [1, 2],
    }
    got = GenerationDefaults.from_json(json.dumps(config))
    assert got == GenerationDefaults(0.6, 20, 1.0, 0.05, 1.05)


@pytest.mark.parametrize("text", [b"", b" \n", b"{}", b'{"temperature": null}'])
def test_absent_values_are_none(text: bytes) -> None:
    assert GenerationDefaults.from_json(text) == GenerationDefaults()


def test_top_k_of_minus_one_means_all() -> None:
    assert GenerationDefaults.from_json('{"top_k": -1}').top_k == 0


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-1", "true", '"0.5"', "[1]", "1e400", "9" * 400]
)
def test_invalid_values_are_dropped(value: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        got = GenerationDefaults.from_json(f'{{"temperature": {value}, "top_p": 0.9}}')
    assert got == GenerationDefaults(top_p=0.9)
    assert "temperature" in caplog.text


@pytest.mark.parametrize("text", ["[", "[]", "3", "[" * 100_000])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match="generation_config"):
        GenerationDefaults.from_json(text)
