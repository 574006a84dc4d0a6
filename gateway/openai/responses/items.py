"""Validates the input items of /v1/responses and converts them to the messages of a chat. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from pdserve.gateway.http.fields import (
    DROPPED_TYPE,
    REFUSED_TYPE,
    SERVED_TYPE,
    Handling,
    kept_as_text,
    log_unsupported,
)
from pdserve.gateway.http.thinking import Effort
from pdserve.gateway.http.validation import MAX_TOOLS, StrictModel, TextOrObjects, parsed
from pdserve.gateway.openai.request_models.tools import custom_arguments, written
from pdserve.gateway.openai.responses.tools import ITEMS, PARTS, ROLES, UNKNOWN_ITEM, joined_name
from pdserve.gateway.sampling import refuse
from pdserve.services.common.errors import quoted

MAX_ITEMS = 4096  # of one conversation
Item = dict[str, Any]


class MessageItem(StrictModel):
    """An input item: a message of the user, the assistant, the system or the developer."""

    role: Literal[*ROLES]  # type: ignore[valid-type]
    content: TextOrObjects | None = None

    def normalized(self, path: str, dropped: list[str]) -> Item:
        is_assistant = self.role == "assistant"
        if self.content is None and not is_assistant:
            raise refuse(f"{path}.content", f"{path}.content is required")
        kind = "output_text" if is_assistant else "input_text"
        texts = _texts(self.content or (), f"{path}.content", dropped, history=is_assistant)
        extra: Item = {"annotations": []} if is_assistant else {}
        parts = [{"type": kind, "text": text, **extra} for text in texts]
        return {"type": "message", "role": self.role, "content": parts, "status": "completed"}


class CallItem(StrictModel):
    """An input item: an earlier call by the assistant of a function or a custom tool. Arguments
    that are not JSON are kept as text."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Any = None
    input: Any = None

    def normalized(self, path: str, dropped: list[str]) -> Item:
        field = "arguments" if self.type == "function_call" else "input"
        return {
            "type": self.type,
            "call_id": self.call_id,
            "name": self.name,
            **({"namespace": self.namespace} if self.namespace else {}),
            field: written(getattr(self, field)),
            "status": "completed",
        }


class CallOutputItem(StrictModel):
    """An input item: the output of a function or custom tool that the client has run."""

    type: str
    call_id: str
    output: TextOrObjects | None = None

    def normalized(self, path: str, dropped: list[str]) -> Item:
        output: Any = self.output or ""
        if not isinstance(output, str):
            texts = _texts(output, f"{path}.output", dropped)
            output = [{"type": "input_text", "text": text} for text in texts]
        return {
            "type": self.type,
            "call_id": self.call_id,
            "output": output,
            "status": "completed",
        }


class ReasoningItem(StrictModel):
    """An input item: the assistant's reasoning in an earlier turn. Encrypted reasoning is
    dropped."""

    summary: TextOrObjects | None = None
    content: TextOrObjects | None = None

    def normalized(self, path: str, dropped: list[str]) -> Item:
        thoughts = _texts(self.content or (), f"{path}.content", dropped, history=True)
        summary = _texts(self.summary or (), f"{path}.summary", dropped, history=True)
        return {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": text} for text in summary],
            "content": [{"type": "reasoning_text", "text": text} for text in thoughts],
            "status": "completed",
        }


class ReferenceItem(StrictModel):
    """An input item that refers to an item of a stored response by its id."""

    id: str = Field(min_length=1)

    def normalized(self, path: str, dropped: list[str]) -> Item:
        return {"type": REFERENCE, "at": f"{path}.id"}


class ToolsItem(StrictModel):
    """An input item with additional tools. They are offered to the model for the whole request."""

    type: str
    tools: list[dict[str, Any]] = Field(max_length=MAX_TOOLS)

    def normalized(self, path: str, dropped: list[str]) -> Item:
        return {"type": self.type, "tools": self.tools, "status": "completed"}


class _Effort(StrictModel):
    effort: Effort = None


class ConfigurationItem(StrictModel):
    """An input item that sets the reasoning effort; the last such item of the input applies."""

    reasoning: _Effort | None = None
    text: None = None  # not served

    def normalized(self, path: str, dropped: list[str]) -> Item:
        effort = self.reasoning.effort if self.reasoning else None
        return {"type": "configuration_update", "reasoning": {"effort": effort}}


REFERENCE = "item_reference"
KINDS: dict[str, Any] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CallItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    REFERENCE: ReferenceItem,
    "additional_tools": ToolsItem,
    "tool_search_output": ToolsItem,
    "configuration_update": ConfigurationItem,
}


