"""The engine validates parameters before processing them and names the invalid field."""

from typing import Any

import pytest

from pdserve.engine.api import (
    MAX_ENTRIES,
    MAX_GRAMMAR_BYTES,
    MAX_SEQUENCE_IDS,
    Grammar,
    InvalidRequest,
    Request,
    SamplingParams,
    ThinkingBudget,
)
from pdserve.engine.scheduling import EngineLimits

LIMITS = EngineLimits(
    vocab_size=64,
    context_len=1 << 20,
    block_size=16,
    num_blocks=1 << 17,
    max_running=200,
    chunk_size=16,
    eos_ids=frozenset({9}),
)  # fmt: skip
LONG = (1,) * (MAX_SEQUENCE_IDS + 1)


def check(**params: Any) -> None:
    LIMITS.check(Request("r", (1, 2), SamplingParams(**params), 0))


REFUSED = (
    ("allowed_token_ids", {"allowed_token_ids": (64,)}),
    ("allowed_token_ids", {"allowed_token_ids": (1,) * (MAX_ENTRIES["allowed_token_ids"] + 1)}),
    ("bad_words", {"bad_words": ((1, -1),)}),
    ("bad_words", {"bad_words": ((),)}),
    ("bad_words", {"bad_words": (LONG,)}),
    ("bad_words", {"bad_words": ((1,),) * (MAX_ENTRIES["bad_words"] + 1)}),
    ("logprob_token_ids", {"logprob_token_ids": (64,), "logprobs": 0}),
    ("logprob_token_ids", {"logprob_token_ids": (1,)}),
    (
        "logprob_token_ids",
        {"logprob_token_ids": (1,) * (MAX_ENTRIES["logprob_token_ids"] + 1), "logprobs": 1},
    ),
    ("thinking", {"thinking": ThinkingBudget(3, ())}),
    ("thinking", {"thinking": ThinkingBudget(-1, (1,))}),
    ("thinking", {"thinking": ThinkingBudget(3, (64,))}),
    ("thinking", {"thinking": ThinkingBudget(3, (1,), (64,))}),
    ("thinking", {"thinking": ThinkingBudget(3, LONG)}),
    (
        "allowed_token_ids",
        {"thinking": ThinkingBudget(3, (1, 2)), "allowed_token_ids": (1, 3)},
    ),
    ("grammar", {"grammar": Grammar("")}),
    ("grammar", {"grammar": Grammar("x" * (MAX_GRAMMAR_BYTES + 1))}),
    ("grammar", {"grammar": Grammar("é" * (MAX_GRAMMAR_BYTES // 2 + 1))}),
    ("grammar", {"grammar": Grammar("{}", (64,))}),
    ("min_tokens", {"grammar": Grammar("{}"), "min_tokens": 1}),
)


def test_an_invalid_field_is_refused(subtests: pytest.Subtests) -> None:
    for row, (param, params) in enumerate(REFUSED):
        with subtests.test(param, row=row):
            with pytest.raises(InvalidRequest) as refused:
                check(**params)
            assert refused.value.param == param


def test_values_at_the_bounds_are_accepted() -> None:
    check(
        allowed_token_ids=(63,) * MAX_ENTRIES["allowed_token_ids"],
        bad_words=(LONG[1:],) * MAX_ENTRIES["bad_words"],
        logprob_token_ids=(63,) * MAX_ENTRIES["logprob_token_ids"],
        logprobs=0,
        thinking=ThinkingBudget(0, (63, 9)),
        grammar=Grammar("x" * MAX_GRAMMAR_BYTES, LONG[1:]),
    )
