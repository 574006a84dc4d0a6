"""Request bodies of OpenAI's routes for text generation and tokenization. Types are checked here;
the limits of sampling parameters are in gateway/sampling.py."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, WithJsonSchema

from pdserve.gateway.http.fields import DROPPED_TYPE, SERVED_TYPE, Handling, log_unsupported
from pdserve.gateway.http.thinking import Effort, ReasoningBody, ThinkingChoice, ThinkingFields
from pdserve.gateway.http.validation import MAX_TOOLS, ModelName, TokenLimit
from pdserve.gateway.openai.request_models import base
from pdserve.gateway.openai.request_models.base import Body, parse
from pdserve.gateway.openai.request_models.sampling import Sampling, StructureFields
from pdserve.gateway.openai.request_models.tools import (
    ToolBody,
    custom_arguments,
    tool_use,
    written,
)
from pdserve.gateway.sampling import client_errors, refuse
from pdserve.text import (
    REASONING,
    VERBOSITIES,
    ChatCompletionRequest,
    RequestedSampling,
    TemplateInput,
    ToolUse,
)

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128  # of one message
MAX_TEMPLATE_KWARGS = 32
_THOUGHTS = (*REASONING, "reasoning_details", "thinking_blocks")  # fields of a message
_OPTIONAL = ("name", "reasoning_content", "tool_calls", "tool_call_id")  # of a message
MAX_PROMPTS = 128


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def texts_or_ids(value: Any, max_items: int = MAX_PROMPTS, items_name: str = "prompts") -> Any:
    """Convert a prompt field to a list of texts or a list of token id lists; a single text or id
    list becomes a list of one. Raises ValueError for other types and for more than `max_items`."""
    if isinstance(value, str):
        return [value]
    if _is_ids(value):
        return [value]
    if isinstance(value, list) and value:
        if len(value) > max_items:
            raise ValueError(f"at most {max_items} {items_name}, not {len(value)}")
        if all(isinstance(prompt, str) for prompt in value) or all(map(_is_ids, value)):
            return value
    raise ValueError("must be a string, a list of strings, token ids, or a list of token ids")


def _prompts(value: Any) -> Any:
    return None if value is None else texts_or_ids(value)


def _ids(value: Any) -> Any:
    prompts = _prompts(value)
    if prompts is not None and isinstance(prompts[0], str):
        raise ValueError("must be token ids or a list of token ids")
    return prompts


def _scalars(variables: dict[str, Any] | None) -> dict[str, Any] | None:
    for name, value in (variables or {}).items():
        if not isinstance(value, str | int | float | None):
            types = "a string, a number, a boolean or null"
            raise ValueError(f"{name[:40]!r} must be {types}")
    return variables


TemplateKwargs = Annotated[
    dict[str, Any] | None, Field(max_length=MAX_TEMPLATE_KWARGS), AfterValidator(_scalars)
]
"""Variables of a chat template."""


class CalledFunction(Body):
    """The function in a tool call of an earlier message; `arguments` is usually JSON text."""

    name: str
    arguments: Any = ""


_TEXTS = ("text", "thinking", "summary")  # the fields of a part of a thought that have a text


def _joined_texts(value: Any) -> str | None:
    """Return the text in a field for reasoning: the value if it is a text, or the joined texts of
    an object or of a list of objects; None for any other value."""
    parts = [value] if isinstance(value, dict) else value
    if isinstance(parts, list):
        texts = [part.get(name) for part in parts if isinstance(part, dict) for name in _TEXTS]
        value = "\n".join(text for text in texts if isinstance(text, str))
    return value if isinstance(value, str) else None


Thought = Annotated[str | None, BeforeValidator(_joined_texts)]
"""A thought, or parts that have its text; any other value is ignored."""


class Message(Body):
    """One message of a conversation. The value of its role and its content are checked later, by
    text/messages.py, when the chat template is filled."""

    role: Annotated[str, WithJsonSchema({**base.TEXT, "enum": list(base.ROLES)})]
    content: Annotated[Any, WithJsonSchema(base.CONTENT)] = None
    refusal: str | None = None
    name: str | None = None
    reasoning_content: Thought = None  # of an assistant's turn, for templates that show it
    reasoning: Thought = None  # newer vLLM's name for it
    thinking: Thought = None  # Ollama's name for it
    thoughts: Thought = None
    thought: Thought = None
    tool_plan: Thought = None  # Cohere's
    reasoning_details: Thought = None  # OpenRouter's
    thinking_blocks: Thought = None  # LiteLLM's
    tool_calls: list[Any] | None = Field(None, max_length=MAX_TOOL_CALLS)
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # the one call of an older client
    prefix: bool | None = None  # the answer continues this last message (Mistral, DeepSeek)
    partial: bool | None = None  # Moonshot's and Alibaba's name for it

    def as_template(self, dropped: list[str]) -> dict[str, Any]:
        """Convert the message to the form that chat templates expect. Appends the types of content
        parts that are dropped to `dropped`."""
        optional = {name: getattr(self, name) for name in _OPTIONAL}
        fields = {name: value for name, value in optional.items() if value is not None}
        thoughts = [getattr(self, name) for name in _THOUGHTS]
        if self.role == "assistant":
            thoughts.append(_thoughts_within(self.content))
        if (thought := next(filter(None, thoughts), None)) is not None:
            fields["reasoning_content"] = thought
        if self.function_call is not None and not self.tool_calls:
            function = self.function_call.model_dump()
            call = {"id": _call_id(function["name"]), "type": "function", "function": function}
            fields["tool_calls"] = [call]
        elif self.tool_calls:
            fields["tool_calls"] = [
                _as_function(call) for call in self.tool_calls if not _of_provider(call)
            ]
        role, content = self.role, self.content
        if role == "assistant":
            content = _history(content if content is not None else self.refusal, dropped)
            if content is None and not fields.keys() & {"tool_calls", "reasoning_content"}:
                content = ""
        elif role == "function":
            role, content = "tool", "" if content is None else content
            fields["tool_call_id"] = _call_id(self.name or "")
        if isinstance(content, list):
            content = [_as_text(part) for part in content]
        return {"role": role, "content": content, **fields}


def _call_id(name: str) -> str:
    """Return a call id for a function call of the older API, which has no id."""
    return f"call_{name}"


def _as_function(call: Any) -> Any:
    """Convert an earlier call of a custom tool to a call of the function that the model sees in its
    place. Other calls are returned unchanged."""
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if not isinstance(custom, dict):
        return call
    arguments = custom_arguments(written(custom.get("input")))
    function = {"name": custom.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def _of_provider(call: Any) -> bool:
    """Return whether a tool call in the history was run by another provider and is not in the
    format of a function call."""
    kind = call.get("type") if isinstance(call, dict) else None
    return isinstance(kind, str) and kind not in base.CALLS and "function" not in call


def _thoughts_within(content: Any) -> str | None:
    """Return the reasoning text in a message's content parts of type `thinking`; None if there is
    none."""
    if not isinstance(content, list):
        return None
    parts = [part for part in content if isinstance(part, dict) and part.get("type") == "thinking"]
    return "\n".join(filter(None, (_joined_texts(part.get("thinking")) for part in parts))) or None


def _history(content: Any, dropped: list[str]) -> Any:
    """Return the content of an earlier assistant message without its reasoning and without parts
    that no model here can use; appends the types of the latter to `dropped`."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = str(part.get("type", "text")) if isinstance(part, dict) else "text"
        if base.PARTS.get(kind, DROPPED_TYPE).handling is Handling.DROPPED:
            dropped.append(kind)
        elif kind != "thinking":
            parts.append(part)
    return parts