def parse_input(items: str | Sequence[Mapping[str, Any]]) -> list[Item]:
    """Validate the field `input` and return its items, each with only the fields that are used.
    Logs the types of items and content parts that are dropped. Raises ServiceError for an invalid
    item."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not 1 <= len(items) <= MAX_ITEMS:
        raise refuse("input", f"input must have 1 to {MAX_ITEMS} items, not {len(items)}")
    parsed_items = []
    dropped: list[str] = []
    dropped_parts: list[str] = []
    for index, item in enumerate(items):
        path = f"input[{index}]"
        item_id = item.get("id")
        if not isinstance(item_id, str | None):
            raise refuse(f"{path}.id", f"{path}.id must be a string")
        kind = _kind(item, path)
        entry_type = ITEMS.get(kind) or PARTS.get(kind, UNKNOWN_ITEM)
        if entry_type.handling is Handling.DROPPED:
            dropped.append(kind)
            continue
        if entry_type.handling is Handling.AS_TEXT:
            names = ("status", "call_id", *entry_type.text)
            parsed_item: Item = {
                "type": kind,
                **{name: item[name] for name in names if name in item},
            }
        elif kind in KINDS:
            parsed_item = parsed(KINDS[kind], item, path).normalized(path, dropped_parts)
        else:
            text = f"{path}.type: items of type {quoted(kind)} are not supported by this server"
            raise refuse(f"{path}.type", text)
        parsed_items.append({**parsed_item, "id": item_id} if item_id else parsed_item)
    log_unsupported(Handling.DROPPED, "items", dropped)
    log_unsupported(Handling.DROPPED, "parts", dropped_parts)
    return parsed_items


def _kind(item: Mapping[str, Any], path: str) -> str:
    """Return the type of an input item. An item without a type is a message if it has a role; an
    item with only an id is a reference to a stored item. Raises ServiceError."""
    has_only_id = bool(item.get("id")) and not item.keys() - {"id", "type", "status"}
    default = "message" if "role" in item else REFERENCE if has_only_id else None
    kind = item.get("type") or default
    if not isinstance(kind, str):
        raise refuse(f"{path}.type", f"{path}.type must be a string")
    return REFERENCE if has_only_id and ITEMS.get(kind) is SERVED_TYPE else kind


def conversation(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Convert instructions and input items to the messages of a chat, in the form that chat
    templates expect.

    The instructions and the system messages directly after them become one message, since many
    templates accept only one, at the beginning. Consecutive reasoning, text and calls become one
    turn of the assistant, which also includes what the assistant writes before all its calls have
    outputs. Raises ServiceError for the output of a call that is not among the items.
    """
    turns = _Turns()
    answered = _answered(items)
    call_ids: set[str] = set()
    text_call_ids: set[str] = set()  # the ids of calls that are kept as text
    if instructions:
        turns.say("system", [instructions])
    for index, item in enumerate(items):
        match item["type"]:
            case "message":
                turns.say(item["role"], _texts_of(item["content"]))
            case "reasoning":
                turns.think(_texts_of(item["content"] or item["summary"]))
            case "function_call" | "custom_tool_call" as kind:
                call_ids.add(item["call_id"])
                text_call_ids.discard(item["call_id"])
                is_function = kind == "function_call"
                arguments = item["arguments"] if is_function else custom_arguments(item["input"])
                turns.call(item, arguments, answered=index in answered)
            case "function_call_output" | "custom_tool_call_output" as kind:
                if item["call_id"] in text_call_ids:
                    turns.note(_OUTPUT.as_text(kind, item), of_client=True)
                    continue
                if item["call_id"] not in call_ids:
                    text = f"no earlier call has the call_id {quoted(item['call_id'])}"
                    raise refuse("input", f"input: an item of type {kind}: {text}")
                turns.answer(item)
            case kind:
                entry_type = ITEMS.get(kind, UNKNOWN_ITEM)
                if entry_type.handling is Handling.AS_TEXT:
                    turns.note(entry_type.as_text(kind, item), of_client=entry_type.of_client)
                    if not entry_type.of_client and isinstance(item.get("call_id"), str):
                        text_call_ids.add(item["call_id"])
    turns.release()
    return [_with_text(message) for message in turns.messages]


def _answered(items: Sequence[Item]) -> set[int]:
    """Return the positions of the calls that have an output later in the items. A call id may occur
    several times; an output belongs to the last call with its id before it."""
    last_calls: dict[Any, int] = {}
    answered: set[int] = set()
    for index, item in enumerate(items):
        if KINDS.get(item["type"]) is CallOutputItem:
            if item["call_id"] in last_calls:
                answered.add(last_calls[item["call_id"]])
        elif isinstance(item.get("call_id"), str):
            last_calls[item["call_id"]] = index
    return answered


