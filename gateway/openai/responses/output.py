"""Builds the output items of one response, and the events of its stream, from the model's output.

Pure. Invariant: the events of a stream add up to the final `items`. Values in events may be
JsonPieces, because log-probabilities are held as JSON text.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic_core import to_json

from pdserve.gateway.http.api import JsonList, JsonPieces, array_json, object_json
from pdserve.gateway.openai.objects import token_logprobs
from pdserve.gateway.openai.request_models.tools import CustomInput
from pdserve.gateway.openai.responses.tools import OfferedTool
from pdserve.text import (
    ContentPart,
    Delta,
    ReasoningPart,
    ScoredToken,
    TextPart,
    Tool,
    ToolCallPart,
)

Event = dict[str, Any]
_SUMMARY = "response.reasoning_summary"  # prefix of the names of a summary's events
_NO_TOOLS: Mapping[str, OfferedTool] = {}


class ResponseOutput:
    """Builds the output items of one response. Consecutive pieces of reasoning, of text, or of one
    tool call become one item."""

    def __init__(
        self,
        suffix: str,
        *,
        logprobs: bool,
        reasons: bool = True,
        summarized: bool = False,
        offered: Mapping[str, OfferedTool] = _NO_TOOLS,
    ) -> None:
        """Start an empty output. `suffix` makes the items' ids unique to this response. `reasons`:
        reasoning is sent to the client. `summarized`: reasoning is also sent as its own summary.
        `offered`: the client's tools, by the names that the model uses."""
        self.items: list[JsonPieces] = []
        self._suffix = suffix
        self._logprobs = logprobs
        self._reasons = reasons
        self._reasoning = _SUMMARIZED if summarized else _REASONING
        self.offered = offered
        self._open: _OpenText | _OpenCall | None = None
        self._cut = False  # whether the open call is cut off
        self._unplaced: list[ScoredToken] = []  # tokens whose text is yet to come

    def push(self, delta: Delta) -> Iterator[Event]:
        """Add a piece of the model's output, and yield the stream's events for it. The
        log-probabilities of its tokens go to its first text part."""
        if self._logprobs:
            self._unplaced += delta.tokens
        if delta.content and not any(isinstance(part, TextPart) for part in delta.content):
            self._unplaced = []
        for part in delta.content:
            if isinstance(part, ReasoningPart) and not self._reasons:
                continue
            if self._open is None or not self._open.takes(part):
                yield from self._close("incomplete" if self._cut else "completed", [])
                yield from self._begin(part)
            assert self._open is not None
            logprobs = self._take_logprobs() if isinstance(part, TextPart) else []
            yield from self._open.push(part, logprobs)
            self._cut = isinstance(part, ToolCallPart) and part.cut
        if delta.finish is not None:
            if self._open is None and not self.items:
                yield from self._begin(TextPart(""))
            status = "incomplete" if delta.finish == "length" else "completed"
            yield from self._close(status, self._take_logprobs())

    def _begin(self, part: ContentPart) -> Iterator[Event]:
        number = len(self.items)
        if isinstance(part, ToolCallPart):
            tool = self.offered.get(part.name) or OfferedTool(Tool(part.name), part.name)
            kind = "ctc" if tool.custom else "fc"
            self._open = _OpenCall(f"{kind}_{self._suffix}_{number}", number, part, tool)
        elif isinstance(part, ReasoningPart):
            self._open = _OpenText(f"rs_{self._suffix}_{number}", number, self._reasoning)
        else:
            self._open = _OpenText(f"msg_{self._suffix}_{number}", number, _MESSAGE)
        yield from self._open.begin()

    def _take_logprobs(self) -> list[dict[str, Any]]:
        tokens, self._unplaced = self._unplaced, []
        return [token_logprobs(token, as_ids=False) for token in tokens]

    def _close(self, status: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.close(status, logprobs)
            self.items.append(object_json(self._open.item))
            self._open = None


# The type of a call's item, the field of its input, and the prefix of its events.
_FUNCTION = "function_call", "arguments", "response.function_call_arguments"
_CUSTOM = "custom_tool_call", "input", "response.custom_tool_call_input"


class _TextKind(NamedTuple):
    """The format of an output item whose content is one text: a message, or reasoning."""

    part: type[TextPart | ReasoningPart]
    event: str  # prefix of its events' names
    item: dict[str, Any]
    summarized: bool = False  # the text is also the summary


_MESSAGE = _TextKind(TextPart, "output_text", {"type": "message", "role": "assistant"})
_THOUGHT: dict[str, Any] = {"type": "reasoning", "summary": []}
_REASONING = _TextKind(ReasoningPart, "reasoning_text", _THOUGHT)
_SUMMARIZED = _TextKind(ReasoningPart, "reasoning_text", _THOUGHT, summarized=True)


class _OpenText:
    """Builds the events and the item of a message, or of reasoning, that is still being
    generated."""

    def __init__(self, name: str, index: int, kind: _TextKind) -> None:
        self.item = {"id": name, **kind.item, "status": "in_progress", "content": []}
        self._item_fields = {"item_id": name, "output_index": index}
        self._part_fields = {**self._item_fields, "content_index": 0}
        self._summary_fields = {**self._item_fields, "summary_index": 0}
        self._kind = kind
        self._pieces: list[str] = []
        self._logprobs = JsonList()

    def takes(self, part: ContentPart) -> bool:
        return isinstance(part, self._kind.part)

    def begin(self) -> Iterator[Event]:
        yield _item_event("added", self._item_fields, self.item)
        yield {
            "type": "response.content_part.added",
            **self._part_fields,
            "part": object_json(self._part("")),
        }
        if self._kind.summarized:
            part = {"type": "summary_text", "text": ""}
            yield {"type": f"{_SUMMARY}_part.added", **self._summary_fields, "part": part}

    def push(self, part: ContentPart, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        assert not isinstance(part, ToolCallPart)
        self._pieces.append(part.text)
        self._logprobs.extend(logprobs)
        kind = f"response.{self._kind.event}.delta"
        extra = {"logprobs": logprobs} if self._has_logprobs else {}
        yield {"type": kind, **self._part_fields, "delta": part.text, **extra}
        if self._kind.summarized:
            yield {"type": f"{_SUMMARY}_text.delta", **self._summary_fields, "delta": part.text}

    def close(self, status: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        self._logprobs.extend(logprobs)
        full_text = JsonPieces((to_json("".join(self._pieces)),))
        part = self._part(full_text)
        extra = {"logprobs": part["logprobs"]} if self._has_logprobs else {}
        event_type = f"response.{self._kind.event}.done"
        yield {"type": event_type, **self._part_fields, "text": full_text, **extra}
        part_text = object_json(part)
        yield {"type": "response.content_part.done", **self._part_fields, "part": part_text}
        self.item = {**self.item, "status": status, "content": array_json([part_text])}
        if self._kind.summarized:
            yield {"type": f"{_SUMMARY}_text.done", **self._summary_fields, "text": full_text}
            summary = object_json({"type": "summary_text", "text": full_text})
            yield {"type": f"{_SUMMARY}_part.done", **self._summary_fields, "part": summary}
            self.item["summary"] = array_json([summary])
        yield _item_event("done", self._item_fields, self.item)

    @property
    def _has_logprobs(self) -> bool:
        return self._kind is _MESSAGE

    def _part(self, text: str | JsonPieces) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._kind.event, "text": text}
        if self._has_logprobs:
            part |= {"annotations": [], "logprobs": self._logprobs.pieces()}
        return part


class _OpenCall:
    """Builds the events and the item of a function call, or of a custom tool's call, that is still
    being generated."""

    def __init__(self, name: str, index: int, first: ToolCallPart, tool: OfferedTool) -> None:
        kind, self._key, self._event = _CUSTOM if tool.custom else _FUNCTION
        self._input = CustomInput() if tool.custom else None
        namespace = {"namespace": tool.namespace} if tool.namespace else {}
        self.item = {
            "id": name,
            "type": kind,
            "status": "in_progress",
            "call_id": first.id,
            "name": tool.name,
            **namespace,
            self._key: "",
        }
        self._item_fields = {"item_id": name, "output_index": index}
        self._number = first.index
        self._pieces: list[str] = []

    def takes(self, part: ContentPart) -> bool:
        return isinstance(part, ToolCallPart) and part.index == self._number

    def begin(self) -> Iterator[Event]:
        yield _item_event("added", self._item_fields, self.item)

    def push(self, part: ContentPart, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        assert isinstance(part, ToolCallPart)
        piece = part.arguments if self._input is None else self._input.push(part.arguments)
        yield from self._add(piece)

    def close(self, status: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if self._input is not None:
            yield from self._add(self._input.finish())
        full_input = "".join(self._pieces)
        name_field = {"name": self.item["name"]} if self._input is None else {}
        yield {
            "type": f"{self._event}.done",
            **self._item_fields,
            **name_field,
            self._key: full_input,
        }
        self.item = {**self.item, "status": status, self._key: full_input}
        yield _item_event("done", self._item_fields, self.item)

    def _add(self, piece: str) -> Iterator[Event]:
        if piece:
            self._pieces.append(piece)
            yield {"type": f"{self._event}.delta", **self._item_fields, "delta": piece}


def _item_event(change: str, fields: dict[str, Any], item: dict[str, Any]) -> Event:
    kind = f"response.output_item.{change}"
    return {"type": kind, "output_index": fields["output_index"], "item": object_json(item)}
