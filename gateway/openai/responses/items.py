"""Checks input items of /v1/responses and converts them to the messages of a chat; pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from pdserve.gateway.http.thinking import Effort
from pdserve.gateway.http.validation import MAX_TOOLS, StrictModel, TextOrObjects, parsed
from pdserve.gateway.openai.custom_input import custom_arguments, written
from pdserve.gateway.openai.responses.members import ITEMS, PARTS, ROLES, UNKNOWN_ITEM
from pdserve.gateway.openai.responses.tools import joined_name
from pdserve.gateway.requests.members import DROPPED, REFUSED, SERVED, Fate, kept, note
from pdserve.gateway.sampling import refuse
from pdserve.services.host.errors import quoted

MAX_ITEMS = 4096  # of one conversation
Item = dict[str, Any]


class MessageItem(StrictModel):
    """A turn of the user, an earlier one of the assistant, or a rule for it."""

    role: Literal[*ROLES]  # type: ignore[valid-type]
    content: TextOrObjects | None = None

    def normalized(self, at: str, dropped: list[str]) -> Item:
        of_assistant = self.role == "assistant"
        if self.content is None and not of_assistant:
            raise refuse(f"{at}.content", f"{at}.content is required")
        kind = "output_text" if of_assistant else "input_text"
        texts = _texts(self.content or (), f"{at}.content", dropped, history=of_assistant)
        more: Item = {"annotations": []} if of_assistant else {}
        parts = [{"type": kind, "text": text, **more} for text in texts]
        return {"type": "message", "role": self.role, "content": parts, "status": "completed"}


class FunctionCallItem(StrictModel):
    """A call that the assistant has made. Arguments that are no JSON stay as they are written."""

    call_id: str
    name: str
    namespace: str | None = None
    arguments: Any = None

    def normalized(self, at: str, dropped: list[str]) -> Item:
        return {
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            **_namespace(self.namespace),
            "arguments": written(self.arguments),
            "status": "completed",
        }


class CustomCallItem(StrictModel):
    """A call of a custom tool that the assistant has made."""

    call_id: str
    name: str
    namespace: str | None = None
    input: Any = None

    def normalized(self, at: str, dropped: list[str]) -> Item:
        return {
            "type": "custom_tool_call",
            "call_id": self.call_id,
            "name": self.name,
            **_namespace(self.namespace),
            "input": written(self.input),
            "status": "completed",
        }


class CallOutputItem(StrictModel):
    """What the client's function or custom tool has returned."""

    type: str
    call_id: str
    output: TextOrObjects | None = None

    def normalized(self, at: str, dropped: list[str]) -> Item:
        output: Any = self.output or ""
        if not isinstance(output, str):
            texts = _texts(output, f"{at}.output", dropped)
            output = [{"type": "input_text", "text": text} for text in texts]
        return {
            "type": self.type,
            "call_id": self.call_id,
            "output": output,
            "status": "completed",
        }


class ReasoningItem(StrictModel):
    """What the assistant has thought. Of encrypted thoughts nothing is known here."""

    summary: TextOrObjects | None = None
    content: TextOrObjects | None = None

    def normalized(self, at: str, dropped: list[str]) -> Item:
        thoughts = _texts(self.content or (), f"{at}.content", dropped, history=True)
        summary = _texts(self.summary or (), f"{at}.summary", dropped, history=True)
        return {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": text} for text in summary],
            "content": [{"type": "reasoning_text", "text": text} for text in thoughts],
            "status": "completed",
        }


class ReferenceItem(StrictModel):
    """An item of a response that is kept."""

    id: str = Field(min_length=1)

    def normalized(self, at: str, dropped: list[str]) -> Item:
        return {"type": REFERENCE, "at": f"{at}.id"}


class ToolsItem(StrictModel):
    """Tools that are offered from here on."""

    type: str
    tools: list[dict[str, Any]] = Field(max_length=MAX_TOOLS)

    def normalized(self, at: str, dropped: list[str]) -> Item:
        return {"type": self.type, "tools": self.tools, "status": "completed"}


class _Effort(StrictModel):
    effort: Effort = None


class ConfigurationItem(StrictModel):
    """Another effort of reasoning from here on."""

    reasoning: _Effort | None = None
    text: None = None  # not served

    def normalized(self, at: str, dropped: list[str]) -> Item:
        effort = self.reasoning.effort if self.reasoning else None
        return {"type": "configuration_update", "reasoning": {"effort": effort}}


