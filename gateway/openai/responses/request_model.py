"""The request body of /v1/responses: its fields, the fields that are refused by name or ignored on
purpose, and its conversion to a chat with the earlier conversation from storage.

Types are strict here; the limits of sampling parameters are in gateway/sampling.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import from_json, to_json

from pdserve.gateway.caller import MAX_SESSION, Caller
from pdserve.gateway.http import fields
from pdserve.gateway.http.api import CodedError
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.fields import NEUTRAL_VALUES, SERVED_TYPE, Handling, log_unsupported
from pdserve.gateway.http.thinking import (
    ReasoningBody,
    ThinkingChoice,
    ThinkingFields,
    thinking_budget,
    thinking_variables,
)
from pdserve.gateway.http.validation import (
    MAX_TOOLS,
    ModelName,
    Priority,
    StrictModel,
    TextOrObjects,
    TokenLimit,
    parse_body,
)
from pdserve.gateway.openai.request_models import PENALTIES, TemplateKwargs
from pdserve.gateway.openai.responses.items import (
    MAX_ITEMS,
    REFERENCE,
    Item,
    conversation,
    last_effort,
    parse_input,
)
from pdserve.gateway.openai.responses.tools import ITEMS, parse_tools, tool_use
from pdserve.gateway.sampling import PenaltyWindow, bounded, refuse, within_window
from pdserve.gateway.service import Service
from pdserve.gateway.storage import ResponseStore
from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.common.errors import quoted
from pdserve.text import (
    VERBOSITIES,
    ChatCompletionRequest,
    RequestedSampling,
    Structure,
    TemplateInput,
    suggested_variables,
)

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
    """Check the number of pairs in `metadata`, and convert values that are not text to JSON. The
    number is checked first, since one error for each of many pairs takes long. Raises
    ValueError."""
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
    """The format that the answer's text must have: any text, JSON, or JSON that matches a
    schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(StrictModel):
    format: ResponseFormat | None = None
    verbosity: Literal[*VERBOSITIES] | None = None  # type: ignore[valid-type]


