"""Request bodies of the OpenAI API: strict types here, bounds in gateway/sampling.py.

Unknown fields are ignored and named in the debug log, as vLLM does. Known fields that would change
the answer, and that this server does not support, are refused by name.
"""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
)

from pdserve.engine.api.sampling_bounds import MAX_ENTRIES
from pdserve.gateway.sampling import RequestedSampling, refuse
from pdserve.services.host.errors import MAX_QUOTED, ServiceError, cut

log = logging.getLogger("pdserve.gateway.http")

MAX_MESSAGES = 4096
MAX_PROMPTS = 128
MAX_FIELDS = 1024  # of a body, unknown ones too
MAX_LOGGED_NAMES = 20  # unknown fields that are named in the log
# Values that ask for nothing; any other value of these fields is refused.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "use_beam_search": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "prompt_embeds": (None,),
    "lora_request": (None,),
}
# Known fields that are ignored, because they change no answer of this server.
_HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort",
     "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity")
)  # fmt: skip
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


def _few(name: str) -> BeforeValidator:
    """Refuses too many entries of a field unseen: an error for each takes long."""
    most = MAX_ENTRIES[name]

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > most:
            raise ValueError(f"at most {most} entries, not {len(value)}")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """Strict types: no "5" for 5, no true for 1, no NaN."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Body):
    """The fields that chat and plain completions share."""

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
    cache_salt: str | None = Field(None, max_length=256)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _shared(self) -> dict[str, Any]:
        """Fields of RequestedSampling; a field that is null is not given."""
        if self.stream_options and self.stream_options.continuous_usage_stats:
            name = "stream_options.continuous_usage_stats"
            raise refuse(name, f"{name} is not supported by this server")
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

    def as_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content, **named}


class ChatBody(Sampling):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_special_tokens: bool | None = None

    def sampling(self) -> RequestedSampling:
        """Raises ServiceError for fields that contradict each other."""
        if self.add_special_tokens:
            text = "add_special_tokens: the chat template writes every special token of a chat"
            raise refuse("add_special_tokens", text)
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
    """Body of /tokenize: a prompt, or messages."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = Field(None, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


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
    for name, nothing in _UNSUPPORTED.items():
        if name in body and not any(
            type(body[name]) is type(value) and body[name] == value for value in nothing
        ):
            raise refuse(name, f"{name} is not supported by this server")
    try:
        parsed = kind.model_validate(body)
    except ValidationError as error:
        raise _first_error(error) from None
    unknown = sorted(set(body) - kind.model_fields.keys() - _HARMLESS - _UNSUPPORTED.keys())
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
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise refuse("logit_bias", f"logit_bias: {token[:40]!r} is not a token id")
        biases[int(token)] = bias
    return biases
