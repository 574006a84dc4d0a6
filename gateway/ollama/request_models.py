"""Request bodies of Ollama's API, their conversion to messages for chat templates, and the fields
that are refused by name or ignored on purpose.

Types are strict here; the limits of sampling parameters are in gateway/sampling.py. Pure.
"""

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)

from pdserve.engine.api import BOUNDS, MAX_ENTRIES, MAX_STOP_CHARS
from pdserve.gateway.http import fields
from pdserve.gateway.http.fields import NEUTRAL_VALUES
from pdserve.gateway.http.thinking import ThinkingFields, thinking_budget
from pdserve.gateway.http.validation import MAX_TOOLS, StrictModel, parse_body
from pdserve.gateway.openai import MAX_INPUTS, EmbeddingBody
from pdserve.gateway.openai.request_models import MAX_MESSAGES, MAX_TOOL_CALLS, ToolBody, tool_use
from pdserve.gateway.sampling import PenaltyWindow, bounded, refuse, within_window
from pdserve.services.common.errors import ServiceError
from pdserve.text import (
    ChatCompletionRequest,
    RequestedSampling,
    Structure,
    TemplateInput,
    TextCompletionRequest,
    ToolUse,
)


def _no_images(value: Any) -> None:
    if value not in (None, []):
        raise ValueError("images are not supported by this server")


class OllamaFunction(StrictModel):
    """The function in a tool call of an earlier message; `arguments` is an object, or the text that
    the model wrote."""

    name: str
    arguments: Any = None


class OllamaCall(StrictModel):
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(StrictModel):
    """One message of a conversation. Its role is checked later, in text/templates, when the chat
    template is filled."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = Field(None, max_length=MAX_TOOL_CALLS)
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[None, BeforeValidator(_no_images)] = None


def conversation(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Convert messages to the turns of a chat, in the form that chat templates expect.

    Most of Ollama's clients send tool calls without ids, which templates require, so each call
    without one gets an id. A tool result belongs to the call with its id; without an id, to the
    first call without a result that has its tool's name, or else to the first call without a
    result.
    """
    turns: list[dict[str, Any]] = []
    open_calls = _OpenCalls()
    num_calls = 0
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                # Nine letters, as Mistral's templates require.
                id_ = call.id or f"call{num_calls:05d}"
                num_calls += 1
                open_calls.add(id_, call.function.name)
                function = {"name": call.function.name, "arguments": call.function.arguments}
                calls.append({"id": id_, "type": "function", "function": function})
            turn |= {"content": message.content or None, "tool_calls": calls}
        if message.role == "tool":
            id_, tool = open_calls.take(message.tool_call_id, message.tool_name)
            fields = {"tool_call_id": id_, "name": tool}
            turn |= {key: value for key, value in fields.items() if value}
        turns.append(turn)
    return turns


class _OpenCalls:
    """The tool calls that have no result yet, in order. Each call is visited once, as there may be
    many."""

    def __init__(self) -> None:
        self._tools: dict[str, str] = {}  # by the ids of open calls
        self._ids: defaultdict[str, deque[str]] = defaultdict(deque)  # by tool, closed ones too

    def add(self, id_: str, tool: str) -> None:
        self._tools[id_] = tool
        self._ids[tool].append(id_)

    def take(self, id_: str | None, tool: str | None) -> tuple[str, str]:
        """Find the call to which a result belongs, by call id or tool name, and remove it. Returns
        the call's id and tool name, each empty if unknown."""
        ids = self._ids.get(tool or "", deque())
        while not id_ and ids:
            first = ids.popleft()
            id_ = first if first in self._tools else None
        id_ = id_ or next(iter(self._tools), "")
        called_tool = self._tools.pop(id_, "")
        return id_, tool or called_tool


