"""Requests, events and errors of the engine: plain data, no torch, no I/O.

A request carries everything that is needed to continue it on any engine. A new request is the
special case in which no choice has generated tokens yet.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class EngineError(Exception):
    """Base class of errors for a request that the engine rejects.

    The message may be shown to clients. `param`: the request field at fault; empty if there is
    none.
    """

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(EngineError):
    """The request has an invalid field, or this engine can never run it."""


class ContextLengthExceeded(EngineError):
    """The prompt and its completion are longer than the model's context or the engine's KV pool."""


# The text of `context_exceeded`. Groups: context, prompt and completion, in tokens.
CONTEXT_EXCEEDED = re.compile(
    r"maximum context length is (\d+) tokens\..* \((\d+) in the \w+, (\d+) in the completion"
)


def context_exceeded(context_len: int, prompt_len: int, max_tokens: int, prompt_name: str) -> str:
    """Return the error message for a request that exceeds the context, in OpenAI's words, because
    clients parse them. Lengths are in tokens. `prompt_name`: what the client's API calls the
    prompt."""
    return (
        f"This model's maximum context length is {context_len} tokens. However, you requested "
        f"{prompt_len + max_tokens} tokens ({prompt_len} in the {prompt_name}, {max_tokens} in the "
        f"completion). Please reduce the length of the {prompt_name} or completion."
    )


class QueueFull(EngineError):
    """A queue of the engine (of requests, or of grammars to compile) is full; the caller may retry
    later."""


class FinishReason(Enum):
    """Reason why a choice, one of a request's n completions, ended."""

    STOP = "stop"  # an eos id, a stop token id, or the end of a grammar
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that the text of a choice must match.

    `source` is in llguidance's format: a JSON list of grammars, each either in Lark syntax or a
    JSON schema.
    """

    source: str
    begins_after: tuple[int, ...] = ()  # it applies after these generated ids; empty: to all


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Maximum number of tokens that a choice may spend on thinking before its answer. When the
    limit is reached, the choice must generate `end_ids`, the token ids that end thinking."""

    max_tokens: int  # without end_ids
    end_ids: tuple[int, ...]
    start_ids: tuple[int, ...] = ()  # thinking begins after these; empty: at the first id


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientParams:
    """Sampling parameters that mean the same to a client and to the engine.

    RequestedSampling (text/request.py), the Python API's SamplingParams and the engine's
    SamplingParams extend this class, and conversions between them go by field name. None is the
    model's value, else the default of the engine's SamplingParams.
    """

    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None  # 0, and for a client -1: all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and generated ids
    presence_penalty: float = 0.0  # over generated ids
    frequency_penalty: float = 0.0  # over generated ids
    penalty_window: int = 0  # N: all three over the last N ids of prompt and output together
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # eos and stop ids are masked before this many
    max_tokens: int | None = None  # None: up to the end of the context
    logprobs: int | None = None  # k: of the sampled token and the k best; 0: sampled token only
    prompt_logprobs: int | None = None
    n: int = 1  # choices
    allowed_token_ids: Sequence[int] = ()  # eos and stop ids are added; empty: all
    logprob_token_ids: Sequence[int] = ()  # with logprobs: also of these tokens, in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(ClientParams):
    """Sampling parameters as the engine uses them.

    In contrast to ClientParams, numbers that the engine computes with are never None, and token ids
    replace texts. `Engine.submit` checks their bounds.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # none of these sequences is ever completed
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None


@dataclass(frozen=True, slots=True)
class ChoiceState:
    """What a choice had generated before its request came to this engine, and why it ended, if it
    has."""

    generated_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, its sampling parameters, and the state of its choices to continue from.

    `key`: unique name inside the engine; services use the hex id of the attempt.
    `seed`: always set; the tokens are a function of (prompt, generated ids, params, seed).
    `pool`: compute an embedding; no tokens are generated, and the only output is a `Pooled` event.
    `tenant`: owner of the request; tenants take turns.
    `priority`: among the requests of one tenant, lower values run first.
    """

    key: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    choices: tuple[ChoiceState, ...] = ()  # empty, or params.n of them
    cache_salt: bytes = b""
    prefill_only: bool = False  # compute the KV of all prompt_ids, sample nothing, hold the blocks
    tenant: bytes = b""
    pool: bool = False  # compute an embedding of prompt_ids
    priority: int = 0

    @property
    def generates(self) -> bool:
        """Whether the request samples tokens: False for embeddings and prefill_only requests."""
        return not (self.prefill_only or self.pool)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the engine that produces the output must compute the whole prompt itself, so that
        it cannot receive the prompt's KV from a prefill worker."""
        return self.pool or self.params.prompt_logprobs is not None


def prefix_of(prompt_ids: Sequence[int], unfinished: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the prompt ids, followed by the generated ids if exactly one choice is unfinished (see
    `prefix_ids`). `unfinished`: the generated ids of each unfinished choice."""
    if len(unfinished) == 1:
        return (*prompt_ids, *unfinished[0])
    return tuple(prompt_ids)


def prefix_ids(request: Request) -> tuple[int, ...]:
    """Return the token ids that the model must process before a request's next token can be
    sampled.

    KV of all these ids but the last must exist before the first decode step, which computes the
    last one. The ids are the prompt and the generated ids if exactly one choice is unfinished. They
    are only the prompt if nothing is generated yet or if several choices are unfinished.
    """
    return prefix_of(
        request.prompt_ids, [c.generated_ids for c in request.choices if c.finish is None]
    )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a token, and of alternatives to it, under the model: before
    temperature, penalties and masks."""

    logprob: float
    # (token id, logprob), best first; then those of logprob_token_ids.
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Event: the request left the queue for its first step, and its KV blocks are allocated."""

    key: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """Event: the KV of prompt tokens [0, num_tokens) is in the request's blocks."""

    key: str
    num_tokens: int
    done: bool  # the whole prompt; a prefill_only request now only holds its blocks


class NewTokens(NamedTuple):
    """Event: tokens that one choice generated; `position` is the index of the first of them among
    all generated tokens of the choice.

    A named tuple, because it is faster to make than a dataclass and there is one for every token.
    """

    key: str
    choice: int
    position: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Event: the log-probabilities of prompt tokens 1 to n - 1 (the first token has none)."""

    key: str
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Pooled:
    """Event: the embedding of the prompt, hidden_size float32 numbers that are not normalized; of a
    model whose head scores, the score."""

    key: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a request: every choice has ended, and all its blocks are released.

    A prefill_only request ends with `PrefillComputed(done=True)` instead.
    """

    key: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Last event of a request that failed: the engine dropped it and released all its blocks."""

    key: str
    message: str  # for the client if param is set; otherwise internal, for the log
    param: str = ""  # the request's field at fault
    is_overload: bool = False  # the machine was too busy; the message is for the client, too


@dataclass(frozen=True, slots=True)
class Evicted:
    """Last event of a parked request that the engine dropped because other requests needed its
    blocks; all its blocks are released."""

    key: str


Event = (
    Scheduled
    | PrefillComputed
    | NewTokens
    | PromptScored
    | Pooled
    | Finished
    | RequestFailed
    | Evicted
)


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one engine step: its index, its events, and its duration in seconds."""

    index: int
    events: tuple[Event, ...]
    wall_s: float
