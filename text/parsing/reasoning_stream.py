"""Separates reasoning between two tags from the rest of a streamed answer; pure.

Reasoning comes at the very beginning of an answer, or the prompt has opened it already. An end tag
at the very beginning means that the reasoning is empty. White space around the tags is dropped.
Reasoning that is not closed extends to the end of the answer.
"""

import re
from collections.abc import Sequence

from pdserve.text.parsing.reader import held
from pdserve.text.parts import ContentPart, ReasoningPart, TextPart

MAX_SPACE = 1024  # white space held until text follows


class ReasoningStream:
    """Separates the reasoning in one choice's text from its answer."""

    def __init__(
        self,
        begin: str,
        end: str,
        *,
        open: bool,
        answers: Sequence[str] = (),
        several: bool = False,
    ) -> None:
        """`begin`, `end`: the tags around reasoning. `open`: the prompt ends with `begin`.

        `answers`: texts with which an answer begins, so that they also end open reasoning.
        `several`: more reasoning between tags may follow; a line break joins it to the earlier
        reasoning.
        """
        self._begin = begin
        self._end = end
        self._ends = (end, *answers)
        self._pattern = re.compile("|".join(map(re.escape, self._ends)))
        self._open = open
        self._again = open  # some models repeat the begin tag
        self._several = several
        self._gap = ""  # text before the next reasoning
        self._skipping = True  # skip white space at the beginning of text or reasoning
        self._answering = False
        self._pending = ""

    @property
    def closed(self) -> bool:
        return self._answering

    def push(self, text: str) -> list[ContentPart]:
        self._pending += text
        return self._advance(ended=False)

    def finish(self, *, cut: bool = False) -> list[ContentPart]:
        return self._advance(ended=True)

    def _advance(self, ended: bool) -> list[ContentPart]:
        parts: list[ContentPart] = []
        size = -1
        while not self._answering and size != len(self._pending):
            size = len(self._pending)
            if not self._open:
                self._detect_begin(ended)
            if self._open:
                parts += self._reasoning(ended)
        if self._answering:
            text = self._take(len(self._pending))
            if text:
                parts.append(TextPart(text))
        return parts

    def _detect_begin(self, ended: bool) -> None:
        """Decide, once there is enough text, whether the answer begins with reasoning."""
        start = self._pending.lstrip()
        much_space = len(self._pending) - len(start) > MAX_SPACE  # independent of the split
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

    def _reasoning(self, ended: bool) -> list[ContentPart]:
        if self._again and not self._drop_repeated_begin(ended):
            return []
        if match := self._pattern.search(self._pending):
            text = self._take(match.start()).rstrip()
            self._pending = self._pending.removeprefix(self._end)
            self._open = False
            self._answering = not self._several
            self._skipping = True
            gap = "\n" if self._several else ""
        else:
            num_held = 0 if ended else held(self._pending, self._ends)
            body = self._pending[: len(self._pending) - num_held]
            if not ended:
                body = body.rstrip() if len(body) - len(body.rstrip()) < MAX_SPACE else body
            text = self._take(len(body))
            gap = "" if text else self._gap
        text = self._gap + text if text else ""
        self._gap = gap
        return [ReasoningPart(text)] if text else []

    def _drop_repeated_begin(self, ended: bool) -> bool:
        """Drop a begin tag that the model repeats after the prompt's; return False if more text is
        needed to decide."""
        start = self._pending.lstrip()
        if not ended and len(start) < len(self._begin) and self._begin.startswith(start):
            return False
        self._again = False
        if start.startswith(self._begin):
            self._pending = start[len(self._begin) :]
        return True

    def _take(self, size: int) -> str:
        text, self._pending = self._pending[:size], self._pending[size:]
        if self._skipping:
            text = text.lstrip()
            self._skipping = not text
        return text
