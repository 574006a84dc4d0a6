"""Request bodies of the OpenAI API: strict types here, bounds in gateway/sampling.py.

Unknown fields are ignored and named in the debug log, as vLLM does. What becomes of known ones that
are not served is in fields.py.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    ValidationError,
)

from pdserve.engine.api.sampling_bounds import MAX_ENTRIES
from pdserve.gateway.openai.body import Body
from pdserve.gateway.openai.fields import IGNORED, OF_PROMPTS, REFUSED, refused_field
from pdserve.gateway.openai.tools import MAX_TOOLS, ToolBody, tool_use
from pdserve.gateway.sampling import RequestedSampling, refuse
from pdserve.gateway.service import client_errors
from pdserve.gateway.text.messages import EFFORTS, TemplateInput
from pdserve.gateway.tool_use import ToolUse
from pdserve.services.host.errors import MAX_QUOTED, ServiceError, cut

log = logging.getLogger("pdserve.gateway.http")

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128  # of one message
MAX_TEMPLATE_KWARGS = 32
_OPTIONAL = ("name", "reasoning_content", "tool_calls", "tool_call_id")  # of a message
MAX_PROMPTS = 128
MAX_FIELDS = 1024  # of a body, unknown ones too
MAX_LOGGED_NAMES = 20  # unknown fields that are named in the log
# Fields that RequestedSampling has under the same name.
_SAME_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "ignore_eos", "min_tokens", "n", "seed", "skip_special_tokens",
)  # fmt: skip


def _stop(value: Any) -> Any:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(stop, str) for stop in value):
        return value
    raise ValueError("must be a string or a list of strings")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _prompt(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if _is_ids(value):
        return [value]
    if isinstance(value, list) and value:
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts, not {len(value)}")
        if all(isinstance(prompt, str) for prompt in value) or all(map(_is_ids, value)):
            return value
    raise ValueError("must be a string, a list of strings, token ids, or a list of token ids")


def _scalars(given: dict[str, Any] | None) -> dict[str, Any] | None:
    for name, value in (given or {}).items():
        if not isinstance(value, str | int | float | None):
            what = "a string, a number, a boolean or null"
            raise ValueError(f"{name[:40]!r} must be {what}")
    return given


def _few(name: str) -> BeforeValidator:
    """Refuses too many entries of a field unseen: an error for each takes long."""
    most = MAX_ENTRIES[name]

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > most:
            raise ValueError(f"at most {most} entries, not {len(value)}")
        return value

    return BeforeValidator(check)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Body):
    """The fields that chat and plain completions share."""

    generates = True
    model: str = ""
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, _few("logit_bias")] = None
    seed: int | None = None
    stop: Annotated[Any, AfterValidator(_stop)] = Field(None, validate_default=True)
    stop_token_ids: Annotated[list[int] | None, _few("stop_token_ids")] = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
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
        """Whether every chunk of a stream has the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def _shared(self) -> dict[str, Any]:
        """Fields of RequestedSampling; a field that is null is not given."""
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "stream_options needs stream: true")
        given = {name: getattr(self, name) for name in _SAME_NAMES}
        return {
            **{name: value for name, value in given.items() if value is not None},
            "logit_bias": _biases(self.logit_bias or {}),
            "stop": tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "include_stop": bool(self.include_stop_str_in_output),
        }


class Message(Body):
    """One message. gateway/text checks its role and content when it fills the template."""

    role: str
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None  # of an assistant's turn, for templates that show it
    reasoning: str | None = None  # the same, as newer vLLM writes it
    tool_calls: list[Any] | None = Field(None, max_length=MAX_TOOL_CALLS)
    tool_call_id: str | None = None
    function_call: None = None  # not served
    prefix: Literal[False] | None = None  # not served: continue_final_message is

    def as_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        more = {name: getattr(self, name) for name in _OPTIONAL}
        given = {name: value for name, value in more.items() if value is not None}
        if self.reasoning is not None:
            given.setdefault("reasoning_content", self.reasoning)
        return {"role": self.role, "content": self.content, **given}


