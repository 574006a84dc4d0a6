"""Splits what a model thinks between two tags from its answer, as the text comes, and makes the
families that think so; pure.

A thought stands at the very beginning, or the prompt has opened it. A closing tag at the very
beginning closes an empty one. White space beside the tags is left out. A thought that nothing
closes goes to the end.
"""

import re
from collections.abc import Callable, Sequence

from pdserve.gateway.text.parsing.family import ReasoningFamily
from pdserve.gateway.text.parsing.reader import held
from pdserve.gateway.text.parts import ContentPart, ReasoningPart, TextPart

MAX_SPACE = 1024  # white space that waits for text


class ThoughtStream:
    """For one choice."""

    def __init__(
        self,
        begin: str,
        end: str,
        *,
        open: bool,
        answers: Sequence[str] = (),
        several: bool = False,
    ) -> None:
        """`open`: the prompt ends with `begin`. `answers`: what begins the answer, and so ends a
        thought that is open. `several`: another thought may follow one; a line break joins them."""
        self._begin = begin
        self._end = end
        self._ends = (end, *answers)
        self._pattern = re.compile("|".join(map(re.escape, self._ends)))
        self._open = open
        self._again = open  # the tag may come once more, as some models write it
        self._several = several
        self._gap = ""  # before the next thought's text
        self._skipping = True  # white space, where the text or a part of it begins
        self._answering = False
        self._pending = ""

    @property
    def closed(self) -> bool:
        return self._answering

    def push(self, text: str) -> list[ContentPart]:
        self._pending += text
        return self._advanced(ended=False)

    def finish(self, *, cut: bool = False) -> list[ContentPart]:
        return self._advanced(ended=True)

    def _advanced(self, ended: bool) -> list[ContentPart]:
        parts: list[ContentPart] = []
        size = -1
        while not self._answering and size != len(self._pending):
            size = len(self._pending)
            if not self._open:
                self._opened(ended)
            if self._open:
                parts += self._thought(ended)
        if self._answering:
            text = self._taken(len(self._pending), ended)
            if text:
                parts.append(TextPart(text))
        return parts

    def _opened(self, ended: bool) -> None:
        """Decides whether the answer begins with a thought."""
        start = self._pending.lstrip()
        much_space = len(self._pending) - len(start) > MAX_SPACE  # the same however it is cut
        if start.startswith(self._begin) and not much_space:
            self._open = True
            self._pending = start[len(self._begin) :]
        elif start.startswith(self._end) and not much_space:
            self._answering = True
            self._pending = start[len(self._end) :]
        elif (
            ended
            or much_space
            or not (self._begin.startswith(start) or self._end.startswith(start))
        ):
            self._answering = True
            self._skipping = bool(self._gap)

    def _thought(self, ended: bool) -> list[ContentPart]:
        if self._again and not self._begun(ended):
            return []
        if found := self._pattern.search(self._pending):
            text = self._taken(found.start(), ended).rstrip()
            self._pending = self._pending.removeprefix(self._end)
            self._open = False
            self._answering = not self._several
            self._skipping = True
            gap = "\n" if self._several else ""
        else:
            keep = 0 if ended else held(self._pending, self._ends)
            body = self._pending[: len(self._pending) - keep]
            if not ended:
                body = body.rstrip() if len(body) - len(body.rstrip()) < MAX_SPACE else body
            text = self._taken(len(body), ended)
            gap = "" if text else self._gap
        text = self._gap + text if text else ""
        self._gap = gap
        return [ReasoningPart(text)] if text else []

    def _begun(self, ended: bool) -> bool:
        """Whether enough has come to tell if the tag comes again."""
        start = self._pending.lstrip()
        if not ended and len(start) < len(self._begin) and self._begin.startswith(start):
            return False
        self._again = False
        if start.startswith(self._begin):
            self._pending = start[len(self._begin) :]
        return True

    def _taken(self, size: int, ended: bool) -> str:
        text, self._pending = self._pending[:size], self._pending[size:]
        if self._skipping:
            text = text.lstrip()
            self._skipping = not text
        return text


def between_tags(
    name: str,
    begin: str,
    end: str,
    *,
    known_by: str | Callable[[str], bool] = "",
    special: Sequence[str] | None = None,
    answers: Sequence[str] = (),
    around: Sequence[str] = (),
) -> ReasoningFamily:
    """A family whose chat templates have the text `known_by`, by default the end tag, or are known
    by such a function; `special`: by default both tags. `answers`, `around`: as of ThoughtStream
    and ReasoningFamily."""
    text = "" if callable(known_by) else known_by or end
    return ReasoningFamily(
        name,
        known_by if callable(known_by) else lambda template: text in template,
        lambda open: ThoughtStream(begin, end, open=open, answers=answers),
        begin,
        end,
        after=end,
        special=(begin, end) if special is None else special,
        around=around,
    )
