"""Request bodies of Anthropic's API, and the fields that are refused by name or ignored on purpose.
Types are strict here; the limits of sampling parameters are in gateway/sampling.py."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints

from pdserve.engine.api import MAX_ENTRIES, MAX_STOP_CHARS
from pdserve.gateway.anthropic.conversation import (
    ROLES,
    THINKING,
    TOOL_CHOICES,
    TOOLS,
    conversation,
)
from pdserve.gateway.http import fields
from pdserve.gateway.http.fields import NEUTRAL_VALUES, OMITTED_TYPE, Handling, log_unsupported
from pdserve.gateway.http.thinking import Effort, ThinkingBody, ThinkingFields
from pdserve.gateway.http.validation import (
    MAX_TOOLS,
    ArgumentSchema,
    ModelName,
    StrictModel,
    TextOrObjects,
    ToolDescription,
    ToolName,
    check_tools,
    parse_body,
    parsed,
)
from pdserve.gateway.sampling import bounded, refuse
from pdserve.services.common.errors import quoted
from pdserve.text import (
    RequestedSampling,
    Structure,
    TemplateInput,
    Tool,
    ToolUse,
    suggested_variables,
)

# fmt: off
# Refused unless the value is one of these, or the field is served.
REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    **fields.REFUSED_FIELDS,
    **dict.fromkeys(("compaction", "fallbacks", "thread", "user_profile_id"), NEUTRAL_VALUES),
    "speed": (None, "standard"),
}
# They change no answer of this server. The provider's own tools run in a container, and prompts are
# never shortened.
IGNORED_FIELDS: frozenset[str] = frozenset(
    (
        "service_tier", "cache_control", "container", "diagnostics", "inference_geo", "betas",
        "billing_policy", "fallback_credit_token", "workspace_id", "context_management",
    )
)
# They offer tools that cannot be run here.
OMITTED_FIELDS: frozenset[str] = frozenset(("mcp_servers",))
# Names of other APIs for fields that this one names differently.
FIELD_ALIASES: dict[str, str] = {
    **{
        name: {"stop": "stop_sequences"}.get(other, other)
        for name, other in {**fields.FIELD_ALIASES, "stop": "stop"}.items()
        if other in ("stop", "max_tokens", "tools", "tool_choice")
    },
    **dict.fromkeys(
        ("response_format", "structured_outputs", "guided_json", "json_schema", "format"),
        "output_config.format",
    ),
    **dict.fromkeys(
        ("thinking_token_budget", "thinking_budget", "reasoning_budget"), "thinking.budget_tokens"
    ),
    "input": "messages",
    "prompt": "messages",
    "instructions": "system",
    "reasoning": "thinking",
    "reasoning_effort": "output_config.effort",
    "include_reasoning": "thinking.display",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
MAX_MESSAGES = 4096
StopSequence = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]

# fmt: on


class AnthropicTool(StrictModel):
    """The definition of a function that the client runs when the model calls it."""

    name: ToolName
    description: ToolDescription | None = None
    input_schema: ArgumentSchema
    strict: bool | None = None

    def as_tool(self, index: int) -> Tool:
        """Convert the definition to a Tool; `index` is its position in the field `tools`, for
        errors."""
        param = f"tools[{index}].input_schema"
        return Tool(self.name, self.description or "", self.input_schema, bool(self.strict), param)


class AnthropicToolChoice(StrictModel):
    type: Literal[*TOOL_CHOICES]  # type: ignore[valid-type]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def _as_thinking(value: Any) -> Any:
    """Convert a boolean for `thinking`, as in other APIs, to Anthropic's object; other values are
    unchanged."""
    return {"type": "adaptive" if value else "disabled"} if isinstance(value, bool) else value


def _as_object(choice: Any) -> Any:
    """Convert a string for `tool_choice`, as in OpenAI's API, to Anthropic's object; other values
    are unchanged."""
    return {"type": {"required": "any"}.get(choice, choice)} if isinstance(choice, str) else choice


class Thinking(ThinkingBody):
    """The field `thinking`: whether the model thinks before it answers, and at most how much.
    Without it, the model's chat template decides."""

    type: Literal[*THINKING]  # type: ignore[valid-type]
    display: Any = None  # "omitted" hides the reasoning; any other value shows it


