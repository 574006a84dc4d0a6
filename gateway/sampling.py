"""Converts a client's sampling fields to the engine's parameters and checks every number.

REST and gRPC both use `check` and `resolve`, so they refuse the same values with the same messages.
The bounds are those of engine/api/sampling_bounds.py.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field

from pdserve.engine.api import (
    BOUNDS,
    MAX_BAD_WORD_CHARS,
    MAX_ENTRIES,
    MAX_STOP_CHARS,
    THINKING_BUDGET,
    Range,
)
from pdserve.protos.common_pb2 import (
    CONTEXT_LENGTH_EXCEEDED,
    INVALID_ARGUMENT,
    ModelCard,
    SamplingParams,
)
from pdserve.services.common.errors import MAX_QUOTED, ServiceError, context_exceeded, cut
from pdserve.text import GenerationDefaults, RequestedSampling, TextError

MAX_SHOWN = 10**18  # largest of a client's numbers that errors show
MAX_LOGPROBS = 1 << 20  # in an answer held until it is complete: some 70 MB


def refuse(param: str, message: str) -> ServiceError:
    return ServiceError(INVALID_ARGUMENT, message, param=param)


def context_overflow(
    card: ModelCard,
    prompt_len: int,
    prompt_field: str,
    max_tokens: int | None = None,
    param: str = "",
) -> ServiceError:
    """Return the error for a prompt, or a prompt and its answer, that exceeds the context. `param`:
    the field at fault, if it is not the prompt's. Without `max_tokens` the answer counts as one
    token, or as none if the model generates nothing."""
    min_len = 0 if card.pooling else 1
    answer_len = min_len if max_tokens is None else min(max_tokens, MAX_SHOWN)
    text = context_exceeded(card.context_len, prompt_len, answer_len, prompt_field)
    return ServiceError(CONTEXT_LENGTH_EXCEEDED, text, param or prompt_field)


@contextmanager
def client_errors() -> Iterator[None]:
    """Convert a TextError about a client's text to the APIs' ServiceError."""
    try:
        yield
    except TextError as error:
        raise refuse(error.param, str(error)) from error


_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

PenaltyWindow = Annotated[int | None, Field(ge=-1, le=int(BOUNDS["penalty_window"].api.high))]
"""The last tokens that penalties look at; 0: none, so there are no penalties; -1: all, of which
only the repetition penalty counts the prompt's."""


def within_window(penalties: Mapping[str, float], window: int | None) -> dict[str, Any]:
    """Return a request's penalties and window, by their names in RequestedSampling."""
    if window == 0:
        return {**_NO_PENALTIES}
    return {**penalties, "penalty_window": max(0, window or 0)}