REFERENCE = "item_reference"
KINDS: dict[str, Any] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    REFERENCE: ReferenceItem,
    "additional_tools": ToolsItem,
    "tool_search_output": ToolsItem,
    "configuration_update": ConfigurationItem,
}


def parse_input(given: str | Sequence[Mapping[str, Any]]) -> list[Item]:
    """Return the items of a request's `input` with the fields in use. Raises ServiceError."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not 1 <= len(given) <= MAX_ITEMS:
        raise refuse("input", f"input must have 1 to {MAX_ITEMS} items, not {len(given)}")
    items = []
    dropped: list[str] = []
    dropped_parts: list[str] = []
    for index, item in enumerate(given):
        at = f"input[{index}]"
        name = item.get("id")
        if not isinstance(name, str | None):
            raise refuse(f"{at}.id", f"{at}.id must be a string")
        kind = _kind(item, at)
        member = ITEMS.get(kind) or PARTS.get(kind, UNKNOWN_ITEM)
        if member.fate is Fate.DROPPED:
            dropped.append(kind)
            continue
        if member.fate is Fate.AS_TEXT:
            names = ("status", "call_id", *member.text)
            made: Item = {"type": kind, **{name: item[name] for name in names if name in item}}
        elif kind in KINDS:
            made = parsed(KINDS[kind], item, at).normalized(at, dropped_parts)
        else:
            text = f"{at}.type: items of type {quoted(kind)} are not supported by this server"
            raise refuse(f"{at}.type", text)
        items.append({**made, "id": name} if name else made)
    note(Fate.DROPPED, "items", dropped)
    note(Fate.DROPPED, "parts", dropped_parts)
    return items


def _kind(item: Mapping[str, Any], at: str) -> str:
    """Return the type of an item. An item of a served type that has only its id is a reference."""
    alone = bool(item.get("id")) and not item.keys() - {"id", "type", "status"}
    default = "message" if "role" in item else REFERENCE if alone else None
    kind = item.get("type") or default
    if not isinstance(kind, str):
        raise refuse(f"{at}.type", f"{at}.type must be a string")
    return REFERENCE if alone and ITEMS.get(kind) is SERVED else kind


def conversation(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat, as templates expect them.

    Instructions and the rules right after them are one message, since many templates take one at
    the beginning. Consecutive reasoning, text and calls are one turn of the assistant, and so is
    what it writes until its calls are answered. Raises ServiceError for the output of a call that
    is not there.
    """
    turns = _Turns()
    answered = _answered(items)
    calls: set[str] = set()
    noted: set[str] = set()  # the ids of calls that are kept as text
    if instructions:
        turns.say("system", [instructions])
    for at, item in enumerate(items):
        match item["type"]:
            case "message":
                turns.say(item["role"], _texts_of(item["content"]))
            case "reasoning":
                turns.think(_texts_of(item["content"] or item["summary"]))
            case "function_call" | "custom_tool_call" as kind:
                calls.add(item["call_id"])
                noted.discard(item["call_id"])
                is_function = kind == "function_call"
                arguments = item["arguments"] if is_function else custom_arguments(item["input"])
                turns.call(item, arguments, answered=at in answered)
            case "function_call_output" | "custom_tool_call_output" as kind:
                if item["call_id"] in noted:
                    turns.note(_OUTPUT.as_text(kind, item), of_client=True)
                    continue
                if item["call_id"] not in calls:
                    text = f"no call before it has the call_id {quoted(item['call_id'])}"
                    raise refuse("input", f"input: a {kind}: {text}")
                turns.answer(item)
            case kind:
                member = ITEMS.get(kind, UNKNOWN_ITEM)
                if member.fate is Fate.AS_TEXT:
                    turns.note(member.as_text(kind, item), of_client=member.of_client)
                    if not member.of_client and isinstance(item.get("call_id"), str):
                        noted.add(item["call_id"])
    turns.release()
    return [_with_text(message) for message in turns.messages]


def _answered(items: Sequence[Item]) -> set[int]:
    """Return the positions of the calls whose outputs follow. Ids may be used again: an output
    belongs to the last call before it."""
    last_calls: dict[Any, int] = {}
    answered: set[int] = set()
    for at, item in enumerate(items):
        if _is_output(item):
            if item["call_id"] in last_calls:
                answered.add(last_calls[item["call_id"]])
        elif isinstance(item.get("call_id"), str):
            last_calls[item["call_id"]] = at
    return answered


