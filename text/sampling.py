"""Checks a client's sampling parameters and resolves them to the engine's; pure.

Every API uses these functions, so all refuse the same values with the same messages. The bounds are
those of engine/api/sampling_bounds.py.
"""

import secrets
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol

from pdserve.engine.api import (
    BOUNDS,
    MAX_BAD_WORD_CHARS,
    MAX_ENTRIES,
    MAX_STOP_CHARS,
    THINKING_BUDGET,
    ClientParams,
    Grammar,
    Range,
    SamplingParams,
    ThinkingBudget,
    context_exceeded,
)
from pdserve.text.constraints import Constraints
from pdserve.text.errors import ContextExceeded, TextError
from pdserve.text.generation_config import GenerationDefaults
from pdserve.text.request import RequestedSampling

MAX_SHOWN = 10**18  # largest of a client's numbers that errors show
MAX_SHOWN_IDS = 20  # token ids that an error lists


class ModelLimits(Protocol):
    """What a model allows; a proto ModelCard or the engine's CardData."""

    @property
    def context_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def pooling(self) -> str: ...


def context_overflow(
    limits: ModelLimits,
    prompt_len: int,
    prompt_field: str,
    max_tokens: int | None = None,
    param: str = "",
) -> ContextExceeded:
    """Return the error for a prompt, or a prompt and its answer, that exceeds the context. `param`:
    the field at fault, if it is not the prompt's. Without `max_tokens` the answer counts as one
    token, or as none if the model generates nothing."""
    min_len = 0 if limits.pooling else 1
    answer_len = min_len if max_tokens is None else min(max_tokens, MAX_SHOWN)
    text = context_exceeded(limits.context_len, prompt_len, answer_len, prompt_field)
    return ContextExceeded(text, param or prompt_field)


def check(requested: RequestedSampling) -> None:
    """Check the bounds that do not depend on a model. Raises TextError naming the field."""
    r = requested
    for name, bounds in BOUNDS.items():
        if name != "logit_bias":
            _check_range(r.written_as(name), getattr(r, name), bounds.api)
    _check_range("best_of", r.best_of, BOUNDS["n"].api)
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
        text = f"a bias must be {limits}; token ids with other biases: {_listed(out_of_range)}"
        raise TextError(text, "logit_bias")
    _check_range(r.thinking_budget_field, r.thinking_budget, THINKING_BUDGET)
    if r.logprob_token_ids and r.logprobs is None:
        raise TextError("logprob_token_ids requires logprobs", "logprob_token_ids")


def check_for(limits: ModelLimits, requested: RequestedSampling) -> None:
    """Check the bounds that depend on the model. Raises TextError naming the field."""
    _check_range("min_tokens", requested.min_tokens, Range(0, limits.context_len))
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        ids = getattr(requested, name)
        invalid_ids = [token for token in ids if not 0 <= token < limits.vocab_size]
        if invalid_ids:
            allowed = f"token ids from 0 to {limits.vocab_size - 1}"
            raise TextError(f"{name} must have {allowed}, not {_listed(invalid_ids)}", name)


def _listed(ids: Sequence[int]) -> str:
    shown = ", ".join(str(token)[:40] for token in ids[:MAX_SHOWN_IDS])
    return shown if len(ids) <= MAX_SHOWN_IDS else f"{shown} and others"


def _check_range(param: str, value: float | None, allowed: Range) -> None:
    if value is not None and not allowed.has(value):
        raise TextError(f"{param} must be {allowed}, not {str(value)[:40]}", param)


def check_prompt_len(
    limits: ModelLimits, requested: RequestedSampling, prompt_len: int, prompt_field: str
) -> None:
    """Check that a prompt has tokens and leaves room for an answer. Raises TextError."""
    if prompt_len < 1:
        raise TextError("the prompt has no tokens", prompt_field)
    if prompt_len >= limits.context_len:
        raise context_overflow(limits, prompt_len, prompt_field, requested.max_tokens)


def resolve(
    requested: RequestedSampling,
    limits: ModelLimits,
    defaults: GenerationDefaults,
    constraints: Constraints,
    prompt_len: int,
    prompt_field: str,
    *,
    strict: bool = False,
) -> SamplingParams:
    """Return the engine's parameters for a prompt of `prompt_len` tokens, which
    `check_prompt_len` accepts; `constraints` are those of this prompt.

    Without a max_tokens, or with one beyond the context, the engine's max_tokens is None, which
    requests all room: only the engine knows how much n choices have. `strict`: refuse a max_tokens
    beyond the context. Raises TextError.
    """
    r = requested
    room = limits.context_len - prompt_len
    fits = r.max_tokens is not None and r.max_tokens <= room
    if strict and r.max_tokens is not None and not fits:
        raise context_overflow(limits, prompt_len, prompt_field, r.max_tokens, r.max_tokens_field)
    max_tokens = r.max_tokens if r.max_tokens is not None and fits else room
    if r.min_tokens > max_tokens:
        text = f"min_tokens must be at most max_tokens ({max_tokens})"
        raise TextError(text, "min_tokens")
    values: dict[str, Any] = {item.name: getattr(r, item.name) for item in fields(ClientParams)}
    for item in fields(defaults):  # the client's value, else the model's, else the engine's
        if values[item.name] is None:
            values[item.name] = getattr(defaults, item.name)
    if values["top_p"] == 0:  # only the best token, which is top_k 1 for the engine
        values |= {"top_p": 1.0, "top_k": 1}
    if values["top_k"] is not None:
        values["top_k"] = min(max(values["top_k"], 0), limits.vocab_size)
    penalizes = values["repetition_penalty"] not in (None, 1) or (
        r.presence_penalty or r.frequency_penalty
    )
    values["penalty_window"] = min(r.penalty_window, limits.context_len) if penalizes else 0
    values["n"] = r.best_of or r.n
    if not fits:
        values["max_tokens"] = None
    if r.logprobs is None and values["n"] > r.n:
        values["logprobs"] = 0  # to rank the candidates
    if prompt_len == 1:  # a prompt's first token has no log-probability
        values["prompt_logprobs"] = None
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        values[name] = tuple(values[name])
    c, grammar, thinking = constraints, None, None
    if c.grammar:
        grammar = Grammar(c.grammar, c.grammar_after)
    if c.thinking_budget is not None:
        thinking = ThinkingBudget(c.thinking_budget, c.thinking_end, c.thinking_start)
    return SamplingParams(
        **{name: value for name, value in values.items() if value is not None},
        bad_words=c.bad_words,
        grammar=grammar,
        thinking=thinking,
    )


def seed_of(requested: RequestedSampling) -> int:
    """Return the seed, drawn at random if the client sets none."""
    return secrets.randbits(63) if requested.seed is None else requested.seed % 2**64
