"""Random texts under the grammar of a random schema match the schema."""

import json
import random
from collections import Counter
from typing import Any

import jsonschema
import pytest
from builders.random_schemas import random_schema
from oracles.grammar_walks import Walk, compiler

from pdserve.text import Structure

NUM_SCHEMAS = 40
WALKS = 2  # per schema


def keywords(value: Any) -> Counter[str]:
    if isinstance(value, dict):
        return sum(map(keywords, value.values()), Counter(map(str, value)))
    if isinstance(value, list):
        return sum(map(keywords, value), Counter())
    return Counter()


@pytest.mark.parametrize("finite", [False, True])
def test_answers_match_their_schema(finite: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SCHEMAS):
        schema = random_schema(seed, finite)
        seen += keywords(schema)
        source = compiler().compile(Structure("json_schema", schema, "response_format"))
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.FormatChecker()
        )
        for walk in range(WALKS):
            text = Walk(source).finish(random.Random(seed * 100 + walk))
            try:
                validator.validate(json.loads(text))
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(f"seed {seed}, walk {walk}: {text!r}\n{schema}") from error
    for keyword in ("properties", "anyOf", "enum", "const", "$ref", "pattern", "format", "items",
                    "minLength", "minimum", "maximum", "additionalProperties"):  # fmt: skip
        assert seen[keyword], keyword
