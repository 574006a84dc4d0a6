"""The fields by which clients of several servers say whether, and how much, a model thinks.

They become variables of chat templates, and a bound of the thoughts' tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from pdserve.gateway.http.validation import StrictModel
from pdserve.gateway.sampling import refuse
from pdserve.gateway.text.messages import EFFORTS, suggested_variables


class ThinkingBody(StrictModel):
    """Anthropic's form, which GLM, DeepSeek and others share."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=0)


class ReasoningBody(StrictModel):
    """OpenRouter's form."""

    enabled: bool | None = None
    effort: Literal[*EFFORTS] | None = None  # type: ignore[valid-type]
    max_tokens: int | None = Field(None, ge=0)
    exclude: bool | None = None  # the thoughts are left out of the answer
    summary: Literal["auto", "concise", "detailed"] | None = None  # all is shown


@dataclass(frozen=True, slots=True)
class Thinking:
    """What one field asks for; None: it does not say."""

    field: str
    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None


class ThinkingFields(StrictModel):
    """Fields at the top of a body."""

    enable_thinking: bool | None = None  # Qwen, vLLM
    think: bool | Literal["low", "medium", "high"] | None = None  # Ollama
    thinking: bool | ThinkingBody | None = None

    def thinking_variables(self) -> dict[str, Any]:
        """Variables of a template. Raises ServiceError for fields that contradict each other."""
        found: dict[str, Any] = {}
        of: dict[str, str] = {}  # which field says it
        for asked in self._thinking_fields():
            told: dict[str, Any] = suggested_variables(asked.effort, None)
            if asked.enabled is not None:
                told |= {"enable_thinking": asked.enabled, "thinking": asked.enabled}
            for name, value in told.items():
                if found.setdefault(name, value) != value:
                    raise refuse(asked.field, f"{asked.field} contradicts {of[name]}")
                of.setdefault(name, asked.field)
        return found

    def thinking_bounds(self) -> dict[str, int]:
        """The tokens that thoughts may have, by the field that says it."""
        return {
            f"{asked.field}.{'max_tokens' if asked.field == 'reasoning' else 'budget_tokens'}":
            asked.budget
            for asked in self._thinking_fields()
            if asked.budget is not None
        }  # fmt: skip

    def _thinking_fields(self) -> Iterator[Thinking]:
        if self.enable_thinking is not None:
            yield Thinking("enable_thinking", self.enable_thinking)
        if isinstance(self.think, str):
            yield Thinking("think", True, self.think)
        elif self.think is not None:
            yield Thinking("think", self.think)
        if isinstance(self.thinking, ThinkingBody):
            enabled = self.thinking.type != "disabled"
            budget = self.thinking.budget_tokens if enabled else None
            yield Thinking("thinking", enabled, budget=budget)
        elif self.thinking is not None:
            yield Thinking("thinking", self.thinking)