# fmt: off
# Refused unless the value is one of these.
UNSERVED_FIELDS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("suffix", "template", "context", "images", "width", "height", "steps"), NEUTRAL_VALUES
)
# The same where an answer is generated, unless the field is served.
REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    **fields.REFUSED_FIELDS,
    **UNSERVED_FIELDS,
    "tool_choice": (*NEUTRAL_VALUES, "auto"),
}
# Hints: how long a model stays loaded, and how Ollama handles a prompt that is too long.
IGNORED_FIELDS: frozenset[str] = frozenset(("keep_alive", "truncate", "shift"))
_LIMITS = ("max_tokens", *(n for n, other in fields.FIELD_ALIASES.items() if other == "max_tokens"))
FIELD_ALIASES: dict[str, str] = {
    **dict.fromkeys(
        (
            *_LIMITS, "temperature", "top_k", "top_p", "min_p", "seed", "random_seed", "stop",
            "stop_sequences", "repeat_penalty", "repetition_penalty", "repeat_last_n",
            "presence_penalty", "frequency_penalty",
        ),
        "options",
    ),
    **dict.fromkeys(
        ("response_format", "structured_outputs", "guided_json", "json_schema"), "format"
    ),
    **dict.fromkeys(("reasoning", "reasoning_effort"), "think"),
}
# For fields of `options`, which are refused as the others are.
OPTION_ALIASES: dict[str, str] = {
    **dict.fromkeys(_LIMITS, "num_predict"),
    "repetition_penalty": "repeat_penalty",
}
# Options for how Ollama loads and runs a model.
IGNORED_OPTIONS: frozenset[str] = frozenset(
    (
        "num_ctx", "num_batch", "num_gpu", "num_thread", "num_keep", "main_gpu", "numa",
        "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock",
        "embedding_only", "penalize_newline", "mirostat_tau", "mirostat_eta",
    )
)
_REPETITION = BOUNDS["repetition_penalty"].api
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]

# fmt: on


def _format(value: Any) -> Any:
    if value is None or value in ("", "json") or isinstance(value, dict):
        return value
    raise ValueError('must be "json" or a JSON schema')


def _texts(value: Any) -> Any:
    if value is None or value == "":
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    if len(texts) > MAX_INPUTS:
        raise ValueError(f"at most {MAX_INPUTS} texts, not {len(texts)}")
    return texts


_TEXT = {"type": "string"}
Format = Annotated[
    Any,
    AfterValidator(_format),
    WithJsonSchema({"anyOf": [{"enum": ["", "json"]}, {"type": "object"}, {"type": "null"}]}),
]
Texts = Annotated[
    Any,
    AfterValidator(_texts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "maxItems": MAX_INPUTS},
                {"type": "null"},
            ]
        }
    ),
]


class OllamaOptions(StrictModel):
    """The object `options`: sampling parameters. Missing ones have the model's default values."""

    model_config = ConfigDict(json_schema_extra=bounded)
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None  # -1: any
    stop: list[StopString] | None = Field(None, max_length=MAX_ENTRIES["stop"])
    num_predict: int | None = None  # null, 0 and below: the rest of the context
    repeat_penalty: float | None = Field(None, ge=_REPETITION.low, le=_REPETITION.high)
    repeat_last_n: PenaltyWindow = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def penalties(self) -> dict[str, Any]:
        """Return the repetition penalties that are set, as arguments of RequestedSampling."""
        penalties = {
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        set_penalties = {name: value for name, value in penalties.items() if value is not None}
        return within_window(set_penalties, self.repeat_last_n)


class NamedModel(StrictModel):
    """Base class of request bodies that name a model, with or without the tag `:latest`. The name
    is optional if only one model is served."""

    model: str | None = None


class OllamaGeneration(ThinkingFields, NamedModel):
    """The fields that /api/chat and /api/generate share."""

    conversation_field: ClassVar[str]
    system: str | None = None  # before the conversation
    stream: bool | None = None  # true
    format: Format = None
    options: OllamaOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @abstractmethod
    def turns(self) -> list[dict[str, Any]]:
        """Return the turns of the conversation in the form that chat templates expect; empty if
        there are none."""

    def tool_use(self) -> ToolUse | None:
        """Return which tools the model may call, None without tools. Raises ServiceError for an
        invalid tool."""
        return None

    def request(self) -> ChatCompletionRequest | TextCompletionRequest | None:
        """Return the request for the model; None if the body has no message or prompt, and thus
        only loads the model. If the last message is the assistant's, the model continues it. Raises
        ServiceError for fields that contradict each other."""
        turns = self.turns()
        if not turns:
            return None
        if self.system:
            turns = [{"role": "system", "content": self.system}, *turns]
        continues = turns[-1]["role"] == "assistant" and not turns[-1].get("tool_calls")
        template = TemplateInput(
            turns,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            suggested=self.thinking_variables(),
            messages_field=self.conversation_field,
        )
        return ChatCompletionRequest(
            self.model or "", template, self.sampling(), tool_use=self.tool_use()
        )

    def sampling(self) -> RequestedSampling:
        """Return the sampling parameters. Raises ServiceError for fields that contradict each
        other."""
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "top_logprobs needs logprobs: true")
        options = self.options or OllamaOptions.model_validate({})
        limit = options.num_predict or 0
        return RequestedSampling(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=None if options.seed == -1 else options.seed,
            stop=tuple(options.stop or ()),
            max_tokens=limit if limit > 0 else None,
            max_tokens_field="options.num_predict",
            structure=self._structure(),
            **thinking_budget(self.thinking_bounds()),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_field="top_logprobs",
            **options.penalties(),
        )

    def _structure(self) -> Structure | None:
        if isinstance(self.format, dict):
            return Structure("json_schema", self.format, "format", lenient=True)
        return Structure("json_object", None, "format") if self.format else None


