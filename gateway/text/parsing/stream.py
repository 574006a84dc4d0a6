"""Finds calls of tools in the text of an answer as it comes; pure.

A call is given whole or not at all: what begins as one and is none goes back into the text, in
order. Only what the end of the answer has cut off behind a complete call is left out, as is an
opening tag with nothing behind it.
"""

import re
from collections.abc import Callable
from typing import Final

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import Calls, FoundCall, ToolFamily
from pdserve.gateway.text.parsing.reader import BlockReader, CutOff, Malformed
from pdserve.gateway.text.parts import ContentPart, TextPart, ToolCallPart

MAX_CALL_CHARS = 1 << 20  # of one call
MAX_SPACE = 1024  # white space that waits for text
FENCE: Final = "```"


def held(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of a text one of the marks could begin with."""
    for size in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0


class CallStream:
    """The parser of a family, for one choice.

    White space waits until text follows, and is left out at the end of an answer with calls. Tags
    in fenced code are text.
    """

    def __init__(
        self, family: ToolFamily, schemas: ToolSchemas, new_id: Callable[[], str], parallel: bool
    ) -> None:
        """`parallel`: otherwise calls after the first are left out."""
        assert family.read is not None
        self._read = family.read
        self._schemas = schemas
        self._new_id = new_id
        self._parallel = parallel
        self._marks = (*family.openers, FENCE)
        self._pattern = re.compile("|".join(map(re.escape, self._marks)))
        self._bare = family.bare  # characters that may begin a block where the answer begins
        self._pending = ""
        self._space = ""
        self._fenced = False
        self._ended = False
        self._num_calls = 0
        self._reader: BlockReader | None = None
        self._opener = ""
        self._block: Calls | None = None
        self._parts: list[ContentPart] = []

    def push(self, text: str) -> list[ContentPart]:
        if self._reader is not None:
            self._reader.feed(text)
        else:
            self._pending += text
        return self._advanced()

    def finish(self) -> list[ContentPart]:
        self._ended = True
        if self._reader is not None:
            self._reader.ended = True
        parts = self._advanced()
        if self._space and not self._num_calls:
            parts.append(TextPart(self._space))
        self._space = ""
        return parts

    def _advanced(self) -> list[ContentPart]:
        while self._in_block() if self._reader is not None else self._in_text():
            pass
        parts, self._parts = self._parts, []
        return parts

    def _in_text(self) -> bool:
        """Whether there is more to do with the text that has come."""
        if self._bare:
            start = self._pending.lstrip()
            if not start and len(self._pending) < MAX_SPACE and not self._ended:
                return False
            bare, self._bare = self._bare, ""
            if start and start[0] in bare:
                self._begin(0, "")
                return True
        if self._fenced:
            at, mark = self._pending.find(FENCE), FENCE
        else:
            found = self._pattern.search(self._pending)
            at, mark = (found.start(), found[0]) if found else (-1, "")
        if at < 0:
            marks = (FENCE,) if self._fenced else self._marks
            keep = 0 if self._ended else held(self._pending, marks)
            cut = len(self._pending) - keep
            self._emit(self._pending[:cut])
            self._pending = self._pending[cut:]
            return False
        if mark == FENCE:
            self._fenced = not self._fenced
            self._emit(self._pending[: at + len(FENCE)])
            self._pending = self._pending[at + len(FENCE) :]
            return True
        self._emit(self._pending[:at])
        self._begin(at, mark)
        return True

    def _begin(self, at: int, opener: str) -> None:
        text, self._pending = self._pending[at:], ""
        self._reader = BlockReader(text, len(opener), ended=self._ended)
        self._opener = opener
        self._block = self._read(self._reader, opener, self._schemas)

    def _in_block(self) -> bool:
        """Whether the block is over."""
        reader, block = self._reader, self._block
        assert reader is not None
        assert block is not None
        try:
            for call in block:
                if call is not None:
                    self._call(call)
                    reader.drop_read()
                    self._opener = ""
                elif len(reader.text) > MAX_CALL_CHARS:
                    reader.at = len(reader.text)
                    raise Malformed
                else:
                    return False
        except CutOff:
            rest = reader.text
            reader.at = len(rest)
            if not self._num_calls and rest.strip() != self._opener:
                self._emit(rest)
        except Malformed:
            self._emit(reader.text[: reader.at])
        self._pending = reader.text[reader.at :]
        self._reader = self._block = None
        return True

    def _call(self, call: FoundCall) -> None:
        index = self._num_calls
        self._num_calls += 1
        if index and not self._parallel:
            return
        self._parts.append(ToolCallPart(index, self._new_id(), call.name))
        self._parts.append(ToolCallPart(index, arguments=call.arguments))

    def _emit(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        if len(text) - len(body) > MAX_SPACE:
            body = text
        self._space = text[len(body) :]
        if body:
            self._parts.append(TextPart(body))
