"""Requests, events and errors of the engine: plain data, no torch, no I/O.

A request carries its whole state: a first start is a resume whose choices are empty.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class EngineError(Exception):
    """A request that the engine rejects, with a message that clients may see."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(EngineError):
    """A field is invalid, or this engine can never run the request."""


class ContextLengthExceeded(EngineError):
    """The prompt and its completion can never fit."""


# The text of `context_exceeded`. Groups: context, prompt and completion, in tokens.
CONTEXT_EXCEEDED = re.compile(
    r"maximum context length is (\d+) tokens\..* \((\d+) in the \w+, (\d+) in the completion"
)


def context_exceeded(context_len: int, prompt_len: int, max_tokens: int, prompt_name: str) -> str:
    """Return the error text for a prompt and completion that exceed the context, in OpenAI's words,
    which clients parse. `prompt_name`: the client's name for the prompt."""
    return (
        f"This model's maximum context length is {context_len} tokens. However, you requested "
        f"{prompt_len + max_tokens} tokens ({prompt_len} in the {prompt_name}, {max_tokens} in the "
        f"completion). Please reduce the length of the {prompt_name} or completion."
    )


class QueueFull(EngineError):
    """The bounded queue is full; the caller may retry later."""


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"  # an eos id, a stop token id, or the end of a grammar
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that the text of a choice must match.

    `source` is in llguidance's format: JSON of a list of grammars, each of Lark or a JSON schema.
    """

    source: str
    begins_after: tuple[int, ...] = ()  # it applies after these generated ids; empty: to all


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Maximum number of thinking ids of a choice; at the limit `end_ids` are forced."""

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
    """The engine's sampling parameters, whose bounds submit checks: no None where the engine
    computes, and token ids in place of texts."""

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
    """State of one choice before this start."""

    generated_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, its params, and the state to continue from.

    `key`: name inside the engine; services use the attempt in hex.
    `seed`: always set; the tokens are a function of (prompt, generated, params, seed).
    `pool`: generates nothing; the one output is `Pooled`.
    `tenant`: owner of the request; tenants take turns.
    `priority`: among a tenant's requests, lower values come first.
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
        """Whether its choices sample tokens."""
        return not (self.prefill_only or self.pool)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the engine that makes the output must compute the prompt, not receive its KV."""
        return self.pool or self.params.prompt_logprobs is not None


def prefix_of(prompt_ids: Sequence[int], unfinished: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the `prefix_ids` of a prompt and the generated ids of its unfinished choices."""
    if len(unfinished) == 1:
        return (*prompt_ids, *unfinished[0])
    return tuple(prompt_ids)


def prefix_ids(request: Request) -> tuple[int, ...]:
    """Return the ids whose KV must exist before the first decode row, plus that row's token.

    They are prompt + generated ids when exactly one choice is unfinished, and otherwise the prompt:
    on a first start or with several unfinished choices.
    """
    return prefix_of(
        request.prompt_ids, [c.generated_ids for c in request.choices if c.finish is None]
    )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability under the model, before temperature, penalties and masks."""

    logprob: float
    # (token id, logprob), best first; then those of logprob_token_ids.
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The request left the queue for its first step; its blocks are allocated."""

    key: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """KV of prompt tokens [0, num_tokens) is in the request's blocks."""

    key: str
    num_tokens: int
    done: bool  # the whole prompt; a prefill_only request now only holds its blocks


class NewTokens(NamedTuple):
    """Tokens of one choice; `position` counts its generated tokens from 0.

    A named tuple, because there is one for every token.
    """

    key: str
    choice: int
    position: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of prompt tokens 1..n-1."""

    key: str
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Pooled:
    """Pooled hidden state of the prompt: hidden_size float32 numbers, not normalized."""

    key: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Every choice has ended and all blocks are released. The last event of a request.

    A prefill_only request ends with `PrefillComputed(done)` instead.
    """

    key: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The engine dropped the request and released all its blocks. The last event of a request."""

    key: str
    message: str  # for the client if param is set; otherwise internal, for the log
    param: str = ""  # the request's field at fault


@dataclass(frozen=True, slots=True)
class Evicted:
    """A parked request was dropped because its blocks were needed; all of them are released.

    The last event of a request.
    """

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
    """Result of one engine step."""

    index: int
    events: tuple[Event, ...]
    wall_s: float