def _as_text(part: Any) -> Any:
    """Convert a content part to a text part, if it is a string or a part of a type that has a text.
    Other parts are returned unchanged."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
    if kind == "text":
        return {**part, "type": "text"}
    if not isinstance(kind, str) or kind == "thinking" or base.PARTS.get(kind) is not SERVED_TYPE:
        return part
    return {"type": "text", "text": part.get("refusal" if kind == "refusal" else "text")}


class ConversationBody(ThinkingFields, Body):
    """The messages of a conversation, the parameters of the chat template, and tools."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: TemplateKwargs = None
    reasoning_effort: Effort = None
    reasoning: ReasoningBody | None = None
    verbosity: Literal[*VERBOSITIES] | None = None  # type: ignore[valid-type]
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS)

    def conversation(self) -> TemplateInput:
        """Return the input of the chat template. Raises ServiceError for fields that contradict
        each other."""
        if self.add_special_tokens:
            text = "add_special_tokens: the chat template writes every special token of a chat"
            raise refuse("add_special_tokens", text)
        add_prompt = self.add_generation_prompt
        *earlier, last = self.messages
        for index, message in enumerate(earlier):
            if message.prefix or message.partial:
                path = f"messages[{index}].{'prefix' if message.prefix else 'partial'}"
                raise refuse(path, f"{path}: only the last message can be continued")
        continues = bool(self.continue_final_message or last.prefix or last.partial)
        variables = self.thinking_variables()
        if self.verbosity is not None:
            variables["verbosity"] = self.verbosity
        dropped: list[str] = []
        calls = list(self._calls_of_provider())
        provider_call_ids = {call["id"] for call in calls if isinstance(call.get("id"), str)}
        messages = [
            message.as_template(dropped)
            for message in self.messages
            if message.role != "tool" or message.tool_call_id not in provider_call_ids
        ]
        log_unsupported(Handling.DROPPED, "parts", dropped)
        log_unsupported(Handling.DROPPED, "calls", [call["type"] for call in calls])
        with client_errors():
            return TemplateInput(
                messages,
                add_generation_prompt=not continues if add_prompt is None else add_prompt,
                continue_final_message=continues,
                variables=self.chat_template_kwargs or {},
                suggested=variables,
            )

    def _calls_of_provider(self) -> Iterator[dict[str, Any]]:
        for message in self.messages:
            yield from filter(_of_provider, message.tool_calls or ())

    def _thinking_fields(self) -> Iterator[ThinkingChoice]:
        yield from super()._thinking_fields()
        if self.reasoning_effort is not None:
            yield ThinkingChoice("reasoning_effort", effort=self.reasoning_effort)
        if self.reasoning is not None:
            yield self.reasoning.choice()


