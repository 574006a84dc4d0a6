"""Sampling settings of a token stream, and the interfaces of sampling backends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

GREEDY_BELOW = 1e-5  # lower temperatures count as 0: logits / T would exceed float32's range

# A token's log-probability, and (id, log-probability) of the best tokens, best first, and then of
# the requested ids.
TokenScores = tuple[float, tuple[tuple[int, float], ...]]

# [(vocab + 31) // 32]: token `id` is allowed if bit id % 32 of word id // 32 is set. A mask is the
# last edit of the scores; bits from `vocab` on are ignored.
Mask = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The sampling settings of one token stream. Edits of the logits apply in this order: bias,
    repetition, presence, frequency, mask."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # unsigned 64 bits
    choice: int = 0
    repetition_penalty: float = 1.0  # over prompt and generated ids
    presence_penalty: float = 0.0  # over generated ids
    frequency_penalty: float = 0.0  # over generated ids
    # All penalties cover this many last ids of prompt and output together; 0: no window.
    penalty_window: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    masked_ids: Sequence[int] = ()  # excluded until min_tokens are generated
    min_tokens: int = 0
    prompt_ids: Sequence[int] = ()

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p is set, so that tokens can be excluded."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalizes(self) -> bool:
        """Whether a repetition, presence or frequency penalty is set."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def penalized_prompt(self) -> Sequence[int]:
        """The prompt ids that the penalties cover before the first generated token."""
        if not self.penalty_window:
            return self.prompt_ids if self.repetition_penalty != 1 else ()
        return self.prompt_ids[-self.penalty_window :] if self.penalizes else ()

    def penalty_changes(
        self, generated: Sequence[int], num_covered: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ids that the penalties newly cover, and the ids that have left the penalty
        window, since `num_covered` ids were generated. The cost depends on the number of new ids
        only."""
        if not self.penalty_window:
            return generated[num_covered:], ()
        prompt_len = len(self.prompt_ids)
        old_begin, new_begin = (
            max(0, prompt_len + count - self.penalty_window)
            for count in (num_covered, len(generated))
        )
        old_end = prompt_len + num_covered
        removed_end = min(new_begin, old_end)
        removed = (
            *self.prompt_ids[old_begin:removed_end],
            *generated[max(0, old_begin - prompt_len) : max(0, removed_end - prompt_len)],
        )
        return generated[max(new_begin, old_end) - prompt_len :], removed


class SampledTokens(Protocol):
    """The interface of tokens that a device samples while the host continues."""

    @property
    def tokens(self) -> Any:
        """The sampled tokens [streams], on the device, as the input of the next step."""

    def read(self) -> list[int]:
        """Wait until the tokens are sampled and return them like `SamplingOps.sample`."""


class SamplingOps(Protocol):
    """The interface of a sampling backend. Logits are an array of the backend, float32 [n,
    vocab]."""

    def stream(self, settings: StreamSettings, vocab: int) -> Any:
        """Create the sampling state of one choice of a request. Only the backend that made it reads
        it."""

    def sample(
        self,
        logits: Any,
        rows: list[int],
        streams: list[Any],
        generated: list[list[int]],
        masks: list[Mask | None] | None = None,
    ) -> list[int]:
        """Sample the next token of each stream; -1 for a stream without an allowed token of finite
        score."""

    def logprobs(
        self, logits: Any, tokens: list[int], count: int, also: Sequence[int] = ()
    ) -> list[TokenScores]:
        """Return for each row r of logits the log-probability of tokens[r], of the row's `count`
        best tokens and of the ids in `also`."""


@runtime_checkable
class AheadSampling(Protocol):
    """The interface of sampling whose tokens the next step can use before the host has read
    them."""

    def begin(
        self, logits: Any, rows: list[int], streams: list[Any], num_generated: list[int]
    ) -> SampledTokens:
        """Launch the sampling of each stream's next token and return without waiting. Streams must
        have no masks and no penalties."""
