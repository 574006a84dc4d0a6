"""Sampling as a client requests it, the same for every API; pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.gateway.requests.structure import Structure


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """Sampling as the client wrote it; None takes the model's default.

    Fields that have bounds are named as in engine/api/sampling_bounds.py, except `best_of`.
    """

    temperature: float | None = None
    top_k: int | None = None  # 0 and -1: all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_penalty_field: str = "repetition_penalty"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0  # ids; 0: all
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None  # None: the rest of the context
    max_tokens_field: str = "max_tokens"
    logprobs: int | None = None
    logprobs_field: str = "logprobs"
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None  # None: n
    seed: int | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] = ()  # and the eos ids; empty: all
    bad_words: tuple[str, ...] = ()
    logprob_token_ids: tuple[int, ...] = ()  # whose log-probabilities are returned, too
    structure: Structure | None = None
    structure_after: str = ""  # the structure binds what follows it; empty: all of the answer
    thinking_budget: int | None = None  # tokens of thinking; None: no bound
    thinking_budget_field: str = "thinking_token_budget"
    # None: the model's own. If the first is empty, the answer begins within reasoning.
    thinking_tags: tuple[str, str] | None = None

    def written_as(self, param: str) -> str:
        """Return the client's name for a parameter of the engine."""
        structure = self.structure.param if self.structure else param
        return {
            "max_tokens": self.max_tokens_field,
            "logprobs": self.logprobs_field,
            "repetition_penalty": self.repetition_penalty_field,
            "grammar": structure,
            "thinking": self.thinking_budget_field,
        }.get(param, param)

    @property
    def is_constrained(self) -> bool:
        """Return whether content/constraints.py has to prepare constraints on the answer."""
        return bool(self.structure or self.bad_words or self.thinking_budget is not None)
