"""The request body of /v1/responses: strict types here, bounds in gateway/sampling.py; and the
fields that are refused by name or ignored on purpose.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import to_json

from pdserve.gateway.caller import MAX_SESSION
from pdserve.gateway.http import (
    MAX_TOOLS,
    NEUTRAL_VALUES,
    ModelName,
    Priority,
    ReasoningBody,
    StrictModel,
    TextOrObjects,
    ThinkingChoice,
    ThinkingFields,
    TokenLimit,
    fields,
    parse_body,
    thinking_budget,
    thinking_variables,
)
from pdserve.gateway.openai.request_models import PENALTIES, TemplateKwargs
from pdserve.gateway.sampling import PenaltyWindow, bounded, refuse, within_window
from pdserve.text import VERBOSITIES, RequestedSampling, Structure, suggested_variables

# fmt: off
# They change no answer of this server.
IGNORED_FIELDS: frozenset[str] = frozenset(
    (
        "service_tier", "prompt_cache_retention", "prompt_cache_options", "stream_options",
        "access_programs", "request_id",
        "context_management",  # prompts are never shortened, as with truncation
    )
)
# Refused unless the value is one of these, or the field is served.
REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    **fields.REFUSED_FIELDS,
    **dict.fromkeys(
        (
            "background", "conversation", "prompt", "moderation", "image", "personality",
        ),
        NEUTRAL_VALUES,
    ),
    "truncation": (None, "disabled", "auto"),  # prompts are never shortened
}
# Chats' names for fields that this API names differently.
FIELD_ALIASES: dict[str, str] = {
    **{
        name: "max_output_tokens"
        for name, other in {**fields.FIELD_ALIASES, "max_tokens": "max_tokens"}.items()
        if other == "max_tokens"
    },
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "functions": "tools",
    "logprobs": "include and top_logprobs",
}
LOGPROBS = "message.output_text.logprobs"
MAX_PAIRS = 16  # of metadata
Key = Annotated[str, StringConstraints(max_length=64)]
Value = Annotated[str, StringConstraints(max_length=512)]

# fmt: on


def _metadata(value: Any) -> Any:
    """Accept the pairs of metadata, with JSON for a value that is not text. Refuses too many before
    checking them: an error for each takes long."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_PAIRS:
        raise ValueError(f"at most {MAX_PAIRS} pairs, not {len(value)}")
    return {
        name: item if isinstance(item, str) else to_json(item).decode()
        for name, item in value.items()
        if item is not None
    }


class ResponseFormat(StrictModel):
    """What the text of an answer has to match."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(StrictModel):
    format: ResponseFormat | None = None
    verbosity: Literal[*VERBOSITIES] | None = None  # type: ignore[valid-type]


class InputTokensBody(ThinkingFields):
    """Body of /v1/responses/input_tokens, and what /v1/responses shares with it."""

    model: ModelName = ""
    input: TextOrObjects
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None  # a mode, or an object that names functions
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateKwargs = None
    text: TextConfig | None = None
    reasoning: ReasoningBody | None = None

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def summarized(self) -> bool:
        return self.reasoning is not None and self.reasoning.summary is not None

    def template_variables(self, effort: str | None) -> dict[str, Any]:
        """Return the template variables; `effort`: an item's effort, which replaces `reasoning`.
        Raises ServiceError for fields that contradict each other."""
        verbosity = self.text.verbosity if self.text else None
        fields = [
            field
            for field in self._thinking_fields()
            if not (effort and field.field == "reasoning")
        ]
        if effort:
            fields.append(ThinkingChoice("reasoning", effort=effort))
        return thinking_variables(fields) | suggested_variables(None, verbosity)

    def _thinking_fields(self) -> Iterator[ThinkingChoice]:
        yield from super()._thinking_fields()
        if self.reasoning is not None:
            yield self.reasoning.choice()

    def structure(self) -> Structure | None:
        """Return the structure. Raises ServiceError for a missing schema."""
        format_ = self.text.format if self.text else None
        if format_ is None or format_.type == "text":
            return None
        if format_.type == "json_object":
            return Structure("json_object", None, "text.format")
        if format_.schema_ is None:
            raise refuse("text.format.schema", "text.format.schema is required")
        return Structure(
            "json_schema", format_.schema_, "text.format.schema", lenient=not format_.strict
        )


class ResponsesBody(InputTokensBody):
    """Body of /v1/responses."""

    model_config = ConfigDict(json_schema_extra=bounded)
    stream: bool | None = None
    store: bool | None = None
    include: list[str] | None = None  # unless it is LOGPROBS, a hint
    max_output_tokens: TokenLimit = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: PenaltyWindow = None  # llama.cpp's, for penalties
    seed: int | None = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = Field(None, ge=1)  # calls that the gateway carries out
    priority: Priority | None = None
    metadata: Annotated[dict[Key, Value] | None, BeforeValidator(_metadata)] = None
    session_id: str | None = Field(None, max_length=MAX_SESSION)
    user: str | None = None
    # Only shown in the answer.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def shows_reasoning(self) -> bool:
        return not (self.reasoning and self.reasoning.exclude)

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def sampling(self) -> RequestedSampling:
        """Return the sampling. Raises ServiceError for fields that contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", f"top_logprobs needs include: ['{LOGPROBS}']")
        penalties = {n: value for n in PENALTIES if (value := getattr(self, n)) is not None}
        return RequestedSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_output_tokens,
            max_tokens_field="max_output_tokens",
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_field="top_logprobs",
            structure=self.structure(),
            **thinking_budget(self.thinking_bounds()),
            **within_window(penalties, self.repeat_last_n),
        )


def parse_responses(body: Mapping[str, Any]) -> ResponsesBody:
    """Parse a body. Raises ServiceError INVALID_ARGUMENT naming the first wrong field."""
    return parse_body(
        ResponsesBody, body, refused=REFUSED_FIELDS, ignored=IGNORED_FIELDS, instead=FIELD_ALIASES
    )


def parse_input_tokens(body: Mapping[str, Any]) -> InputTokensBody:
    """Parse a body of /v1/responses/input_tokens; fields that change no prompt are ignored. Raises
    ServiceError INVALID_ARGUMENT that names the field."""
    ignored = IGNORED_FIELDS | ResponsesBody.model_fields.keys()
    return parse_body(
        InputTokensBody, body, refused=REFUSED_FIELDS, ignored=ignored, instead=FIELD_ALIASES
    )
