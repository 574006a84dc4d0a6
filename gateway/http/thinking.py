"""Request fields with which clients of several servers control whether, and how much, a model
thinks before it answers.

They are converted to variables of chat templates, and to a limit on reasoning tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from pdserve.gateway.http.validation import StrictModel
from pdserve.gateway.sampling import refuse
from pdserve.text import EFFORTS, suggested_variables, thinking_switches

_TEMPLATE_DECIDES = ("auto", "default")  # efforts that leave the choice to the model's template
Effort = Annotated[
    Literal[*EFFORTS, *_TEMPLATE_DECIDES] | None,  # type: ignore[valid-type]
    AfterValidator(lambda effort: None if effort in _TEMPLATE_DECIDES else effort),
]
"""How much a model thinks; null, "auto" and "default" leave that to the template."""


class ThinkingBody(StrictModel):
    """The request field `thinking` of Anthropic's API, which GLM, DeepSeek and others share."""

    type: Literal["enabled", "adaptive", "auto", "disabled"]
    budget_tokens: int | None = Field(None, ge=-1)  # -1: no bound


class ReasoningBody(StrictModel):
    """The request field `reasoning` of OpenRouter's API: whether and how much a model thinks."""

    enabled: bool | None = None
    effort: Effort = None
    max_tokens: int | None = Field(None, ge=-1)  # -1: no bound
    exclude: bool | None = None  # leave reasoning out of the answer
    summary: Any = None  # all of it is shown; in /v1/responses as the summary, too, unless null

    def choice(self) -> "ThinkingChoice":
        """Convert the field to a ThinkingChoice. A limit on reasoning tokens enables thinking
        unless `enabled` is set."""
        budget = None if self.max_tokens == -1 or self.enabled is False else self.max_tokens
        enabled = True if self.enabled is None and budget is not None else self.enabled
        return ThinkingChoice("reasoning", enabled, self.effort, budget)


@dataclass(frozen=True, slots=True)
class ThinkingChoice:
    """What one request field says about thinking; an attribute is None if the field does not say
    it."""

    field: str
    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None


def _expect(expected: str) -> WrapValidator:
    """Return a pydantic validator whose error is "must be {expected}". The default error would name
    every alternative of the union that failed."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {expected}") from None

    return WrapValidator(check)


Think = Annotated[
    bool | Literal["low", "medium", "high"] | None,
    _expect("true, false, low, medium or high"),
]


def thinking_variables(fields: Iterable[ThinkingChoice]) -> dict[str, Any]:
    """Return the chat template's variables that the request fields set. Raises ServiceError for
    fields that contradict each other."""
    variables: dict[str, Any] = {}
    sources: dict[str, str] = {}  # the fields that set them
    disabled = effort = ""  # the fields that disable thinking, and that set its effort
    for field in fields:
        disabled = field.field if field.enabled is False else disabled
        effort = field.field if field.effort not in (None, "none") else effort
        if disabled and effort:
            other = disabled if effort == field.field else effort
            other = "itself" if other == field.field else other
            raise refuse(field.field, f"{field.field} contradicts {other}")
        values = suggested_variables(field.effort, None)
        if field.enabled is not None:
            values |= thinking_switches(field.enabled)
        for name, value in values.items():
            if variables.setdefault(name, value) != value:
                raise refuse(field.field, f"{field.field} contradicts {sources[name]}")
            sources.setdefault(name, field.field)
    return variables


def thinking_budget(bounds: Mapping[str, int]) -> dict[str, Any]:
    """Return the limit on reasoning tokens as fields of RequestedSampling. `bounds` maps the
    request field that sets a limit to the limit; -1 means no limit. Raises ServiceError if several
    fields set one."""
    names = list(bounds)
    if len(names) > 1:
        raise refuse(names[1], f"set either {names[0]} or {names[1]}, not both")
    if not names or bounds[names[0]] == -1:
        return {}
    return {"thinking_budget": bounds[names[0]], "thinking_budget_field": names[0]}


class ThinkingFields(StrictModel):
    """The fields about thinking that a request body may have at its top level."""

    enable_thinking: bool | None = None  # Qwen, vLLM
    think: Think = None  # Ollama
    thinking: Annotated[
        bool | ThinkingBody | None,
        _expect(
            "true, false, or an object of type enabled, adaptive, auto or disabled whose "
            "budget_tokens are at least -1"
        ),
    ] = None

    def thinking_variables(self) -> dict[str, Any]:
        """Return the chat template's variables that these fields set. Raises ServiceError for
        fields that contradict each other."""
        return thinking_variables(self._thinking_fields())

    def thinking_bounds(self) -> dict[str, int]:
        """Return the limits on reasoning tokens, by the name of the request field that sets
        each."""
        return {
            f"{field.field}.{'max_tokens' if field.field == 'reasoning' else 'budget_tokens'}":
            field.budget
            for field in self._thinking_fields()
            if field.budget is not None
        }  # fmt: skip

    def _thinking_fields(self) -> Iterator[ThinkingChoice]:
        if self.enable_thinking is not None:
            yield ThinkingChoice("enable_thinking", self.enable_thinking)
        if isinstance(self.think, str):  # a level is an effort
            yield ThinkingChoice("think", True, self.think)
        else:
            yield ThinkingChoice("think", self.think)
        if isinstance(self.thinking, ThinkingBody):
            enabled = self.thinking.type != "disabled"
            budget = self.thinking.budget_tokens if enabled else None
            budget = None if budget == -1 else budget
            yield ThinkingChoice("thinking", enabled, budget=budget)
        elif self.thinking is not None:
            yield ThinkingChoice("thinking", self.thinking)
