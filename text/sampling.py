"""Checks clients' sampling parameters against engine/api/sampling_bounds.py, and draws seeds."""

import secrets
from collections.abc import Sequence
from typing import Protocol

from pdserve.engine.api import (
    BOUNDS,
    MAX_BAD_WORD_CHARS,
    MAX_ENTRIES,
    MAX_STOP_CHARS,
    THINKING_BUDGET,
    Range,
    context_exceeded,
)
from pdserve.text.errors import ContextExceeded, TextError
from pdserve.text.request import RequestedSampling

ID_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
MAX_SHOWN = 10**18  # largest of a client's numbers that errors show
MAX_SHOWN_IDS = 20  # token ids that an error lists


class ModelLimits(Protocol):
    """What a model allows; a proto ModelCard or the engine's CardData."""

    @property
    def context_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def context_overflow(
    limits: ModelLimits,
    prompt_len: int,
    prompt_field: str,
    max_tokens: int | None = None,
    param: str = "",
) -> ContextExceeded:
    """Return the error for a prompt, or a prompt and its answer, that exceeds the context. `param`:
    the field at fault; empty: `prompt_field`. Without `max_tokens` the answer counts as one
    token."""
    answer_len = 1 if max_tokens is None else min(max_tokens, MAX_SHOWN)
    text = context_exceeded(limits.context_len, prompt_len, answer_len, prompt_field)
    return ContextExceeded(text, param or prompt_field)


def check_sampling(requested: RequestedSampling) -> None:
    """Check the bounds that do not depend on a model. Raises TextError naming the field."""
    r = requested
    for name, bounds in BOUNDS.items():
        if name != "logit_bias":
            check_range(r.written_as(name), getattr(r, name), bounds.api)
    check_range("best_of", r.best_of, BOUNDS["n"].api)
    if r.best_of is not None and r.best_of < r.n:
        raise TextError(f"best_of must be at least n ({r.n}), not {r.best_of}", "best_of")
    for name, max_entries in MAX_ENTRIES.items():
        count = len(getattr(r, name))
        if count > max_entries:
            raise TextError(f"{name}: at most {max_entries} entries, not {count}", name)
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in r.stop):
        raise TextError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", "stop")
    if any(len(word) > MAX_BAD_WORD_CHARS or not word.strip() for word in r.bad_words):
        rule = f"1 to {MAX_BAD_WORD_CHARS} characters, not only spaces"
        raise TextError(f"a bad word must have {rule}", "bad_words")
    limits = BOUNDS["logit_bias"].api
    out_of_range = [token for token, bias in r.logit_bias.items() if not limits.has(bias)]
    if out_of_range:
        text = f"a bias must be {limits}; token ids with other biases: {listed(out_of_range)}"
        raise TextError(text, "logit_bias")
    check_range(r.thinking_budget_field, r.thinking_budget, THINKING_BUDGET)
    if r.logprob_token_ids and r.logprobs is None:
        raise TextError("logprob_token_ids requires logprobs", "logprob_token_ids")


def listed(ids: Sequence[int]) -> str:
    """Return token ids as an error shows them: MAX_SHOWN_IDS of them at most."""
    shown = ", ".join(str(token)[:40] for token in ids[:MAX_SHOWN_IDS])
    return shown if len(ids) <= MAX_SHOWN_IDS else f"{shown} and others"


def check_range(param: str, value: float | None, allowed: Range) -> None:
    """Raise TextError for a value out of range; None is in every range."""
    if value is not None and not allowed.has(value):
        raise TextError(f"{param} must be {allowed}, not {str(value)[:40]}", param)


def seed_of(requested: RequestedSampling) -> int:
    """Return the seed as an unsigned 64-bit number; a random one if the client sets none."""
    return secrets.randbits(63) if requested.seed is None else requested.seed % 2**64