def check(requested: RequestedSampling, card: ModelCard) -> None:
    """Check bounds that do not depend on the prompt. Raises ServiceError naming the field."""
    r = requested
    for name, bounds in BOUNDS.items():
        if name != "logit_bias":
            _check_range(r.written_as(name), getattr(r, name), bounds.api)
    _check_range("best_of", r.best_of, BOUNDS["n"].api)
    _check_range("min_tokens", r.min_tokens, Range(0, card.context_len))
    if r.best_of is not None and r.best_of < r.n:
        raise refuse("best_of", f"best_of must be at least n ({r.n}), not {r.best_of}")
    for name, max_entries in MAX_ENTRIES.items():
        count = len(getattr(r, name))
        if count > max_entries:
            raise refuse(name, f"{name} must have at most {max_entries} entries, not {count}")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in r.stop):
        raise refuse("stop", f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    if any(len(word) > MAX_BAD_WORD_CHARS or not word.strip() for word in r.bad_words):
        rule = f"1 to {MAX_BAD_WORD_CHARS} characters, not only spaces"
        raise refuse("bad_words", f"a bad word must have {rule}")
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        ids = getattr(r, name)
        invalid_ids = [token for token in ids if not 0 <= token < card.vocab_size]
        if invalid_ids:
            listed = cut(", ".join(map(str, invalid_ids)), MAX_QUOTED)
            raise refuse(
                name, f"{name} must have token ids from 0 to {card.vocab_size - 1}, not {listed}"
            )
    limits = BOUNDS["logit_bias"].api
    out_of_range = [token for token, bias in r.logit_bias.items() if not limits.has(bias)]
    if out_of_range:
        listed = cut(", ".join(map(str, out_of_range)), MAX_QUOTED)
        raise refuse(
            "logit_bias", f"a bias must be {limits}; token ids with other biases: {listed}"
        )
    _check_range(r.thinking_budget_field, r.thinking_budget, THINKING_BUDGET)
    if r.logprob_token_ids and r.logprobs is None:
        raise refuse("logprob_token_ids", "logprob_token_ids requires logprobs")


def check_logprobs(requested: RequestedSampling, num_tokens: int, alternatives: str) -> None:
    """Check that `num_tokens` tokens of an answer do not have more log-probabilities than may be
    held. Raises ServiceError. `alternatives`: other requests that the error text suggests."""
    r = requested
    if r.logprobs is None:
        return
    num_each = 1 + r.logprobs + len(r.logprob_token_ids)
    if num_tokens * num_each > MAX_LOGPROBS:
        text = f"{num_tokens} tokens with {num_each} log-probabilities each exceed {MAX_LOGPROBS}"
        text = f"{text} in one answer; request {alternatives}fewer tokens, choices or logprobs"
        raise refuse(r.max_tokens_field, f"{r.max_tokens_field}: {text}")


def _check_range(param: str, value: float | None, allowed: Range) -> None:
    if value is not None and not allowed.has(value):
        raise refuse(param, f"{param} must be {allowed}, not {str(value)[:40]}")


def resolve(
    requested: RequestedSampling,
    card: ModelCard,
    defaults: GenerationDefaults,
    prompt_len: int,
    param: str,
    *,
    strict: bool = False,
) -> SamplingParams:
    """Return the engine's parameters for a prompt of `prompt_len` tokens.

    Without a max_tokens, or with one beyond the context, the engine's max_tokens is 0, which
    requests all room: only the engine knows how much n choices have. `strict`: refuse a max_tokens
    beyond the context. `param` names the prompt's field. Raises ServiceError
    CONTEXT_LENGTH_EXCEEDED, INVALID_ARGUMENT.
    """
    r = requested
    remaining = card.context_len - prompt_len
    if prompt_len < 1:
        raise refuse(param, "the prompt has no tokens")
    if remaining < 1:
        raise context_overflow(card, prompt_len, param, r.max_tokens)
    fits = r.max_tokens is not None and r.max_tokens <= remaining
    if strict and r.max_tokens is not None and not fits:
        raise context_overflow(card, prompt_len, param, r.max_tokens, r.max_tokens_field)
    max_tokens = r.max_tokens if r.max_tokens is not None and fits else remaining
    if r.min_tokens > max_tokens:
        raise refuse("min_tokens", f"min_tokens must be at most max_tokens ({max_tokens})")
    recommended = _recommended(requested, card, defaults)
    repetition = recommended["repetition_penalty"]
    penalizes = repetition not in (None, 1) or r.presence_penalty or r.frequency_penalty
    params = SamplingParams(
        **recommended,
        presence_penalty=r.presence_penalty,
        frequency_penalty=r.frequency_penalty,
        penalty_window=min(r.penalty_window, card.context_len) if penalizes else 0,
        logit_bias=r.logit_bias,
        stop_token_ids=r.stop_token_ids,
        ignore_eos=r.ignore_eos,
        min_tokens=r.min_tokens,
        max_tokens=max_tokens if fits else 0,
        n=r.best_of or r.n,
        allowed_token_ids=r.allowed_token_ids,
        logprob_token_ids=r.logprob_token_ids,
    )
    if r.logprobs is not None:
        params.logprobs = r.logprobs
    elif (r.best_of or r.n) > r.n:
        params.logprobs = 0  # to rank the candidates
    if r.prompt_logprobs is not None and prompt_len > 1:  # a prompt's first token has none
        params.prompt_logprobs = r.prompt_logprobs
    return params


def _recommended(
    requested: RequestedSampling, card: ModelCard, defaults: GenerationDefaults
) -> dict[str, Any]:
    """Return the parameters that a model may recommend: the client's values, else the model's.

    A parameter that neither sets is None, and takes the engine's default.
    """
    values = {}
    for name in (item.name for item in fields(defaults)):
        value = getattr(requested, name)
        values[name] = getattr(defaults, name) if value is None else value
    if values["top_p"] == 0:  # only the best token, which is top_k 1 for the engine
        values |= {"top_p": 1.0, "top_k": 1}
    if values["top_k"] is not None:
        values["top_k"] = min(max(values["top_k"], 0), card.vocab_size)
    return values


# Body fields that have the bounds of another name.
_BOUNDED_AS = {
    "top_logprobs": "logprobs",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "best_of": "n",
}


def bounded(schema: dict[str, Any]) -> None:
    """Write the sampling bounds into a body's JSON schema, where its own types have none."""
    for name, property_schema in schema["properties"].items():
        bounds = BOUNDS.get(_BOUNDED_AS.get(name, name))
        for kind in property_schema.get("anyOf", (property_schema,)):
            if bounds is None or kind.get("type") not in ("integer", "number"):
                continue
            kind.setdefault(
                "exclusiveMinimum" if bounds.api.open_low else "minimum", bounds.api.low
            )
            if bounds.api.high < math.inf:
                kind.setdefault("maximum", bounds.api.high)
