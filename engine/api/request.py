"""What the engine is asked and what it answers: plain data, no torch, no I/O.

A request's whole state is here: a first start is a resume whose choices are empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class FinishReason(Enum):
    """What a choice ended with."""

    STOP = "stop"  # an eos id, a stop token id, or the end of a grammar
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer has to match.

    `source` is as llguidance reads it: JSON of a list of grammars, each of Lark or a JSON schema.
    """

    source: str
    begins_after: tuple[int, ...] = ()  # it binds what follows these generated ids; empty: all


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How many ids a choice may think for before it is made to go on with `end_ids`."""

    max_tokens: int  # end_ids do not count
    end_ids: tuple[int, ...]
    start_ids: tuple[int, ...] = ()  # thinking begins after these; empty: with the first id


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is picked. Bounds are checked by the gateway and again at submit."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and generated ids
    presence_penalty: float = 0.0  # over generated ids
    frequency_penalty: float = 0.0  # over generated ids
    penalty_window: int = 0  # N: all three over the last N ids of prompt and output together
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # eos and stop ids are masked before this many
    max_tokens: int | None = None  # None: what is left of the context
    logprobs: int | None = None  # k: the chosen token's and the k best; 0: the chosen one's
    prompt_logprobs: int | None = None
    n: int = 1
    # What follows leaves tokens out (engine/constraints), but for the last.
    allowed_token_ids: tuple[int, ...] = ()  # and eos and stop ids; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # none of these sequences is ever completed
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None
    logprob_token_ids: tuple[int, ...] = ()  # with logprobs: these tokens' as well, in this order


@dataclass(frozen=True, slots=True)
class ChoiceState:
    """What one choice has generated before this start."""

    generated_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to go on from it.

    `key` names it inside the engine; services use the attempt in hex.
    `seed` is always set: the tokens are a function of (prompt, generated, params, seed).
    With `pool` nothing is generated: its one output is `Pooled`.
    `tenant`: whose it is; requests of several wait in turn.
    `priority`: of a tenant's requests those with a lower value come first.
    """

    key: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    choices: tuple[ChoiceState, ...] = ()  # empty, or params.n of them
    cache_salt: bytes = b""
    prefill_only: bool = False  # compute the KV of all prompt_ids, sample nothing, hold the blocks
    tenant: bytes = b""
    pool: bool = False  # an embedding of prompt_ids is asked for
    priority: int = 0

    @property
    def generates(self) -> bool:
        """Whether its choices want tokens."""
        return not (self.prefill_only or self.pool)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether its prompt is computed where its output is made: KV alone is not enough."""
        return self.pool or self.params.prompt_logprobs is not None


def prefix_of(prompt_ids: Sequence[int], unfinished: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """`prefix_ids` of a prompt and the generated ids of its unfinished choices."""
    if len(unfinished) == 1:
        return (*prompt_ids, *unfinished[0])
    return tuple(prompt_ids)


def prefix_ids(request: Request) -> tuple[int, ...]:
    """The ids whose KV must exist before the first decode row, plus that row's token.

    The prompt on a first start or with several unfinished choices; prompt + generated ids when
    exactly one choice is unfinished.
    """
    return prefix_of(
        request.prompt_ids, [c.generated_ids for c in request.choices if c.finish is None]
    )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Of the model's own distribution, before temperature, penalties and masks; natural log."""

    logprob: float
    # (token id, logprob), best first; then those of logprob_token_ids.
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The request was picked from the queue for its first step; its blocks are allocated."""

    key: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """KV of the prompt's tokens [0, num_tokens) is in its blocks."""

    key: str
    num_tokens: int
    done: bool  # the whole prompt; a prefill_only request now only holds its blocks


class NewTokens(NamedTuple):
    """Tokens of one choice; `position` counts its generated tokens from 0.

    A named tuple, since there is one for every token.
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
    """The pooled hidden state of the prompt, not normalized: hidden_size float32 numbers."""

    key: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Every choice has ended and every block is back. The last event of a request.

    A prefill_only request has none: `PrefillComputed(done)` is its last.
    """

    key: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The engine gave the request up; every block is back. The last event of a request."""

    key: str
    message: str  # with a param for the client; otherwise internal text, for the log
    param: str = ""  # the request's field at fault


@dataclass(frozen=True, slots=True)
class Evicted:
    """A parked request was given up, because its blocks were needed: every block is back.

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
    """What one engine step did."""

    index: int
    events: tuple[Event, ...]
    wall_s: float
