"""How the tokens of a choice are picked: its settings, and what every backend can do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

GREEDY_BELOW = 1e-5  # a lower temperature is 0: logits / T would leave the range of float32

# Of a token: its log-probability, and (id, log-probability) of the best ones, best first, and then
# of those that were asked for.
TokenScores = tuple[float, tuple[tuple[int, float], ...]]

# [(vocab + 31) // 32]: token `id` may be picked if bit id % 32 of word id // 32 is set. It is the
# last edit of the scores; bits from `vocab` on mean nothing.
Mask = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """One stream of tokens. Edits in this order: bias, repetition, presence, frequency, mask."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # unsigned 64 bits
    choice: int = 0
    repetition_penalty: float = 1.0  # over prompt and generated ids
    presence_penalty: float = 0.0  # over generated ids
    frequency_penalty: float = 0.0  # over generated ids
    # With a window all three look at this many last ids of prompt and output together; 0: none.
    penalty_window: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    masked_ids: Sequence[int] = ()  # left out until min_tokens are generated
    min_tokens: int = 0
    prompt_ids: Sequence[int] = ()

    @property
    def filters(self) -> bool:
        """Whether the parameters leave tokens out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalizes(self) -> bool:
        """Whether a penalty is set."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def penalized_prompt(self) -> Sequence[int]:
        """The prompt ids that penalties look at before the first token."""
        if not self.penalty_window:
            return self.prompt_ids if self.repetition_penalty != 1 else ()
        return self.prompt_ids[-self.penalty_window :] if self.penalizes else ()

    def penalty_changes(
        self, generated: Sequence[int], since: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """The ids that penalties begin to look at, and those that leave the window, since `since`
        ids were generated. Takes time for the new ids alone."""
        if not self.penalty_window:
            return generated[since:], ()
        prompt_len = len(self.prompt_ids)
        old, new = (
            max(0, prompt_len + count - self.penalty_window) for count in (since, len(generated))
        )
        old_end = prompt_len + since
        left_end = min(new, old_end)
        left = (
            *self.prompt_ids[old:left_end],
            *generated[max(0, old - prompt_len) : max(0, left_end - prompt_len)],
        )
        return generated[max(new, old_end) - prompt_len :], left


class Picks(Protocol):
    """Picks that a device makes; the host may go on meanwhile."""

    @property
    def tokens(self) -> Any:
        """[picks], on the device, for the step that follows."""

    def read(self) -> list[int]:
        """Waits for them: what `SamplingOps.sample` returns."""


class SamplingOps(Protocol):
    """How tokens are picked from logits, which are an array of the backend, float32 [n, vocab]."""

    def stream(self, settings: StreamSettings, vocab: int) -> Any:
        """What picks the tokens of one choice; only the backend that made it looks inside."""

    def sample(
        self,
        logits: Any,
        rows: list[int],
        streams: list[Any],
        generated: list[list[int]],
        masks: list[Mask | None] | None = None,
    ) -> list[int]:
        """The next token of each stream; -1 where no allowed token has a finite score."""

    def logprobs(
        self, logits: Any, tokens: list[int], count: int, also: Sequence[int] = ()
    ) -> list[TokenScores]:
        """Of tokens[r] under row r, with its `count` best tokens and those of `also`."""


@runtime_checkable
class AheadSampling(Protocol):
    """Sampling whose picks the next step can take before the host has read them."""

    def begin(
        self, logits: Any, rows: list[int], streams: list[Any], num_generated: list[int]
    ) -> Picks:
        """Launches the picks of streams that no mask and no penalty changes: of these only the
        number of generated tokens matters."""
