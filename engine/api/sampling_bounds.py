"""Bounds of every sampling parameter: the only table from which gateway, router, workers and engine
derive their checks.

Pure; it imports no other module of pdserve, so that all of these can read it.

Each parameter has two ranges. `api` bounds what clients of REST, gRPC and the Python API may send.
It equals OpenAI's limit where OpenAI has one: temperature up to 2, penalties from -2 to 2, biases
from -100 to 100, 20 log-probabilities and 128 choices. `engine` bounds what the engine can compute
with accurate results; the native sampler accepts all of that range.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """Range of numbers from `low` to `high`, both included; with `open_low`, `low` itself is
    excluded."""

    low: float
    high: float = math.inf
    open_low: bool = False

    def has(self, value: float) -> bool:
        """Whether `value` is in the range; False for NaN."""
        return self.low <= value <= self.high and not (self.open_low and value == self.low)

    def __str__(self) -> str:
        """Return the range as words that follow "must be" in an error message, such as "at least
        1"."""
        if self.high == math.inf:
            return f"at least {self.low:g}"
        limits = f"above {self.low:g} and at most" if self.open_low else f"from {self.low:g} to"
        return f"{limits} {self.high:g}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Allowed ranges of one sampling parameter: `api` for clients' requests, `engine` for the
    engine."""

    api: Range
    engine: Range


_PENALTY = Bounds(api=Range(-2, 2), engine=Range(-100, 100))
_WINDOW = Range(0, 2**31 - 1)  # ids; one larger than the context covers all of it
_SCORES = Bounds(api=Range(0, 20), engine=Range(0, 20))  # and at most the vocabulary

BOUNDS: dict[str, Bounds] = {
    "temperature": Bounds(api=Range(0, 2), engine=Range(0, 100)),
    # Clients may write -1 for "all", as with vLLM; the engine uses 0.
    "top_k": Bounds(api=Range(-1, 2**31 - 1), engine=Range(0)),
    # Clients may write 0 for "the likeliest token"; the engine uses top_k 1.
    "top_p": Bounds(api=Range(0, 1), engine=Range(0, 1, open_low=True)),
    "min_p": Bounds(api=Range(0, 1), engine=Range(0, 1)),
    # 1/128 also admits 0.01 as the float32 just below it.
    "repetition_penalty": Bounds(api=Range(1 / 128, 10), engine=Range(1 / 128, 100)),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "penalty_window": Bounds(api=_WINDOW, engine=_WINDOW),
    "logit_bias": Bounds(api=Range(-100, 100), engine=Range(-1e6, 1e6)),  # each value
    "min_tokens": Bounds(api=Range(0), engine=Range(0)),  # and at most max_tokens
    "max_tokens": Bounds(api=Range(1), engine=Range(1)),  # and at most the remaining context
    "logprobs": _SCORES,
    "prompt_logprobs": _SCORES,
    "n": Bounds(api=Range(1, 128), engine=Range(1)),  # and at most the rows of a batch
    # Clients send a signed 64-bit number, as with OpenAI; negative ones count modulo 2**64.
    "seed": Bounds(api=Range(-(2**63), 2**63 - 1), engine=Range(0, 2**64 - 1)),
}
MAX_CHOICES = int(BOUNDS["n"].api.high)  # of a request on the wire

# Maximum entries of these lists in a request.
MAX_ENTRIES: dict[str, int] = {
    "stop": 16,
    "stop_token_ids": 128,
    "logit_bias": 1024,
    "allowed_token_ids": 2048,
    "bad_words": 128,
    "logprob_token_ids": 64,
}
MAX_STOP_CHARS = 256  # of one stop string
MAX_BAD_WORD_CHARS = 256
THINKING_BUDGET = Range(0, 2**31 - 1)  # tokens

# Limits of an answer's structure: as a client writes it (a schema has many values), and as workers
# receive it.
MAX_STRUCTURE_CHARS = 128 << 10
MAX_STRUCTURE_VALUES = 8192
MAX_STRUCTURE_DEPTH = 64
MAX_GRAMMAR_BYTES = 256 << 10
# Limits of llguidance's parser (LLParserLimits), the same in gateway and workers: a grammar that
# compiles in one compiles in the other.
GRAMMAR_LIMITS: dict[str, Any] = {
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
MAX_SEQUENCE_IDS = 64  # of a bad word, and of the ids that start or end thinking or start a grammar
