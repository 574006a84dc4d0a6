"""The fields that chat and plain completions share; their bounds are in gateway/sampling.py."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema

from pdserve.engine.api import BOUNDS, MAX_ENTRIES
from pdserve.gateway.http import ModelName, TokenLimit, thinking_budget
from pdserve.gateway.http.fields import REFUSED
from pdserve.gateway.openai.request_models import base
from pdserve.gateway.openai.request_models.base import Body, OwnedBody
from pdserve.gateway.openai.request_models.structure import StructureFields
from pdserve.gateway.sampling import PenaltyWindow, refuse, within_window
from pdserve.services.common.errors import MAX_QUOTED, cut

_CONVERTED = {"penalty_window", "logit_bias", "max_tokens", "logprobs", "prompt_logprobs"}
# Fields with the same name and values in RequestedSampling.
_SAME_NAMES = (*(BOUNDS.keys() - _CONVERTED), "ignore_eos", "skip_special_tokens")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids")
# Names of one bound: vLLM; Qwen and SGLang; llama.cpp.
_THINKING = ("thinking_token_budget", "thinking_budget", "reasoning_budget")


def _stop(value: Any) -> Any:
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(stop, str) for stop in value):
        return [stop for stop in value if stop]  # an empty one stops nothing
    raise ValueError("must be a string or a list of strings")


def _limited(name: str) -> BeforeValidator:
    """Refuse too many entries of a field before checking each: an error for each takes long."""
    limit = MAX_ENTRIES[name]

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > limit:
            raise ValueError(f"at most {limit} entries, not {len(value)}")
        return value

    return BeforeValidator(check)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(StructureFields, OwnedBody):
    """The fields that chat and plain completions share."""

    model_config = ConfigDict(json_schema_extra=base.completion)
    checked = REFUSED.keys()
    model: ModelName = ""
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # llama.cpp's name for it
    repeat_last_n: PenaltyWindow = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, _limited("logit_bias")] = None
    seed: int | None = None
    stop: Annotated[Any, AfterValidator(_stop), WithJsonSchema(base.STOP)] = Field(
        None, validate_default=True
    )
    stop_token_ids: Annotated[list[int] | None, _limited("stop_token_ids")] = None
    allowed_token_ids: Annotated[list[int] | None, _limited("allowed_token_ids")] = None
    bad_words: Annotated[list[str] | None, _limited("bad_words")] = None
    logprob_token_ids: Annotated[list[int] | None, _limited("logprob_token_ids")] = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    reasoning_budget: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: TokenLimit = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return whether every chunk of a stream has the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def _shared(self) -> dict[str, Any]:
        """Return fields of RequestedSampling; a null field is left out."""
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise refuse("prompt_logprobs", "prompt_logprobs cannot be streamed")
        values = {name: getattr(self, name) for name in _SAME_NAMES}
        if self.repeat_penalty is not None:
            if self.repetition_penalty not in (None, self.repeat_penalty):
                raise refuse("repeat_penalty", "give either repetition_penalty or repeat_penalty")
            values["repetition_penalty"] = self.repeat_penalty
            values["repetition_penalty_field"] = "repeat_penalty"
        penalties = {name: values[name] for name in PENALTIES if values[name] is not None}
        values |= within_window(penalties, self.repeat_last_n)
        return {
            **{name: value for name, value in values.items() if value is not None},
            **{name: tuple(getattr(self, name) or ()) for name in _LISTS},
            "logit_bias": _biases(self.logit_bias or {}),
            "include_stop": bool(self.include_stop_str_in_output),
            "structure": self.structure(),
            **thinking_budget(self._bounds_of_thinking()),
        }

    def _bounds_of_thinking(self) -> dict[str, int]:
        """Return the bounds that are set, by their field."""
        values = {name: getattr(self, name) for name in _THINKING}
        return {name: value for name, value in values.items() if value is not None}


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    invalid = [t for t in biases if not (t.isascii() and t.isdecimal() and len(t) <= 10)]
    if invalid:
        names = ", ".join(f"{token[:40]!r}" for token in invalid)
        problem = "is not a token id" if len(invalid) == 1 else "are not token ids"
        raise refuse("logit_bias", cut(f"logit_bias: {names} {problem}", MAX_QUOTED))
    return {int(token): bias for token, bias in biases.items()}
