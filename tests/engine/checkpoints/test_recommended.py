"""Recommended sampling for models whose files contain none."""

import json

import pytest

from pdserve.engine.api import EngineConfig
from pdserve.engine.checkpoints import with_recommended
from pdserve.engine.checkpoints.card import RECOMMENDED, SAMPLING
from pdserve.engine.load import load_model
from pdserve.text.generation_config import GenerationDefaults


def test_a_model_name_selects_its_row(subtests: pytest.Subtests) -> None:
    for name, wanted in (
        ("SmolLM2-135M-Instruct", {"temperature": 0.2, "top_p": 0.9, "max_tokens": 512}),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", {"temperature": 0.2, "top_p": 0.9}),
        ("SmolLM2-135M", {}),
        ("smollm2-360m-instruct-q8_0", {"temperature": 0.2, "top_p": 0.9}),
        ("Tiny-Llama", {}),
    ):
        with subtests.test(name):
            assert with_recommended({"eos_token_id": 2}, name) == {"eos_token_id": 2, **wanted}


def test_the_files_of_a_model_take_precedence() -> None:
    own = {"temperature": 0.7, "top_p": None}
    assert with_recommended(own, "SmolLM2-135M-Instruct") == own


def test_every_row_is_valid_sampling_for_a_client() -> None:
    for _, sampling in RECOMMENDED:
        assert set(sampling) <= {*SAMPLING, "max_tokens"}
        found = GenerationDefaults.from_json(json.dumps(sampling))
        assert {name: getattr(found, name) for name in sampling} == sampling


def test_the_shipped_model_has_the_sampling_of_its_model_card_and_bounded_answers() -> None:
    card = load_model(EngineConfig(), lambda doing, fraction: None).card
    assert card.generation_config["temperature"] == 0.2
    assert card.generation_config["top_p"] == 0.9
    assert card.generation_config["max_tokens"] == 512
