"""Combines the parser of the reasoning and the parser of the tool calls in one choice's text;
pure."""

from collections.abc import Callable
from itertools import takewhile

from pdserve.text.parsing.call_stream import CallStream
from pdserve.text.parsing.family import ContentParser, ReasoningParser
from pdserve.text.parts import ContentPart, ReasoningPart, TextPart, ToolCallPart

MAX_HELD_CHARS = 1 << 16  # of reasoning, from the first call in it


class AnswerParser:
    """Parses one choice's text: `reasoning` separates the reasoning, and `calls` finds the tool
    calls in the text after it. Either may be None.

    A model may call a tool while reasoning, without ending the reasoning first. Reasoning is
    therefore held back from a call on. If more reasoning follows the call, the call was only an
    example. If the answer ends after a complete call of a known tool, the call ends the reasoning
    and is real.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: ContentParser | None,
        in_reasoning: Callable[[], CallStream] | None = None,
        after_reasoning: Callable[[], CallStream] | None = None,
        *,
        opened: bool = False,
    ) -> None:
        """`in_reasoning` makes the parser that looks for calls within the reasoning,
        `after_reasoning` the one that replaces `calls` if the answer has reasoning. `opened`: the
        prompt has opened the reasoning."""
        self._reasoning = reasoning
        self._calls = calls
        self._search = in_reasoning() if in_reasoning is not None else None
        self._after_reasoning = after_reasoning
        self._thinks = opened  # the answer has reasoning
        self._held = ""  # reasoning held back
        self._num_returned = 0  # characters of reasoning returned
        self._first_call: int | None = None  # the first call after which only calls have come

    def push(self, text: str) -> list[ContentPart]:
        if self._reasoning is None:
            return self._read([TextPart(text)] if text else [])
        return self._read(self._reasoning.push(text))

    def finish(self, *, cut: bool = False) -> list[ContentPart]:
        parts: list[ContentPart] = []
        if self._reasoning is not None:
            parts = self._read(self._reasoning.finish(cut=cut))
        if self._search is not None and self._held:
            assert self._calls is not None
            parts += self._certain_reasoning(self._search, self._search.finish(cut=cut))
            text, self._held = self._held, ""
            if self._first_call is not None and self._search.complete_calls[-1:] >= [
                self._first_call
            ]:
                parts += self._calls.push(text.lstrip())
            elif text:
                parts.append(ReasoningPart(text))
        return parts if self._calls is None else parts + self._calls.finish(cut=cut)

    def _read(self, parts: list[ContentPart]) -> list[ContentPart]:
        if self._calls is None:
            return parts
        result: list[ContentPart] = []
        for part in parts:
            self._thinks = self._thinks or isinstance(part, ReasoningPart)
            if isinstance(part, TextPart) and self._after_reasoning is not None:
                self._calls = self._after_reasoning() if self._thinks else self._calls
                self._after_reasoning = None
            if isinstance(part, ReasoningPart) and self._search is not None:
                result += self._add_reasoning(self._search, part.text)
            else:
                result += self._calls.push(part.text) if isinstance(part, TextPart) else [part]
        if self._search is not None and self._reasoning is not None and self._reasoning.closed:
            self._search = None
            if self._held:
                num_parts = sum(1 for _ in takewhile(_is_reasoning, result))
                result.insert(num_parts, ReasoningPart(self._held))
        return result

    def _add_reasoning(self, search: CallStream, text: str) -> list[ContentPart]:
        """Add a piece of reasoning; return the reasoning so far that cannot be a tool call any
        more."""
        self._held += text
        if len(self._held) <= MAX_HELD_CHARS:
            return self._certain_reasoning(search, search.push(text))
        self._search = None
        text, self._held = self._held, ""
        return [ReasoningPart(text)]

    def _certain_reasoning(self, search: CallStream, parts: list[ContentPart]) -> list[ContentPart]:
        """Return the held reasoning up to the first possible call in it. `parts` are the text and
        calls that `search` has just found in the reasoning."""
        for part in parts:
            if not isinstance(part, ToolCallPart):
                self._first_call = None
            elif self._first_call is None:
                self._first_call = part.index
        end = search.num_decided if self._first_call is None else search.starts[self._first_call]
        size = max(end - self._num_returned, 0)
        self._num_returned += size
        text, self._held = self._held[:size], self._held[size:]
        return [ReasoningPart(text)] if text else []


def _is_reasoning(part: ContentPart) -> bool:
    return isinstance(part, ReasoningPart)


class InlineReasoning:
    """Wraps a parser, and returns its reasoning as plain text between the tags `begin` and
    `end`."""

    def __init__(self, parser: ContentParser, begin: str, end: str) -> None:
        self._parser = parser
        self._begin = begin
        self._end = end
        self._thinking = False

    def push(self, text: str) -> list[ContentPart]:
        return [inlined for part in self._parser.push(text) for inlined in self._inline(part)]

    def finish(self, *, cut: bool = False) -> list[ContentPart]:
        return [inlined for part in self._parser.finish(cut=cut) for inlined in self._inline(part)]

    def _inline(self, part: ContentPart) -> list[ContentPart]:
        thinks = isinstance(part, ReasoningPart)
        result: list[ContentPart] = []
        if thinks != self._thinking:
            self._thinking = thinks
            tag = f"{self._begin}\n" if thinks else f"\n{self._end}\n\n"
            result.append(TextPart(tag))
        result.append(TextPart(part.text) if isinstance(part, ReasoningPart) else part)
        return result
