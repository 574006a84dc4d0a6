"""Reads text that arrives in pieces. The reading functions are generators: they yield None where
they need more text, and return what they have read; pure.

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
    """Raised by reading functions: the text does not have the expected form."""


class CutOff(Malformed):
    """Raised by reading functions: the text ended before the expected form was complete.

    name: the known tool whose call was cut off before its arguments.
    id: the model's id of that call.
    certain: the text cannot be anything but that call, even without a tag before it.
    closing: text that completes the JSON of the arguments that were yielded.
    value: the value at the end of the text as JSON, with any text before it that was not yielded.
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
    """Return the length of the longest ending of `text` with which one of the marks begins. That
    ending must be held back, since the mark may follow."""
    for size in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0


class BlockReader:
    """A text that grows, with a read position: `text` from `position` on is unread. `feed` adds
    text; `ended` says that no more text follows, and `cut` that the answer ended at its length
    limit."""

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
        """Discard the text before the read position. Call it only after a generator has yielded a
        piece: one that waits for more text (has yielded None) may have stored a position."""
        self.text = self.text[self.position :]
        self.position = 0

    def more(self) -> Reading[None]:
        """Wait for more text. Raises CutOff if the text has ended."""
        if self.ended:
            raise CutOff
        yield

    def space(self) -> Reading[None]:
        """Read past white space."""
        while True:
            match = _SPACE.match(self.text, self.position)
            assert match is not None  # the pattern also matches ""
            self.position = match.end()
            if self.position < len(self.text) or self.ended:
                return
            del match  # it holds a reference to the text
            yield

    def first(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end of the text."""
        while self.position == len(self.text) and not self.ended:
            yield
        return self.text[self.position : self.position + 1]

    def first_after_space(self) -> Reading[str]:
        """Read white space, then return the next character without reading it; "" at the end of the
        text."""
        yield from self.space()
        return (yield from self.first())

    def take(self, *marks: str) -> Reading[str]:
        """Read one of the marks if it comes next and return it; otherwise read nothing and return
        ""."""
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
        """Read white space, then one of the marks if it comes next and return it; otherwise return
        ""."""
        yield from self.space()
        return (yield from self.take(*marks))

    def take_end(self, mark: str) -> Reading[bool]:
        """Read the end tag of a call if it comes next; return whether it did. A tag of which the
        end of the answer cuts off a part counts as well."""
        if (yield from self.take(mark)):
            return True
        if not self.ended or not mark.startswith(self.text[self.position :]):
            return False
        self.position = len(self.text)
        return True

    def take_end_after_space(self, mark: str) -> Reading[bool]:
        """Read white space, then the end tag of a call as `take_end` does; return whether it came
        next."""
        yield from self.space()
        return (yield from self.take_end(mark))

    def expect(self, *marks: str) -> Reading[str]:
        """Read one of the marks, which must come next, and return it. Raises CutOff if the text
        ends before the mark is complete, Malformed if other text comes next."""
        next_mark = yield from self.take(*marks)
        if not next_mark:
            rest = self.text[self.position :]
            if any(mark.startswith(rest) for mark in marks):
                raise CutOff
            raise Malformed
        return next_mark

    def expect_after_space(self, *marks: str) -> Reading[str]:
        """Read white space, then one of the marks, which must come next; return the mark. Raises
        CutOff, Malformed as `expect`."""
        yield from self.space()
        return (yield from self.expect(*marks))

    def until(self, *marks: str, max_chars: int = 0) -> Reading[tuple[str, str]]:
        """Read up to and including the first of the marks; return the text before the mark, and the
        mark.

        No mark may be part of another. Raises CutOff if the text ends without a mark, Malformed if
        the text before it exceeds `max_chars` characters (0: no limit).
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
        """Yield the text before the first of the marks in pieces as it arrives; then read and
        return the mark. No mark may be part of another. Raises CutOff if the text ends without a
        mark."""
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
        """Read a function's name (letters, digits and _.-) and return it. Raises CutOff if the text
        ends before a character follows the name, Malformed if no name is here or it is too long."""
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
        """Read the JSON string that begins here; return it with its quotes, still encoded. Raises
        CutOff, Malformed."""
        yield from self.expect('"')
        start = self.position - 1
        self.position = yield from self._past_string(self.position)
        return self.text[start : self.position]

    def balanced(self) -> Reading[str]:
        """Read the JSON object or list that begins here up to its closing bracket; return its text.
        Raises CutOff if the text ends first, Malformed if a tag comes first outside strings."""
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
        """Return the position after the end quote of a string in which `position` is. A backslash
        escapes the next character."""
        while True:
            match = _IN_STRING.search(self.text, position)
            if match and match[0] == '"':
                return match.end()
            if match and match.end() < len(self.text):
                position = match.end() + 1
            else:
                position = match.start() if match else len(self.text)
                yield from self.more()