class ChatBody(ConversationBody, Sampling):
    """Body of /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: TokenLimit = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None  # false: leave reasoning out
    separate_reasoning: bool | None = None  # false: reasoning is part of the content
    # Groq's and llama.cpp's field for both
    reasoning_format: Literal["", "auto", "deepseek", "parsed", "none", "raw", "hidden"] | None = (
        None
    )

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer includes the model's reasoning."""
        excluded = self.reasoning is not None and self.reasoning.exclude
        hidden = self.reasoning_format == "hidden"
        return self.include_reasoning is not False and not excluded and not hidden

    @property
    def separates_reasoning(self) -> bool:
        """Whether the answer has reasoning in its own field; otherwise it is part of the
        content."""
        raw = self.reasoning_format in ("none", "raw")
        return self.separate_reasoning is not False and not raw

    def _bounds_of_thinking(self) -> dict[str, int]:
        return super()._bounds_of_thinking() | self.thinking_bounds()

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of the custom tools, whose input is a text instead of JSON arguments."""
        return frozenset(
            tool.custom.name
            for tool in self.tools or ()
            if tool.type == "custom" and tool.custom is not None
        )

    def tool_use(self) -> ToolUse | None:
        """Return which tools the model may or must call, None without tools. Raises ServiceError
        for an invalid tool_choice."""
        return tool_use(self.tools or [], self.tool_choice, self.parallel_tool_calls)

    def sampling(self) -> RequestedSampling:
        """Return the sampling parameters. Raises ServiceError for fields that contradict each
        other."""
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "top_logprobs needs logprobs: true")
        limit, limit_field = self.max_completion_tokens, "max_completion_tokens"
        if limit is None:
            limit, limit_field = self.max_tokens, "max_tokens"
        return RequestedSampling(
            **self._shared(),
            max_tokens=limit,
            max_tokens_field=limit_field,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_field="top_logprobs",
            prompt_logprobs=self.prompt_logprobs,
        )


class ChatBatchBody(ChatBody):
    """Body of /v1/chat/completions/batch: as of a chat, but `messages` is a list of
    conversations."""

    messages: list[Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]] = Field(  # type: ignore[assignment]
        min_length=1, max_length=MAX_PROMPTS
    )
    n: Literal[1] | None = None  # each conversation has one choice
    stream: Literal[False] | None = None  # not served
    stream_options: None = None  # not served
    prompt_logprobs: None = None  # not served

    @cached_property
    def shared_tools(self) -> ToolUse | None:
        """The tools that the model may or must call in every conversation, computed once. Raises
        ServiceError for an invalid tool_choice."""
        return super().tool_use()

    def tool_use(self) -> ToolUse | None:
        return self.shared_tools

    def chat(self, number: int) -> ChatBody:
        """Return the body of a single chat with conversation `number`. Raises ServiceError for an
        invalid tool_choice."""
        fields = {"messages": self.messages[number], "shared_tools": self.shared_tools}
        return self.model_copy(update=fields)


class CompletionBody(Sampling):
    """Body of /v1/completions."""

    prompt: Annotated[
        Any, AfterValidator(_prompts), WithJsonSchema(base.texts_or_ids(MAX_PROMPTS))
    ] = None
    prompt_token_ids: Annotated[
        Any, AfterValidator(_ids), WithJsonSchema(base.ids(MAX_PROMPTS))
    ] = None
    max_tokens: TokenLimit = 16  # OpenAI's default and vLLM's; null: the rest of the context
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    @property
    def prompt_field(self) -> str:
        """The name of the field that holds the prompts: `prompt` or `prompt_token_ids`."""
        return "prompt" if self.prompt_token_ids is None else "prompt_token_ids"

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, as texts or token ids. Raises ServiceError unless exactly one of
        `prompt` and `prompt_token_ids` is set."""
        if self.prompt is not None and self.prompt_token_ids is not None:
            raise refuse("prompt_token_ids", "set either prompt or prompt_token_ids, not both")
        prompts: list[str] | list[list[int]] | None = getattr(self, self.prompt_field)
        if prompts is None:
            raise refuse("prompt", "prompt is required")
        return prompts

    @property
    def echo_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> RequestedSampling:
        """Return the sampling parameters. Raises ServiceError for fields that contradict each
        other."""
        n = 1 if self.n is None else self.n
        if self.stream and self.best_of is not None and self.best_of > n:
            raise refuse("best_of", "best_of must not be greater than n with stream: true")
        return RequestedSampling(
            **self._shared(),
            max_tokens=1 if self.echo_only else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self._prompt_logprobs(),
            best_of=self.best_of,
        )

    def _prompt_logprobs(self) -> int | None:
        """Return how many alternatives each prompt token's log-probabilities have: the maximum of
        `prompt_logprobs` and, with `echo`, `logprobs`. None if neither is requested."""
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)