_OUTPUT = kept_as_text("output", of_client=True)


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message; if its content is a single text part, the content becomes that text."""
    match message["content"]:
        case [{"type": "text", "text": text}]:
            return {**message, "content": text}
    return message


def last_effort(items: Sequence[Item]) -> str | None:
    """Return the reasoning effort of the last input item that sets one, None without such an
    item."""
    efforts = [i["reasoning"]["effort"] for i in items if i["type"] == "configuration_update"]
    return next((effort for effort in reversed(efforts) if effort), None)


class _Turns:
    """Builds the messages of a chat, turn by turn, from input items."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._calling: dict[str, Any] = {}  # the last turn with calls
        self._unanswered: set[str] = set()  # ids of its calls whose answers follow
        self._held: list[Callable[[], None]] = []  # what is added after these answers
        self._notes_turn: dict[str, Any] = {}  # the last turn whose content is only notes

    def note(self, text: str, *, of_client: bool) -> None:
        """Add an item that was converted to text to the last turn of its role, or as a new turn.
        While calls wait for their outputs, an item of the client is held back until all outputs are
        added."""
        role = "user" if of_client else "assistant"
        if self._unanswered and self.messages[-1]["role"] != role:
            self._held.append(partial(self._add_note, role, text))
        else:
            self._add_note(role, text)

    def _add_note(self, role: str, text: str) -> None:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": None})
        turn = self.messages[-1]
        if not turn["content"]:
            turn["content"], self._notes_turn = [], turn
        turn["content"].append({"type": "text", "text": text})

    def say(self, role: str, texts: list[str]) -> None:
        if self._unanswered and role != "assistant":
            self._held.append(partial(self._add, role, texts))
        else:
            self._add(role, texts)

    def _add(self, role: str, texts: list[str]) -> None:
        parts = [{"type": "text", "text": text} for text in texts]
        rules = ("system", "developer")
        last_turn = self.messages[-1] if self.messages else {}
        first_rules = role in rules and len(self.messages) == 1 and last_turn["role"] in rules
        after_notes = last_turn is self._notes_turn and last_turn.get("role") == role
        if role == "assistant":
            turn = self._turn(open_to=("reasoning_content",))
            turn["content"] = turn["content"] or []
            turn["content"] += parts
        elif first_rules or after_notes:
            last_turn["content"] += parts
        else:
            self.messages.append({"role": role, "content": parts})
        self._notes_turn = {}

    def think(self, texts: list[str]) -> None:
        if texts:
            turn = self._turn(open_to=("reasoning_content",))
            earlier = [turn["reasoning_content"]] if "reasoning_content" in turn else []
            turn["reasoning_content"] = "\n".join([*earlier, *texts])

    def call(self, item: Item, arguments: str, *, answered: bool) -> None:
        self._calling = turn = self._turn(open_to=("reasoning_content", "content", "tool_calls"))
        if answered:
            self._unanswered.add(item["call_id"])
        name = joined_name(item.get("namespace"), item["name"])
        function = {"name": name, "arguments": arguments}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)

    def answer(self, item: Item) -> None:
        output = item["output"]
        if not isinstance(output, str):
            output = [{"type": "text", "text": text} for text in _texts_of(output)]
        message = {"role": "tool", "tool_call_id": item["call_id"], "content": output}
        self.messages.append(message)
        self._unanswered.discard(item["call_id"])
        if not self._unanswered:
            self.release()

    def release(self) -> None:
        """Add the messages that were held back until all calls had their outputs."""
        actions, self._held = self._held, []
        for action in actions:
            action()

    def _turn(self, open_to: tuple[str, ...]) -> dict[str, Any]:
        """Return the assistant's turn to which the next item is added: the turn whose calls wait
        for outputs; otherwise the last turn, if it has nothing (apart from notes) outside the
        fields `open_to`; otherwise a new turn."""
        if self._unanswered:
            return self._calling
        last_turn = self.messages[-1] if self.messages else {}
        if last_turn is self._notes_turn:
            open_to = (*open_to, "content")
        if last_turn.get("role") != "assistant" or any(
            last_turn.get(key) and key not in open_to for key in ("content", "tool_calls")
        ):
            last_turn = {"role": "assistant", "content": None}
            self.messages.append(last_turn)
        return last_turn


def _texts(
    content: str | Sequence[Mapping[str, Any]],
    path: str,
    dropped: list[str],
    *,
    history: bool = False,
) -> list[str]:
    """Return the texts of a message's content parts. Appends the types of dropped parts to
    `dropped`; with `history` (the assistant's messages), parts of unknown types are dropped too.
    Raises ServiceError for any other part that is not text; `path` is the content's place in the
    request."""
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type", "text" if "text" in part else None)
        if not kind and not history:
            raise refuse(f"{path}[{index}].type", f"{path}[{index}].type is required")
        handling = PARTS.get(str(kind), DROPPED_TYPE if history else REFUSED_TYPE).handling
        if handling is Handling.DROPPED:
            dropped.append(str(kind))
            continue
        if handling is Handling.REFUSED:
            text = f"parts of type {quoted(str(kind))} are not supported by this server, only text"
            raise refuse(f"{path}[{index}].type", f"{path}[{index}].type: {text}")
        key = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(key), str):
            raise refuse(f"{path}[{index}].{key}", f"{path}[{index}].{key} must be a string")
        texts.append(part[key])
    return texts


def _texts_of(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the texts of content parts that are already validated."""
    return [part["text"] for part in parts]
