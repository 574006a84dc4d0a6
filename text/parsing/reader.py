"""Reads text in pieces with generators that yield None where they need more text; pure.

Invariant: each character is read only a few times, however the text is split.
"""

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Pieces = Generator[str | None, None, T]  # of text; None: needs more

MAX_NAME_CHARS = 512  # of a function's name, a key or a tag's attributes

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"\w[\w.-]*")
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')
# Begins a Mistral call. It looks like brackets, but no JSON contains it outside strings.
MISTRAL_CALLS = "[TOOL_CALLS]"


class Malformed(Exception):
    """The text does not have the expected form."""


class CutOff(Malformed):
    """The text ended before the expected form was complete.

    `name`: the known tool whose call was cut off before its arguments. `id`: the id of that call.
    `certain`: the text cannot be anything but that call, even if no tag precedes it. `closing`: the
    text that completes the JSON of the yielded arguments. `value`: the value at the end of the text
    as JSON, with any text before it that was not yielded.
    """

    def __init__(
        self,
        name: str = "",
        id: str = "",
        closing: str = "",
        *,
        value: str = "",
        certain: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.id = id
        self.closing = closing
        self.value = value
        self.certain = certain


def held(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of a text that is the beginning of a mark."""
    for size in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0


class BlockReader:
    """A text with a read position: `text` from `position` on is unread. `feed` adds text; `ended`
    marks the end of the input, and `cut` that the answer reached its length limit there."""

    def __init__(self, text: str, position: int = 0, *, ended: bool = False) -> None:
        self.text = text
        self.position = position
        self.ended = ended
        self.cut = False

    def feed(self, text: str) -> None:
        # CPython appends in place to a local str without other references. This avoids a copy if
        # no waiting generator keeps the text or a match in it.
        joined, self.text = self.text, ""
        joined += text
        self.text = joined

    def drop_read(self) -> None:
        """Drop the text before `position`. Call it only after a generator yields a piece, not None:
        a waiting generator may keep a position."""
        self.text = self.text[self.position :]
        self.position = 0

    def more(self) -> Reading[None]:
        """Wait for more text. Raises CutOff at the end."""
        if self.ended:
            raise CutOff
        yield

    def space(self) -> Reading[None]:
        """Skip white space."""
        while True:
            match = _SPACE.match(self.text, self.position)
            assert match is not None  # the pattern also matches ""
            self.position = match.end()
            if self.position < len(self.text) or self.ended:
                return
            del match  # it holds a reference to the text
            yield

    def first(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while self.position == len(self.text) and not self.ended:
            yield
        return self.text[self.position : self.position + 1]

    def first_after_space(self) -> Reading[str]:
        """Read white space, then as `first`."""
        yield from self.space()
        return (yield from self.first())

    def take(self, *marks: str) -> Reading[str]:
        """Read the next mark; return "" if none of the marks follows."""
        while True:
            for mark in marks:
                if self.text.startswith(mark, self.position):
                    self.position += len(mark)
                    return mark
            rest = self.text[self.position : self.position + max(map(len, marks))]
            if self.ended or not any(mark.startswith(rest) for mark in marks):
                return ""
            yield

    def take_after_space(self, *marks: str) -> Reading[str]:
        """Read white space, then as `take`."""
        yield from self.space()
        return (yield from self.take(*marks))

    def take_end(self, mark: str) -> Reading[bool]:
        """Read the end mark of a call, or its beginning if the answer ends in it. Returns whether
        it was read."""
        if (yield from self.take(mark)):
            return True
        if not self.ended or not mark.startswith(self.text[self.position :]):
            return False
        self.position = len(self.text)
        return True

    def take_end_after_space(self, mark: str) -> Reading[bool]:
        """Read white space, then as `take_end`."""
        yield from self.space()
        return (yield from self.take_end(mark))

    def expect(self, *marks: str) -> Reading[str]:
        """Read one of the marks. Raises CutOff, or Malformed if other text follows."""
        next_mark = yield from self.take(*marks)
        if not next_mark:
            rest = self.text[self.position :]
            if any(mark.startswith(rest) for mark in marks):
                raise CutOff
            raise Malformed
        return next_mark

    def expect_after_space(self, *marks: str) -> Reading[str]:
        """Read white space, then as `expect`."""
        yield from self.space()
        return (yield from self.expect(*marks))

    def until(self, *marks: str, max_chars: int = 0) -> Reading[tuple[str, str]]:
        """Read the text before the first of the marks, and that mark; return both.

        No mark may be part of another. Raises CutOff; Malformed if the text is longer than
        `max_chars` (0: no limit).
        """
        pattern = re.compile("|".join(map(re.escape, marks)))
        overlap = max(map(len, marks)) - 1
        start = self.position
        scanned = start
        while True:
            match = pattern.search(self.text, scanned)
            end = match.start() if match else len(self.text) - overlap
            if max_chars and end - start > max_chars:
                raise Malformed
            if match:
                self.position = match.end()
                return self.text[start : match.start()], match[0]
            scanned = max(start, end)
            yield from self.more()

    def pieces_until(self, *marks: str) -> Pieces[str]:
        """Stream the text before the first of the marks, then read and return that mark. No mark
        may be part of another. Raises CutOff."""
        pattern = re.compile("|".join(map(re.escape, marks)))
        while True:
            match = pattern.search(self.text, self.position)
            end = (
                match.start() if match else len(self.text) - held(self.text[self.position :], marks)
            )
            piece, self.position = self.text[self.position : end], end
            if piece:
                yield piece
            if match:
                self.position += len(match[0])
                return match[0]
            yield from self.more()

    def name(self) -> Reading[str]:
        """Read a function's name. Raises CutOff, also if the text ends right after the name;
        Malformed."""
        while True:
            match = _NAME.match(self.text, self.position)
            end = match.end() if match else self.position
            if end - self.position > MAX_NAME_CHARS or (not match and end < len(self.text)):
                raise Malformed
            if end < len(self.text):
                name, self.position = self.text[self.position : end], end
                return name
            yield from self.more()

    def string(self) -> Reading[str]:
        """Read the JSON string that begins here; return it with its quotes. Raises CutOff,
        Malformed."""
        yield from self.expect('"')
        start = self.position - 1
        self.position = yield from self._past_string(self.position)
        return self.text[start : self.position]

    def balanced(self) -> Reading[str]:
        """Read the bracketed JSON text that begins here, up to its last bracket. Raises CutOff;
        Malformed if a tag outside strings comes first."""
        start = scanned = self.position
        depth = 0
        while True:
            match = _OUTSIDE_STRINGS.search(self.text, scanned)
            if match is None:
                scanned = len(self.text)
                yield from self.more()
                continue
            mark = match[0]
            if mark == "[":
                rest = self.text[match.start() : match.start() + len(MISTRAL_CALLS)]
                if rest == MISTRAL_CALLS:
                    raise Malformed
                if MISTRAL_CALLS.startswith(rest):
                    scanned = match.start()
                    yield from self.more()
                    continue
            scanned = match.end()
            if mark in "{[":
                depth += 1
            elif mark in "}]":
                depth -= 1
                if not depth:
                    self.position = scanned
                    return self.text[start:scanned]
            elif mark == "<":
                raise Malformed
            else:
                scanned = yield from self._past_string(scanned)

    def _past_string(self, position: int) -> Reading[int]:
        """Return the position after a string's end quote; a backslash escapes a character."""
        while True:
            match = _IN_STRING.search(self.text, position)
            if match and match[0] == '"':
                return match.end()
            if match and match.end() < len(self.text):
                position = match.end() + 1
            else:
                position = match.start() if match else len(self.text)
                yield from self.more()