class ConversationBody(Body):
    """Messages, and how the chat template is filled with them."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Field(max_length=MAX_TEMPLATE_KWARGS),
        AfterValidator(_scalars),
    ] = None
    reasoning_effort: Literal[*EFFORTS] | None = None  # type: ignore[valid-type]
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS)

    def conversation(self) -> TemplateInput:
        """Raises ServiceError for fields that contradict each other."""
        if self.add_special_tokens:
            text = "add_special_tokens: the chat template writes every special token of a chat"
            raise refuse("add_special_tokens", text)
        opens = self.add_generation_prompt
        suggested: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            suggested["reasoning_effort"] = self.reasoning_effort
            if self.reasoning_effort == "none":
                suggested["enable_thinking"] = False
        continues = bool(self.continue_final_message)
        with client_errors():
            return TemplateInput(
                [message.as_template() for message in self.messages],
                add_generation_prompt=not continues if opens is None else opens,
                continue_final_message=continues,
                variables=self.chat_template_kwargs or {},
                suggested=suggested,
            )


class ChatBody(ConversationBody, Sampling):
    """Body of /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None  # false: what the model thinks is left out
    separate_reasoning: bool | None = None  # false: it is part of the content

    def tool_use(self) -> ToolUse | None:
        """Raises ServiceError for a wrong tool_choice."""
        return tool_use(self.tools or [], self.tool_choice, self.parallel_tool_calls)

    def sampling(self) -> RequestedSampling:
        """Raises ServiceError for fields that contradict each other."""
        if self.top_logprobs is not None and not self.logprobs:
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
        )


class CompletionBody(Sampling):
    """Body of /v1/completions."""

    prompt: Annotated[Any, AfterValidator(_prompt)]
    max_tokens: int | None = 16  # OpenAI's default and vLLM's; null: what is left of the context
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    @property
    def echo_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> RequestedSampling:
        """Raises ServiceError for fields that contradict each other."""
        n = 1 if self.n is None else self.n
        if self.stream and self.best_of is not None and self.best_of > n:
            raise refuse("best_of", "best_of cannot be streamed")
        return RequestedSampling(
            **self._shared(),
            max_tokens=1 if self.echo_only else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            best_of=self.best_of,
        )


class TokenizeBody(Body):
    """Body of /tokenize for a prompt."""

    model: str = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ConversationBody):
    """Body of /tokenize for messages."""

    model: str = ""
    return_token_strs: bool = False

    def conversation(self) -> TemplateInput:
        """As a chat with these tools has it."""
        use = tool_use(self.tools or [], None, None)
        shown = [tool.as_template() for tool in use.tools] if use else None
        return replace(super().conversation(), tools=shown)


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeBody | TokenizeChatBody:
    """The body of /tokenize, by which of the two it has. Raises ServiceError as `parse` does."""
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise refuse("prompt", "give either prompt or messages")
    if body.get("messages") is None:
        return parse(TokenizeBody, body)
    return parse(TokenizeChatBody, body)


class DetokenizeBody(Body):
    """Body of /detokenize."""

    model: str = ""
    tokens: Annotated[list[int], FailFast()]
    skip_special_tokens: bool = False


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: Mapping[str, Any]) -> B:
    """Raises ServiceError INVALID_ARGUMENT naming the first wrong field as OpenAI writes it."""
    if len(body) > MAX_FIELDS:
        raise refuse("", f"the body has {len(body)} fields, at most {MAX_FIELDS}")
    asked = body if kind.generates else {k: v for k, v in body.items() if k in OF_PROMPTS}
    if refused := refused_field(asked, kind.model_fields):
        raise refuse(*refused)
    try:
        parsed = kind.model_validate(body)
    except ValidationError as error:
        raise _first_error(error) from None
    unknown = sorted(set(body) - kind.model_fields.keys() - IGNORED - REFUSED.keys())
    if unknown:
        names = ", ".join(repr(name[:40]) for name in unknown[:MAX_LOGGED_NAMES])
        log.debug("ignored %d unknown fields: %s", len(unknown), names)
    return parsed


def _first_error(error: ValidationError) -> ServiceError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    param = cut(param, MAX_QUOTED)  # it may have a key of the client's
    if first["type"] == "missing":
        return refuse(param, f"{param} is required")
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return refuse(param, f"{param}: {message.removeprefix('input ')}")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    wrong = [t for t in given if not (t.isascii() and t.isdecimal() and len(t) <= 10)]
    if wrong:
        named = ", ".join(f"{token[:40]!r}" for token in wrong)
        what = "is not a token id" if len(wrong) == 1 else "are not token ids"
        raise refuse("logit_bias", cut(f"logit_bias: {named} {what}", MAX_QUOTED))
    return {int(token): bias for token, bias in given.items()}