class TokenizeBody(Body):
    """Body of /tokenize for a text prompt."""

    model: ModelName = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TemplateBody(StructureFields, ConversationBody):
    """Body of /apply-template: the fields of a chat that determine its prompt, including the tools
    of MCP servers."""

    model: ModelName = ""
    tool_choice: Any = None
    prompt_logprobs: int | None = None

    def chat_request(self) -> ChatCompletionRequest:
        """Return the chat request whose prompt is rendered. Raises ServiceError for fields that
        contradict each other."""
        sampling = RequestedSampling(
            structure=self.structure(), prompt_logprobs=self.prompt_logprobs
        )
        use = tool_use(self.tools or [], self.tool_choice, None)
        return ChatCompletionRequest(self.model, self.conversation(), sampling, tool_use=use)


class TokenizeChatBody(TemplateBody):
    """Body of /tokenize for the messages of a chat."""

    return_token_strs: bool = False


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeBody | TokenizeChatBody:
    """Validate a body of /tokenize, which has either a prompt or messages. Raises ServiceError
    INVALID_ARGUMENT."""
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise refuse("prompt", "set exactly one of prompt and messages")
    if body.get("messages") is None:
        return parse(TokenizeBody, body)
    return parse(TokenizeChatBody, body)


class DetokenizeBody(Body):
    """Body of /detokenize."""

    model: ModelName = ""
    tokens: Annotated[list[int], FailFast()]
    skip_special_tokens: bool = False
