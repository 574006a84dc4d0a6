"""Converts the arguments of a tool call to pieces of valid JSON text while the model writes them;
pure.

Each generator yields text as soon as its JSON form is certain, reads on from its reader's position,
and keeps no position across a yielded piece. Invariant: the joined pieces do not depend on how the
input is split.
"""

import json
import re
from collections.abc import Mapping

from pdserve.text.parsing.reader import (
    MAX_NAME_CHARS,
    MISTRAL_CALLS,
    BlockReader,
    CutOff,
    Malformed,
    Pieces,
    Reading,
)
from pdserve.text.parsing.values import MAX_VALUE_DEPTH, MAX_VALUES, json_value, word_value

MAX_JSON_DEPTH = 200  # the limit of pydantic_core

_TRIPLE = ('"""', "'''")
_QUOTES = (*_TRIPLE, '"', "'")
_IN_STRING = {q: re.compile(rf"{q}|[{q[0]}\"\\\x00-\x1f]") for q in _QUOTES}
_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_JSON_ESCAPE = re.compile(  # no half of a surrogate pair
    r"""\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"""
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*+("?)|[{}\[\]]', re.DOTALL)
_WHOLE_CHARS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+')  # of a string
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")

_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|.))",
    re.DOTALL,
)
_RAW_ESCAPE = re.compile(r"\\.", re.DOTALL)
_LONGEST_ESCAPE = 12  # two surrogates
_WORD = re.compile(r"[\w.+-]*")
_OPENING = re.compile(r"""[rRuU]?(?:'{3}|"{3}|'|")""")  # the beginning of a Python string
_HALF_OPENING = re.compile(r"""[rRuU]?(?:'{0,2}|"{0,2})\Z""")
_LONG_NUMBER = re.compile(r"[+-]?[0-9][0-9.eE+-]{4}")  # its beginning; the rest may be invalid
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