class InputTokensBody(ThinkingFields):
    """Body of /v1/responses/input_tokens: the fields of /v1/responses that determine the prompt."""

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
        """Return the variables of the chat template that the request sets. `effort` is the
        reasoning effort of the last input item that sets one; it replaces that of `reasoning`.
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
        """Return the structure that the answer must have; None if it may be any text. Raises
        ServiceError for a missing schema."""
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
        """Return the sampling parameters. Raises ServiceError for fields that contradict each
        other."""
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


B = TypeVar("B", bound=InputTokensBody)


def parse(kind: type[B], body: Mapping[str, Any]) -> B:
    """Validate a request body as a model of type `kind`. When only input tokens are counted, the
    fields of /v1/responses that do not change the prompt are ignored. Raises ServiceError
    INVALID_ARGUMENT that names the first wrong field."""
    ignored = IGNORED_FIELDS | ResponsesBody.model_fields.keys()
    return parse_body(kind, body, refused=REFUSED_FIELDS, ignored=ignored, instead=FIELD_ALIASES)


# The ids of a response's items contain the response's own id; input items have "in" before their
# number.
_ITEM_ID = re.compile(r"[a-z]+_([^/]+)_(in)?[0-9]+")
PARSED_RATIO = 3  # memory of a kept response in use, relative to the bytes of its text


class ResponsePrompt:
    """Converts a validated body, together with the stored conversation that it continues, to a chat
    request."""

    def __init__(
        self, body: InputTokensBody, caller: Caller, bodies: BodyReader, store: ResponseStore | None
    ) -> None:
        """Validate the input items and tools. Without a `store`, earlier responses are not found.
        Raises ServiceError for an invalid item or tool."""
        self._body = body
        self._caller = caller
        self._bodies = bodies
        self._store = store
        self._items = parse_input(body.input)
        self.offer = parse_tools(body.tools or ())

    async def items(self) -> list[Item]:
        """Return the items of the whole conversation: those of the previous responses, then the
        request's own. Raises ServiceError if a response or item is not found, or for too many
        items."""
        earlier = await self._earlier_items()
        items = [*earlier, *await self._resolved(earlier)]
        if len(items) > MAX_ITEMS:
            text = f"at most {MAX_ITEMS} items including the earlier ones, not {len(items)}"
            raise refuse("input", text)
        return items

    def request(self, items: list[Item], sampling: RequestedSampling) -> ChatCompletionRequest:
        """Return the chat request for these items and sampling parameters. Raises ServiceError."""
        lists = [i["tools"] for i in items if "tools" in i and ITEMS.get(i["type"]) is SERVED_TYPE]
        if lists:
            self.offer = self.offer.with_more(lists)
        log_unsupported(Handling.LEFT_OUT, "tools", self.offer.left_out)
        body = self._body
        template = TemplateInput(
            conversation(body.instructions, items),
            variables=body.chat_template_kwargs or {},
            suggested=body.template_variables(last_effort(items)),
            messages_field="input",
        )
        tools_in_use = tool_use(self.offer, body.tool_choice, body.parallel_tool_calls is not False)
        return ChatCompletionRequest(body.model, template, sampling, tool_use=tools_in_use)

    async def _resolved(self, earlier: Sequence[Item]) -> list[Item]:
        """Return the input items of the request, with each reference replaced by the item it refers
        to."""
        if all(item["type"] != REFERENCE for item in self._items):
            return self._items
        all_items = [*earlier, *self._items]
        items_by_id = {i["id"]: i for i in all_items if "id" in i and i["type"] != REFERENCE}
        resolved = []
        for item in self._items:
            if item["type"] == REFERENCE and item["id"] not in items_by_id:
                await self._learn(item["id"], item["at"], items_by_id)
            resolved.append(items_by_id[item["id"]] if item["type"] == REFERENCE else item)
        return resolved

    async def _learn(self, name: str, path: str, items_by_id: dict[str, Item]) -> None:
        """Load the stored response that contains the item with id `name`, and add its items to
        `items_by_id`. Raises ServiceError, which names the field `path`, if no stored response
        contains it."""
        match = _ITEM_ID.fullmatch(name)
        if match is not None and self._store is not None:
            stored = await self._store.find(self._caller.tenant.id, f"resp_{match[1]}")
            if stored is not None:
                text = stored.items if match[2] else stored.response
                self._bodies.hold(self._caller, PARSED_RATIO * len(text))
                value = from_json(text)
                items = value if match[2] else value["output"]
                items_by_id.update((item["id"], item) for item in items)
        if name not in items_by_id:
            problem = (
                "was not found" if self._store else "was not found: this server stores no responses"
            )
            raise refuse(path, f"{path}: the item {quoted(name)} {problem}")

    async def _earlier_items(self) -> list[Item]:
        """Return the items of the conversation that `previous_response_id` names; empty if it is
        not set. Raises ServiceError if that response is not found."""
        name = self._body.previous_response_id
        if not name:
            return []
        field = "previous_response_id"
        if self._store is None:
            raise refuse(field, f"{field}: this server stores no responses")
        stored = await self._store.find(self._caller.tenant.id, name)
        if stored is None:
            text = f"the previous response {quoted(name)} was not found"
            raise CodedError(INVALID_ARGUMENT, text, field, "previous_response_not_found")
        self._bodies.hold(self._caller, PARSED_RATIO * stored.num_bytes)
        return [*from_json(stored.items), *from_json(stored.response)["output"]]


async def count_input_tokens(
    service: Service,
    body: InputTokensBody,
    caller: Caller,
    bodies: BodyReader,
    store: ResponseStore | None,
) -> dict[str, Any]:
    """Return the answer of /v1/responses/input_tokens: the number of tokens in the prompt. Raises
    ServiceError."""
    prompt = ResponsePrompt(body, caller, bodies, store)
    sampling = RequestedSampling(structure=body.structure())
    request = prompt.request(await prompt.items(), sampling)
    count = await service.count_prompt(request, caller)
    return {"object": "response.input_tokens", "input_tokens": count}