def _with_type(tool: Any) -> Any:
    """Add the type `function` to a tool without a type."""
    return {**tool, "type": tool.get("type") or "function"} if isinstance(tool, dict) else tool


class OllamaChatBody(OllamaGeneration):
    """Body of /api/chat."""

    conversation_field = "messages"
    messages: list[OllamaMessage] | None = Field(None, max_length=MAX_MESSAGES)
    tools: list[Annotated[ToolBody, BeforeValidator(_with_type)]] | None = Field(
        None, max_length=MAX_TOOLS
    )

    def turns(self) -> list[dict[str, Any]]:
        return conversation(self.messages or ())

    def tool_use(self) -> ToolUse | None:
        return tool_use(self.tools or [], None, None)


class OllamaGenerateBody(OllamaGeneration):
    """Body of /api/generate: one message of the user, or with `raw` a text to continue without a
    chat template."""

    conversation_field = "prompt"
    prompt: str | None = None
    raw: bool | None = None  # the prompt is text to continue, without a chat template

    def request(self) -> ChatCompletionRequest | TextCompletionRequest | None:
        if not (self.raw and self.prompt):
            return super().request()
        thinking = {choice.field: choice.enabled for choice in self._thinking_fields()}
        for name, value in {"system": self.system, **thinking}.items():
            if value:
                raise refuse(name, f"{name} needs a chat template, and raw: true has none")
        return TextCompletionRequest(self.model or "", [self.prompt], self.sampling())

    def turns(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.prompt}] if self.prompt else []


class OllamaEmbedBody(NamedModel):
    """Body of /api/embed."""

    input: Texts = None
    truncate: bool | None = None  # true: a text that is too long loses its end
    dimensions: int | None = Field(None, ge=1)
    options: dict[str, Any] | None = None  # an embedding is not sampled

    def embedding(self) -> EmbeddingBody | None:
        """Convert to a body of OpenAI's /v1/embeddings; None without inputs."""
        if not self.input:
            return None
        return EmbeddingBody.model_construct(
            model=self.model or "",
            input=self.input,
            dimensions=self.dimensions,
            truncate_prompt_tokens=None if self.truncate is False else -1,
        )


class OllamaEmbeddingsBody(NamedModel):
    """Body of /api/embeddings, the predecessor of /api/embed, which takes one text."""

    prompt: str | None = None
    options: dict[str, Any] | None = None

    def embedding(self) -> EmbeddingBody | None:
        """Convert to a body of OpenAI's /v1/embeddings; None without a prompt."""
        if not self.prompt:
            return None
        return EmbeddingBody.model_construct(
            model=self.model or "", input=[self.prompt], truncate_prompt_tokens=-1
        )


class OllamaShowBody(NamedModel):
    """Body of /api/show."""

    name: str | None = None  # an earlier name of `model`


B = TypeVar("B", bound=NamedModel)


def parse(kind: type[B], body: Mapping[str, Any]) -> B:
    """Validate a request body as a model of type `kind`, including its `options`. Raises
    ServiceError INVALID_ARGUMENT that names the first wrong field."""
    generates = issubclass(kind, OllamaGeneration)
    options = body.get("options")
    if generates and isinstance(options, Mapping):
        try:
            parse_body(
                OllamaOptions,
                options,
                refused=fields.REFUSED_FIELDS,
                ignored=IGNORED_OPTIONS,
                instead=OPTION_ALIASES,
            )
        except ServiceError as error:
            prefix = "options." if error.param else "options: "
            raise refuse(f"options.{error.param}".rstrip("."), prefix + error.message) from None
    refused = REFUSED_FIELDS if generates else UNSERVED_FIELDS
    return parse_body(kind, body, refused=refused, ignored=IGNORED_FIELDS, instead=FIELD_ALIASES)