_OUTPUT = kept("output", of_client=True)


def _is_output(item: Item) -> bool:
    return KINDS.get(item["type"]) is CallOutputItem


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message, with a text for a content of one part: items always have parts."""
    match message["content"]:
        case [{"type": "text", "text": text}]:
            return {**message, "content": text}
    return message


def last_effort(items: Sequence[Item]) -> str | None:
    """Return the effort of the last item that sets one."""
    efforts = [i["reasoning"]["effort"] for i in items if i["type"] == "configuration_update"]
    return next((effort for effort in reversed(efforts) if effort), None)


class _Turns:
    """Builder of the messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._calling: dict[str, Any] = {}  # the last turn with calls
        self._unanswered: set[str] = set()  # ids of its calls whose answers follow
        self._held: list[Callable[[], None]] = []  # what is added after these answers
        self._noted: dict[str, Any] = {}  # the last turn whose content is only notes

    def note(self, text: str, *, of_client: bool) -> None:
        """Add the kept text of an item to an existing turn, or to a new one; nothing may come
        between calls and their answers."""
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
            turn["content"], self._noted = [], turn
        turn["content"].append({"type": "text", "text": text})

    def say(self, role: str, texts: list[str]) -> None:
        if self._unanswered and role != "assistant":
            self._held.append(partial(self._add, role, texts))
        else:
            self._add(role, texts)

    def _add(self, role: str, texts: list[str]) -> None:
        parts = [{"type": "text", "text": text} for text in texts]
        rules = ("system", "developer")
        last = self.messages[-1] if self.messages else {}
        first_rules = role in rules and len(self.messages) == 1 and last["role"] in rules
        after_notes = last is self._noted and last.get("role") == role
        if role == "assistant":
            turn = self._turn(open_to=("reasoning_content",))
            turn["content"] = turn["content"] or []
            turn["content"] += parts
        elif first_rules or after_notes:
            last["content"] += parts
        else:
            self.messages.append({"role": role, "content": parts})
        self._noted = {}

    def think(self, texts: list[str]) -> None:
        if texts:
            turn = self._turn(open_to=("reasoning_content",))
            before = [turn["reasoning_content"]] if "reasoning_content" in turn else []
            turn["reasoning_content"] = "\n".join([*before, *texts])

    def call(self, item: Item, arguments: str, *, answered: bool) -> None:
        self._calling = turn = self._turn(open_to=("reasoning_content", "content", "tool_calls"))
        if answered:
            self._unanswered.add(item["call_id"])
        name = joined_name(item.get("namespace"), item["name"])
        function = {"name": name, "arguments": arguments}
        made = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(made)

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
        """Add what was held until the calls are answered."""
        held, self._held = self._held, []
        for add in held:
            add()

    def _turn(self, open_to: tuple[str, ...]) -> dict[str, Any]:
        """Return the turn whose calls have no answers yet, or the assistant's last turn if it has
        only notes otherwise, or a new one."""
        if self._unanswered:
            return self._calling
        last = self.messages[-1] if self.messages else {}
        if last is self._noted:
            open_to = (*open_to, "content")
        if last.get("role") != "assistant" or any(
            last.get(key) and key not in open_to for key in ("content", "tool_calls")
        ):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def _texts(
    content: str | Sequence[Mapping[str, Any]],
    at: str,
    dropped: list[str],
    *,
    history: bool = False,
) -> list[str]:
    """Return the texts of parts. Adds the kinds of parts that mean nothing here to `dropped`; with
    `history`, unknown kinds too. Raises ServiceError for another part that is not text.
    """
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type", "text" if "text" in part else None)
        if not kind and not history:
            raise refuse(f"{at}[{index}].type", f"{at}[{index}].type is required")
        fate = PARTS.get(str(kind), DROPPED if history else REFUSED).fate
        if fate is Fate.DROPPED:
            dropped.append(str(kind))
            continue
        if fate is Fate.REFUSED:
            text = f"parts of type {quoted(str(kind))} are not supported by this server, only text"
            raise refuse(f"{at}[{index}].type", f"{at}[{index}].type: {text}")
        key = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(key), str):
            raise refuse(f"{at}[{index}].{key}", f"{at}[{index}].{key} must be a string")
        texts.append(part[key])
    return texts


def _namespace(name: str | None) -> Item:
    return {"namespace": name} if name else {}


def _texts_of(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the texts of parts that have been checked."""
    return [part["text"] for part in parts]
