"""Joins the parsers of one choice: what it thinks, then its calls; pure."""

from pdserve.gateway.text.parsing.family import ContentParser
from pdserve.gateway.text.parts import ContentPart, ReasoningPart, TextPart


class AnswerParser:
    """`calls` reads what `thoughts` leaves as text; either may be missing."""

    def __init__(self, thoughts: ContentParser | None, calls: ContentParser | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    def push(self, text: str) -> list[ContentPart]:
        if self._thoughts is None:
            return self._called([TextPart(text)] if text else [])
        return self._called(self._thoughts.push(text))

    def finish(self, *, cut: bool = False) -> list[ContentPart]:
        parts = [] if self._thoughts is None else self._called(self._thoughts.finish(cut=cut))
        return parts if self._calls is None else parts + self._calls.finish(cut=cut)

    def _called(self, parts: list[ContentPart]) -> list[ContentPart]:
        if self._calls is None:
            return parts
        made: list[ContentPart] = []
        for part in parts:
            made += self._calls.push(part.text) if isinstance(part, TextPart) else [part]
        return made


class InlineThoughts:
    """A parser's content with its thoughts as text, between their tags."""

    def __init__(self, parser: ContentParser, begin: str, end: str) -> None:
        self._parser = parser
        self._begin = begin
        self._end = end
        self._thinking = False

    def push(self, text: str) -> list[ContentPart]:
        return [made for part in self._parser.push(text) for made in self._inline(part)]

    def finish(self, *, cut: bool = False) -> list[ContentPart]:
        return [made for part in self._parser.finish(cut=cut) for made in self._inline(part)]

    def _inline(self, part: ContentPart) -> list[ContentPart]:
        thinks = isinstance(part, ReasoningPart)
        made: list[ContentPart] = []
        if thinks != self._thinking:
            self._thinking = thinks
            tag = f"{self._begin}\n" if thinks else f"\n{self._end}\n\n"
            made.append(TextPart(tag))
        made.append(TextPart(part.text) if isinstance(part, ReasoningPart) else part)
        return made