class RequestMetadata(StrictModel):
    user_id: Any = None


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Effort = None
    format: OutputFormat | None = None


class TurnConfig(OutputConfig):
    """The field `output_config` of a system message: the configuration from that message on."""

    format: None = None  # only the request has one


class MessageTurn(StrictModel):
    """One message of the conversation: its role and content and, in system messages, settings for
    the turns after it."""

    role: Literal[*ROLES]  # type: ignore[valid-type]
    content: TextOrObjects | None = None
    # Of system messages
    output_config: TurnConfig | None = None
    clear_at: Literal["next_user_message", "never"] | None = None  # what ends it


class CountBody(ThinkingFields):
    """Body of /v1/messages/count_tokens: the fields of /v1/messages that determine the prompt."""

    model: ModelName = ""
    messages: list[MessageTurn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: TextOrObjects | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[AnthropicToolChoice | None, BeforeValidator(_as_object)] = None
    thinking: Annotated[
        Thinking | None,
        BeforeValidator(_as_thinking, json_schema_input_type=bool | Thinking | None),
    ] = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # an earlier output_config.format

    def conversation(self) -> TemplateInput:
        """Return the input of the chat template. If the last message is the assistant's, the model
        continues it. Raises ServiceError for messages that are not supported."""
        turns = conversation(self.system, list(self._visible_messages()))
        last = turns[-1]
        continues = last["role"] == "assistant"
        if continues and last.get("tool_calls"):
            text = "messages: the last one calls tools, and their results are missing"
            raise refuse("messages", text)
        return TemplateInput(
            turns,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            suggested=self._template_variables(),
        )

    def _visible_messages(self) -> Iterator[tuple[str, Any]]:
        """Yield the role and content of each message; the content is None if the message is not
        shown to the model. Raises ServiceError for a missing content, or a field that the role may
        not have."""
        last_user = max(
            (index for index, turn in enumerate(self.messages) if turn.role == "user"), default=0
        )
        for index, turn in enumerate(self.messages):
            for name in ("output_config", "clear_at"):
                if turn.role != "system" and getattr(turn, name) is not None:
                    path = f"messages[{index}].{name}"
                    raise refuse(path, f"{path} is allowed in system messages only")
            missing = turn.content is None and turn.role != "assistant"
            if missing and not (turn.output_config and turn.output_config.effort):
                path = f"messages[{index}].content"
                raise refuse(path, f"{path} is required")
            cleared = turn.clear_at == "next_user_message" and index < last_user
            yield turn.role, None if missing or cleared else turn.content or ()

    def tool_use(self) -> ToolUse | None:
        """Return which tools the model may or must call, None without tools. Raises ServiceError
        for an invalid tool or tool_choice."""
        tools = _parse_tools(self.tools or ())
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        tool_names = {tool.name for tool in tools}
        if choice.type == "tool" and choice.name not in tool_names:
            text = f"tool_choice.name: no tool has the name {quoted(choice.name or '')}"
            raise refuse("tool_choice.name", text)
        if not tools:
            if choice.type == "any":
                raise refuse("tool_choice", "tool_choice needs tools")
            # "none" forbids the tools of servers as well.
            return ToolUse((), "none") if choice.type == "none" else None
        return ToolUse(
            tools,
            {"auto": "auto", "none": "none"}.get(choice.type, "required"),  # type: ignore[arg-type]
            (choice.name,) if choice.type == "tool" and choice.name else (),
            not choice.disable_parallel_tool_use,
        )

    def structure(self) -> Structure | None:
        format_ = self.output_config.format if self.output_config else None
        field = "output_config.format" if format_ else "output_format"
        format_ = format_ or self.output_format
        return Structure("json_schema", format_.schema_, f"{field}.schema") if format_ else None

    def _template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template that the request sets; a template may not use
        them. Raises ServiceError for fields that contradict each other."""
        configs = (self.output_config, *(turn.output_config for turn in self.messages))
        efforts = [config.effort for config in configs if config and config.effort]
        effort = efforts[-1] if efforts else None  # counts for answers without reasoning, too
        return suggested_variables(effort, None) | self.thinking_variables()


def _or_unbounded(schema: dict[str, Any]) -> None:
    """Add -1, which means as many tokens as fit in the context, to the JSON schema of
    `max_tokens`."""
    schema["anyOf"] = [{"type": schema.pop("type")}, {"const": -1}]


class MessagesBody(CountBody):
    """Body of /v1/messages."""

    model_config = ConfigDict(json_schema_extra=bounded)
    max_tokens: int = Field(json_schema_extra=_or_unbounded)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[StopSequence] | None = Field(None, max_length=MAX_ENTRIES["stop"])
    metadata: RequestMetadata | None = None

    @property
    def user(self) -> str | None:
        user = self.metadata.user_id if self.metadata else None
        return user if isinstance(user, str) else None

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def sampling(self) -> RequestedSampling:
        """Return the sampling parameters. Raises ServiceError for fields that contradict each
        other."""
        return RequestedSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=None if self.max_tokens == -1 else self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            structure=self.structure(),
            thinking_budget=self._thinking_budget(),
            thinking_budget_field="thinking.budget_tokens",
        )

    def _thinking_budget(self) -> int | None:
        thinking = self.thinking
        if thinking is None or thinking.type == "disabled":
            return None
        field = "thinking.budget_tokens"
        if thinking.budget_tokens is None and thinking.type != "enabled":
            return None
        if thinking.budget_tokens is None:
            raise refuse(field, f"{field} is required")
        if thinking.budget_tokens < 1:
            raise refuse(field, f"{field} must be at least 1, not {thinking.budget_tokens}")
        if self.max_tokens != -1 and thinking.budget_tokens >= self.max_tokens:
            raise refuse(field, f"{field} must be less than max_tokens ({self.max_tokens})")
        return thinking.budget_tokens


def _parse_tools(values: list[dict[str, Any]] | tuple[()]) -> list[Tool]:
    """Validate the field `tools` and return the supported tools; logs the types of those that are
    left out. Raises ServiceError for an invalid tool or a duplicate name."""
    tools: dict[str, Tool] = {}
    left_out = []
    for index, value in enumerate(values):
        path = f"tools[{index}]"
        kind = str(value.get("type") or "custom")
        handling = TOOLS.get(kind, OMITTED_TYPE).handling
        if handling is Handling.LEFT_OUT:
            left_out.append(kind)
            continue
        if handling is Handling.REFUSED:
            text = f"{quoted(kind)} is not supported by this server, only tools of the client"
            raise refuse(f"{path}.type", f"{path}.type: {text}")
        tool = parsed(AnthropicTool, value, path)
        if tool.name in tools:
            raise refuse(
                f"{path}.name", f"{path}.name: two tools have the name {quoted(tool.name)}"
            )
        tools[tool.name] = tool.as_tool(index)
    log_unsupported(Handling.LEFT_OUT, "tools", left_out)
    parsed_tools = list(tools.values())
    check_tools(parsed_tools)
    return parsed_tools


B = TypeVar("B", bound=CountBody)


def parse(kind: type[B], body: Mapping[str, Any]) -> B:
    """Validate a request body as a model of type `kind`. When only tokens are counted, the fields
    of /v1/messages that do not change the prompt are ignored. Raises ServiceError INVALID_ARGUMENT
    that names the first wrong field."""
    return parse_body(
        kind,
        body,
        refused=REFUSED_FIELDS,
        ignored=IGNORED_FIELDS | MessagesBody.model_fields.keys(),
        instead=FIELD_ALIASES,
        left_out=OMITTED_FIELDS,
    )
