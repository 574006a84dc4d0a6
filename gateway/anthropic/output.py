"""The content blocks of one message, from the deltas of its choice, and their events.

Pure. Invariant: the events of a stream add up to the final `blocks`.
"""

from collections.abc import Iterator
from typing import Any

from pdserve.gateway.anthropic.signature import signature_of
from pdserve.gateway.choice import Delta
from pdserve.gateway.text.parts import (
    ContentPart,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    arguments_object,
)

Event = dict[str, Any]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageContent:
    """Content of a message; consecutive parts of one kind are one block."""

    def __init__(self, *, shows_thinking: bool = True) -> None:
        """Without `shows_thinking`, a thinking block has only its signature."""
        self._shows_thinking = shows_thinking
        self.blocks: list[dict[str, Any]] = []
        self.thinking_tokens = 0
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self._first: ContentPart | None = None  # first part of the open block
        self._cut = False  # whether its call is cut off
        self._pieces: list[str] = []

    def push(self, delta: Delta) -> Iterator[Event]:
        """Yield the events of a delta."""
        for part in delta.content:
            if isinstance(part, ReasoningPart):
                self.thinking_tokens = delta.num_tokens
            if self._first is None or not _same_block(self._first, part):
                yield from self._close()
                self._first = part
                yield {
                    "type": "content_block_start",
                    "index": len(self.blocks),
                    "content_block": _block(part, ""),
                }
            self._cut = isinstance(part, ToolCallPart) and part.cut
            name, piece = _piece(part)
            if piece:
                self._pieces.append(piece)
            if piece and (self._shows_thinking or name != "thinking_delta"):
                yield {
                    "type": "content_block_delta",
                    "index": len(self.blocks),
                    "delta": {"type": name, _KEYS[name]: piece},
                }
        if delta.finish is not None:
            yield from self._close()
            self.stop_sequence = delta.stop
            reason = _STOP_REASONS[delta.finish]
            self.stop_reason = reason if delta.stop is None else "stop_sequence"

    def _close(self) -> Iterator[Event]:
        if self._first is None:
            return
        index = len(self.blocks)
        block = _block(self._first, "".join(self._pieces), cut=self._cut)
        if block["type"] == "thinking":
            hidden = not self._shows_thinking
            block["signature"] = signature_of(block["thinking"], hidden=hidden)
            if hidden:
                block["thinking"] = ""
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
        self.blocks.append(block)
        self._first, self._pieces = None, []


_KEYS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def _piece(part: ContentPart) -> tuple[str, str]:
    """Return the type of a part's delta, and its text."""
    if isinstance(part, ToolCallPart):
        return "input_json_delta", part.arguments
    return ("thinking_delta" if isinstance(part, ReasoningPart) else "text_delta"), part.text


def _same_block(first: ContentPart, second: ContentPart) -> bool:
    if isinstance(first, ToolCallPart):
        return isinstance(second, ToolCallPart) and first.index == second.index
    return type(first) is type(second)


def _block(first: ContentPart, text: str, *, cut: bool = False) -> dict[str, Any]:
    """Return the block of a first part and the whole text; `cut`: its call was cut off."""
    if isinstance(first, TextPart):
        return {"type": "text", "text": text}
    if isinstance(first, ReasoningPart):
        return {"type": "thinking", "thinking": text, "signature": ""}
    arguments = arguments_object(text, cut=cut)
    return {"type": "tool_use", "id": first.id, "name": first.name, "input": arguments}
