"""Input items of /v1/responses: checked, and made into the messages of a chat; pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import from_json

from pdserve.gateway.http.validation import StrictModel, TextOrObjects, first_error
from pdserve.gateway.sampling import refuse
from pdserve.services.host.errors import quoted

MAX_ITEMS = 4096  # of one conversation
Item = dict[str, Any]


class MessageItem(StrictModel):
    """A turn of the user, an earlier one of the assistant, or a rule for it."""

    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrObjects

    def normalized(self, at: str) -> Item:
        kind = "output_text" if self.role == "assistant" else "input_text"
        texts = _texts(self.content, f"{at}.content")
        more: Item = {"annotations": []} if self.role == "assistant" else {}
        parts = [{"type": kind, "text": text, **more} for text in texts]
        return {"type": "message", "role": self.role, "content": parts, "status": "completed"}


class FunctionCallItem(StrictModel):
    """A call that the assistant has made."""

    id: str | None = None
    call_id: str
    name: str
    arguments: str

    def normalized(self, at: str) -> Item:
        if self.arguments and not _is_object(self.arguments):
            text = f"{at}.arguments must be a JSON object, written as a string"
            raise refuse(f"{at}.arguments", text)
        call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {"type": "function_call", **call, "status": "completed"}


class FunctionOutputItem(StrictModel):
    """What the client's function has returned."""

    id: str | None = None
    call_id: str
    output: TextOrObjects

    def normalized(self, at: str) -> Item:
        output: Any = self.output
        if not isinstance(output, str):
            texts = _texts(output, f"{at}.output")
            output = [{"type": "input_text", "text": text} for text in texts]
        return {
            "type": "function_call_output",
            "call_id": self.call_id,
            "output": output,
            "status": "completed",
        }


class ReasoningItem(StrictModel):
    """What the assistant has thought. Of encrypted thoughts nothing is known here."""

    id: str | None = None
    summary: TextOrObjects | None = None
    content: TextOrObjects | None = None

    def normalized(self, at: str) -> Item:
        thoughts = _texts(self.content or (), f"{at}.content")
        summary = _texts(self.summary or (), f"{at}.summary")
        return {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": text} for text in summary],
            "content": [{"type": "reasoning_text", "text": text} for text in thoughts],
            "status": "completed",
        }


KINDS: dict[str, type[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def parse_input(given: str | Sequence[Mapping[str, Any]]) -> list[Item]:
    """The items of a request's `input`, with the fields that are used. Raises ServiceError."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not 1 <= len(given) <= MAX_ITEMS:
        raise refuse("input", f"input must have 1 to {MAX_ITEMS} items, not {len(given)}")
    items = []
    for index, item in enumerate(given):
        at = f"input[{index}]"
        kind = item.get("type", "message" if "role" in item else None)
        if not isinstance(kind, str) or kind not in KINDS:
            text = f"{at}.type: items of type {quoted(str(kind))} are not supported by this server"
            raise refuse(f"{at}.type", text)
        try:
            parsed = KINDS[kind].model_validate(item)
        except ValidationError as error:
            raise first_error(error, at) from None
        made = parsed.normalized(at)
        items.append({**made, "id": parsed.id} if parsed.id else made)
    return items


def conversation(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a chat, as templates expect them.

    Instructions and the rules right after them are one message, since many templates take one at
    the beginning. Reasoning, text and calls that follow each other are one turn of the assistant.
    Raises ServiceError for the output of a call that nobody made.
    """
    turns = _Turns()
    calls: set[str] = set()
    if instructions:
        turns.say("system", [instructions])
    for item in items:
        kind = item["type"]
        if kind == "message":
            turns.say(item["role"], _texts_of(item["content"]))
        elif kind == "reasoning":
            turns.think(_texts_of(item["content"] or item["summary"]))
        elif kind == "function_call":
            calls.add(item["call_id"])
            turns.call(item)
        else:
            if item["call_id"] not in calls:
                text = f"no function_call before it has the call_id {quoted(item['call_id'])}"
                raise refuse("input", f"input: a function_call_output: {text}")
            turns.answer(item)
    return turns.messages


class _Turns:
    """Builds messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, texts: list[str]) -> None:
        parts = [{"type": "text", "text": text} for text in texts]
        rules = ("system", "developer")
        if role == "assistant":
            turn = self._turn(open_to=("reasoning_content",))
            turn["content"] = parts
        elif role in rules and len(self.messages) == 1 and self.messages[0]["role"] in rules:
            self.messages[0]["content"] += parts
        else:
            self.messages.append({"role": role, "content": parts})

    def think(self, texts: list[str]) -> None:
        if texts:
            turn = self._turn(open_to=("reasoning_content",))
            before = [turn["reasoning_content"]] if "reasoning_content" in turn else []
            turn["reasoning_content"] = "\n".join([*before, *texts])

    def call(self, item: Item) -> None:
        turn = self._turn(open_to=("reasoning_content", "content", "tool_calls"))
        function = {"name": item["name"], "arguments": item["arguments"]}
        made = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(made)

    def answer(self, item: Item) -> None:
        output = item["output"]
        if not isinstance(output, str):
            output = [{"type": "text", "text": text} for text in _texts_of(output)]
        message = {"role": "tool", "tool_call_id": item["call_id"], "content": output}
        self.messages.append(message)

    def _turn(self, open_to: tuple[str, ...]) -> dict[str, Any]:
        """The assistant's last turn if it has nothing else yet, or a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(
            last.get(key) and key not in open_to for key in ("content", "tool_calls")
        ):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def _texts(content: str | Sequence[Mapping[str, Any]], at: str) -> list[str]:
    """Raises ServiceError for a part that is no text."""
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type")
        if kind not in _TEXTS:
            text = f"parts of type {quoted(str(kind))} are not supported by this server, only text"
            raise refuse(f"{at}[{index}].type", f"{at}[{index}].type: {text}")
        key = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(key), str):
            raise refuse(f"{at}[{index}].{key}", f"{at}[{index}].{key} must be a string")
        texts.append(part[key])
    return texts


def _is_object(text: str) -> bool:
    try:
        return isinstance(from_json(text, allow_inf_nan=False), dict)
    except ValueError:
        return False


def _texts_of(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Of parts that have been checked."""
    return [part["text"] for part in parts]
