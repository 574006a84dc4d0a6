"""The content parts of an answer; pure data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A piece of a tool call; the first piece of a call has its id and name. `cut`: the answer was
    cut off in this call."""

    index: int  # of the call in its choice, from 0
    id: str = ""
    name: str = ""
    arguments: str = ""  # a piece of a JSON object's text
    cut: bool = False


ContentPart = TextPart | ReasoningPart | ToolCallPart


def text_of(content: Sequence[ContentPart]) -> str:
    """Return the text of the content, without reasoning and calls."""
    return "".join(part.text for part in content if isinstance(part, TextPart))


def reasoning_of(content: Sequence[ContentPart]) -> str:
    """Return the reasoning in the content."""
    return "".join(part.text for part in content if isinstance(part, ReasoningPart))


def arguments_object(text: str, *, cut: bool = False) -> dict[str, Any]:
    """Parse the arguments of a call; an empty text means {}. With `cut`, accept an incomplete
    object. Raises ValueError if the text is not a JSON object."""
    value = from_json(text or "{}", allow_inf_nan=False, allow_partial=cut)
    if not isinstance(value, dict):
        raise ValueError("the arguments of a tool call must be a JSON object")
    return value


def calls_of(content: Sequence[ContentPart]) -> list[ToolCallPart]:
    """Return the calls in the content, each joined into one part."""
    calls: dict[int, list[ToolCallPart]] = {}
    for part in content:
        if isinstance(part, ToolCallPart):
            calls.setdefault(part.index, []).append(part)
    return [
        replace(
            parts[0],
            arguments="".join(part.arguments for part in parts),
            cut=parts[-1].cut,
        )
        for parts in calls.values()
    ]