def json_escaped(text: str) -> str:
    """Escape a text for use inside a JSON string; the quotes are not included."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_pieces(reader: BlockReader) -> Pieces[None]:
    """Read a JSON object that a model writes, and yield it as pieces of valid JSON.

    Corrects words, numbers and quotes in Python notation, control characters and wrong escapes in
    strings, and trailing commas. Commas, keys and the first bracket are yielded only with the value
    after them, or with the beginning of a long number. Raises CutOff if the text ends inside the
    object, Malformed if it cannot be corrected.
    """
    brackets: list[str] = []  # the closing brackets of open objects and lists
    held: list[str] = []
    quote = ""  # of the open string
    after = "{"  # the last token: a value is "v", a key "k"
    last = ""  # the value at the end of the text, with the held text before it
    is_complete = malformed = False
    while not (is_complete or malformed):
        start = reader.position
        # Only unread text, since a waiting generator keeps it.
        text, position = reader.text[start:], 0
        parts: list[str] = []
        while not (is_complete or malformed):
            if quote:
                match = _IN_STRING[quote].search(text, position)
                end = match.start() if match else len(text)
                target = held if after == "k" else parts
                target.append(text[position:end])
                position = end
                if match is None:
                    break
                mark, position = match[0], match.end()
                if mark == "\\":
                    escape = _JSON_ESCAPE.match(text, end)
                    is_incomplete = len(text) - end < _LONGEST_ESCAPE and text[
                        position : position + 1
                    ] in ("", "u")
                    if escape:
                        mark, position = escape[0], escape.end()
                    elif quote in _TRIPLE and text.startswith("\n", position):
                        mark, position = "", position + 1
                    elif is_incomplete and (position == len(text) or not reader.ended):
                        position = end
                        break
                    elif quote[0] == "'" and text.startswith("'", position):
                        mark, position = "'", position + 1
                    else:
                        mark = "\\\\"
                elif mark == quote:
                    mark, quote = '"', ""
                elif not reader.ended and len(quote) > 1 and quote.startswith(text[end:]):
                    position = end
                    break
                else:
                    mark = json_escaped(mark)
                target.append(mark)
                continue
            space = _JSON_SPACE.match(text, position)
            assert space is not None  # the pattern also matches ""
            held.append(space[0])
            position = space.end()
            first = text[position : position + 1]
            is_key = bool(brackets) and brackets[-1] == "}" and after in ("{", ",")
            is_value = not is_key and after in (("{", ",", ":") if brackets else ("{",))
            word = _WORD.match(text, position) if is_value else None
            if not first:
                break
            if first in "\"'" and (is_key or is_value):
                quote = _quote(text, position, ended=reader.ended)
                if not quote:
                    break
                held.append('"')
                position += len(quote) - 1
                after = "k" if is_key else "v"
                if is_value:
                    parts += held
                    held = []
            elif first in "{[" and is_value:
                rest = text[position : position + len(MISTRAL_CALLS)]
                if rest != MISTRAL_CALLS and MISTRAL_CALLS.startswith(rest) and not reader.ended:
                    break
                malformed = rest == MISTRAL_CALLS or len(brackets) == MAX_JSON_DEPTH
                if malformed:
                    break
                held.append(first)
                if brackets:
                    parts += held
                    held = []
                brackets.append("}" if first == "{" else "]")
                after = "{"
            elif brackets and first == brackets[-1] and after in ("{", ",", "v"):
                parts += (first,) if after == "," else (*held, first)
                held = []
                brackets.pop()
                after, is_complete = "v", len(brackets) == 0
            elif (first == "," and after == "v") or (first == ":" and after == "k"):
                held.append(first)
                after = first
            elif word and word[0]:
                if _LONG_NUMBER.match(word[0]):
                    parts += held
                    held = []
                if word.end() == len(text) and len(word[0]) <= MAX_NAME_CHARS:
                    last = _last_word("".join(held), word[0]) if reader.ended else ""
                    break
                try:
                    parts += (*held, _json_word(word[0]))
                except Malformed:
                    malformed = True
                    break
                held = []
                position, after = word.end(), "v"
                continue
            else:
                malformed = True
                break
            position += 1
        reader.position = start + position
        if piece := "".join(parts):
            yield piece
        if malformed:
            raise Malformed
        if reader.ended and not is_complete:
            raise CutOff(value=last)
        if not is_complete:
            yield None


def _quote(text: str, position: int, *, ended: bool) -> str:
    """Return the quotation mark(s) with which a string begins at `position`; "" if more text is
    needed to tell a single quotation mark from a triple one."""
    quote = next(quote for quote in _QUOTES if text.startswith(quote, position))
    rest = text[position : position + 3]
    return "" if not ended and len(rest) < 3 and rest == quote * len(rest) else quote


def _last_word(head: str, text: str) -> str:
    """Return `head` and the number or name at the end of a cut-off text as JSON; "" if that is not
    a value."""
    try:
        return head + _json_word(text)
    except Malformed:
        return ""


def _json_word(text: str, *, as_written: bool = True) -> str:
    """Convert a number or a name such as True to JSON. With `as_written`, valid JSON is returned
    unchanged. An invalid text that begins with a long number becomes a string. Raises Malformed for
    other invalid texts."""
    if len(text) > MAX_NAME_CHARS:
        raise Malformed
    try:
        value = word_value(text)
    except Malformed:
        if not _LONG_NUMBER.match(text):
            raise
        return f'"{json_escaped(text)}"'
    return text if as_written and _JSON_WORD.fullmatch(text) else value


def quoted_json_pieces(reader: BlockReader) -> Pieces[None]:
    """Read a JSON string that contains an encoded JSON object (arguments written as a string), and
    yield the object in pieces; {} if the string is empty. The string is read to its end even if the
    object is malformed. Raises CutOff, Malformed."""
    yield from reader.expect('"')
    inner = BlockReader("")
    pieces = _object_pieces(inner)
    is_complete = malformed = False
    while not inner.ended:
        try:
            text = yield from _unquoted(reader)
        except CutOff:
            inner.ended = True
            next(pieces, None)  # raises CutOff with the value at the end of the text
            raise
        if text:
            inner.feed(text)
        else:
            yield from reader.expect('"')
            inner.ended = True
        try:
            for piece in () if is_complete else pieces:
                if piece is None:
                    break
                inner.drop_read()
                yield piece
            else:
                is_complete = True
        except Malformed:
            is_complete = malformed = True
        if is_complete:
            inner.text, inner.position = "", 0
    if malformed:
        raise Malformed


class OpenJson:
    """Tracks which brackets and strings are still open in a JSON text that is pushed in pieces. A
    piece must not end inside an escape sequence."""

    def __init__(self) -> None:
        self._brackets: list[str] = []
        self._in_string = False
        self._lacks_value = False  # the text ends with a colon or comma

    def push(self, text: str) -> None:
        if self._in_string:
            text = f'"{text}'
        self._in_string = False
        for match in _STRUCTURE.finditer(text):
            mark = match[0]
            if mark[0] == '"':
                self._in_string = not match[1]
            elif mark in "{[":
                self._brackets.append("}" if mark == "{" else "]")
            else:
                self._brackets.pop()
        self._lacks_value = not self._in_string and text.rstrip().endswith((":", ","))

    @property
    def closing(self) -> str:
        """The text that would complete the JSON pushed so far: end quotes, a missing value, closing
        brackets."""
        value = '"' * self._in_string + "null" * self._lacks_value
        return value + "".join(reversed(self._brackets))


def _object_pieces(reader: BlockReader) -> Pieces[None]:
    first = yield from reader.first_after_space()
    if not first:
        yield "{}"
    elif first != "{":
        raise Malformed
    else:
        yield from json_pieces(reader)


def _unquoted(reader: BlockReader) -> Reading[str]:
    """Read and decode as much of a JSON string as is available; return "" at its end quote. Raises
    CutOff, Malformed."""
    while True:
        match = _WHOLE_CHARS.match(reader.text, reader.position)
        assert match is not None  # the pattern also matches ""
        end = match.end()
        following = reader.text[end : end + 6]
        surrogate = _HIGH_SURROGATE.search(reader.text, max(reader.position, end - 6), end)
        if surrogate and not reader.ended and len(following) < 6 and not following.startswith('"'):
            end = surrogate.start()
        if end > reader.position:
            value: str = json_value(f'"{reader.text[reader.position : end]}"')
            reader.position = end
            return value
        if following.startswith('"'):
            return ""
        if len(following) == 6:
            raise Malformed  # an invalid escape
        yield from reader.more()


class LiteralPieces:
    """Reads values in Python notation, which includes JSON, and yields them as JSON pieces. A
    subclass reads the notation of Gemma.

    `values_left`: how many more values may be read before the text counts as malformed.
    """

    quote = '"'
    escapes: Mapping[str, str] = _ESCAPED

    def __init__(self, reader: BlockReader, max_values: int = MAX_VALUES) -> None:
        self._reader = reader
        self.values_left = max_values

    def value(self, head: str = "", depth: int = 0) -> Pieces[None]:
        """Read the next value and yield it as JSON pieces. `head` (e.g. a key before the value) is
        yielded together with the value's beginning: a bracket, a quotation mark, a complete number
        or name, or when a long number begins. Raises CutOff, Malformed."""
        reader = self._reader
        self.values_left -= 1
        if depth > MAX_VALUE_DEPTH or self.values_left < 0:
            raise Malformed
        first = yield from reader.first_after_space()
        if first and first in "{[(":
            reader.position += 1
            if first == "{":
                yield from self._object(head, depth + 1)
            else:
                yield from self._list(head, "]" if first == "[" else ")", depth + 1)
        elif opening := (yield from self._opening()):
            yield f'{head}"'
            while opening:
                yield from self._string(opening)
                yield from reader.space()
                opening = yield from self._opening()
            yield '"'
        elif first and first in "+-.0123456789TFNtfn":
            yield from self._word(head)
        else:
            yield from reader.expect(self.quote)  # raises

    def _object(self, head: str, depth: int) -> Pieces[None]:
        reader = self._reader
        # The first bracket of the arguments is yielded with a value instead.
        yields_head = bool(head) or depth > 1
        head += "{"
        begun = False
        while not (yield from reader.take_after_space("}")):
            yield from reader.space()
            key = yield from self._key()
            if yields_head and not begun:
                yield head
                head = ""
            yield from self.value(f"{head}{key}: ", depth)
            head = ", "
            begun = True
            if not (yield from reader.take_after_space(",")):
                yield from reader.expect("}")
                break
        yield "}" if begun else f"{head}}}"

    def _list(self, head: str, end: str, depth: int) -> Pieces[None]:
        reader = self._reader
        if end == ")":  # a tuple only with a comma
            if (yield from reader.take_after_space(end)):
                yield f"{head}[]"
                return
            value = ""
            for piece in self.value("", depth):
                if piece is None:
                    yield None
                else:
                    value += piece
            if (yield from reader.take_after_space(end)):
                yield head + value
                return
            yield from reader.expect(",")
            yield f"{head}[{value}"
            head = ", "
        else:
            head += "["
        while not (yield from reader.take_after_space(end)):
            yield from self.value(head, depth)
            head = ", "
            if not (yield from reader.take_after_space(",")):
                yield from reader.expect(end)
                break
        yield "]" if head == ", " else f"{head}]"

    def _key(self) -> Reading[str]:
        """Read the key of an object's member and the colon after it; return the key as a JSON
        string. Raises CutOff, Malformed."""
        opening = (yield from self._opening()) or (yield from self._reader.expect(self.quote))
        key = ""
        for piece in self._string(opening):
            if piece is None:
                yield
            else:
                key += piece
                if len(key) > MAX_NAME_CHARS:
                    raise Malformed
        yield from self._reader.expect_after_space(":")
        return f'"{key}"'

    def _opening(self) -> Reading[str]:
        """Read the beginning of a string, an optional prefix such as r and the quotation marks, and
        return it; "" if no string begins here."""
        reader = self._reader
        while True:
            rest = reader.text[reader.position : reader.position + 4]
            match = _OPENING.match(rest)
            if not _HALF_OPENING.match(rest) or (reader.ended and (match or not rest)):
                reader.position += match.end() if match else 0
                return match[0] if match else ""
            yield from reader.more()

    def _string(self, opening: str) -> Pieces[None]:
        """Yield the text of a string, escaped for JSON, and read its end quote. `opening`: the
        prefix and quotation marks with which it began. Raises CutOff."""
        reader = self._reader
        quote = opening.lstrip("rRuU")
        is_raw = opening[0] in "rR"
        pattern = re.compile(rf"{quote}|[{quote[0]}\\]")
        is_complete = False
        while not is_complete:
            parts: list[str] = []
            position = reader.position
            while not is_complete:
                match = pattern.search(reader.text, position)
                parts.append(reader.text[position : match.start() if match else None])
                position = match.end() if match else len(reader.text)
                if match is None:
                    break
                if match[0] == quote:
                    is_complete = True
                    break
                position -= 1
                if match[0] == quote[0]:
                    if quote.startswith(reader.text[position:]) and not reader.ended:
                        break
                    parts.append(quote[0])
                    position += 1
                    continue
                if len(reader.text) - position < _LONGEST_ESCAPE and not reader.ended:
                    next_char = reader.text[position + 1 : position + 2]
                    if not next_char or next_char in "xuU":
                        break
                escape = (_RAW_ESCAPE if is_raw else _ESCAPE).match(reader.text, position)
                if escape is None:
                    break  # the text ends inside the escape
                parts.append(escape[0] if is_raw else self._unescaped(escape))
                position = escape.end()
            reader.position = position
            if piece := "".join(parts):
                yield json_escaped(piece)
            if not is_complete:
                yield from reader.more()

    def _unescaped(self, match: re.Match[str]) -> str:
        if match[1]:
            return chr(0x10000 + ((int(match[1], 16) & 0x3FF) << 10) + (int(match[2], 16) & 0x3FF))
        code = match[3]
        if len(code) > 1:
            value = int(code[1:], 16)
            return chr(value) if value < 0x110000 and not 0xD800 <= value < 0xE000 else match[0]
        return self.escapes.get(code, code if code in "\\'\"" else match[0])

    def _word(self, head: str) -> Pieces[None]:
        """Read a number or a name such as True and yield it, after `head`, as JSON. Raises CutOff,
        Malformed."""
        reader = self._reader
        while True:
            match = _WORD.match(reader.text, reader.position)
            assert match is not None  # the pattern also matches ""
            if head and _LONG_NUMBER.match(match[0]):
                yield head
                head = ""
            elif len(match[0]) > MAX_NAME_CHARS:
                raise Malformed
            elif match.end() < len(reader.text):
                reader.position = match.end()
                yield f"{head}{_json_word(match[0], as_written=False)}"
                return
            elif reader.ended:
                raise CutOff(value=_last_word(head, match[0]))
            else:
                yield None


class JsonLiteralPieces(LiteralPieces):
    """Reads values in JSON notation, in which parts may be in Python notation, and yields them as
    JSON pieces."""

    escapes: Mapping[str, str] = {**_ESCAPED, "/": "/"}
