"""Sampling parameters between an API's body and the wire: errors, schemas, the message that workers
read, and the log-probabilities that they return. The rules are in text/sampling.py."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field

from pdserve.engine.api import BOUNDS, ClientParams, SamplingParams, TokenLogprob
from pdserve.protos import common_pb2
from pdserve.protos.common_pb2 import CONTEXT_LENGTH_EXCEEDED, INVALID_ARGUMENT
from pdserve.services.common.errors import ServiceError
from pdserve.text import ContextExceeded, RequestedSampling, TextError

MAX_LOGPROBS = 1 << 20  # in an answer held until it is complete: some 70 MB
LEAST_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot write


def refuse(param: str, message: str) -> ServiceError:
    """Return the error INVALID_ARGUMENT that names a field of the request."""
    return ServiceError(INVALID_ARGUMENT, message, param=param)


def service_error(error: TextError) -> ServiceError:
    """Return the APIs' error for an error in a client's text or parameters."""
    exceeds = isinstance(error, ContextExceeded)
    code = CONTEXT_LENGTH_EXCEEDED if exceeds else INVALID_ARGUMENT
    return ServiceError(code, str(error), error.param)


@contextmanager
def client_errors() -> Iterator[None]:
    """Convert a TextError to the APIs' ServiceError."""
    try:
        yield
    except TextError as error:
        raise service_error(error) from error


_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

PenaltyWindow = Annotated[int | None, Field(ge=-1, le=int(BOUNDS["penalty_window"].api.high))]
"""The last tokens that penalties look at; 0: none, so there are no penalties; -1: all, of which
only the repetition penalty counts the prompt's."""


def within_window(penalties: Mapping[str, float], window: int | None) -> dict[str, Any]:
    """Return a request's penalties and window, by their names in RequestedSampling. `window` is a
    PenaltyWindow; None: the default, as -1."""
    if window == 0:
        return {**_NO_PENALTIES}
    return {**penalties, "penalty_window": max(0, window or 0)}


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


def to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    """Convert the engine's parameters by field name. None is an absent field: no log-probabilities,
    and all room as max_tokens."""
    wire = common_pb2.SamplingParams(
        **{item.name: getattr(params, item.name) for item in fields(ClientParams)},
        bad_words=[common_pb2.TokenSequence(ids=ids) for ids in params.bad_words],
    )
    if params.grammar is not None:
        wire.grammar.source = params.grammar.source
        wire.grammar.begins_after.extend(params.grammar.begins_after)
    if params.thinking is not None:
        wire.thinking.max_tokens = params.thinking.max_tokens
        wire.thinking.start_ids.extend(params.thinking.start_ids)
        wire.thinking.end_ids.extend(params.thinking.end_ids)
        wire.thinking.SetInParent()
    return wire


def from_wire(score: common_pb2.TokenLogprob) -> TokenLogprob:
    """Convert the log-probabilities at one position; LEAST_LOGPROB replaces numbers that are not
    finite."""
    top = zip(score.top_ids, map(_finite, score.top_logprobs), strict=True)
    return TokenLogprob(_finite(score.logprob), tuple(top))


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


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
