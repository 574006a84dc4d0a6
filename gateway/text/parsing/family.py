"""What a plug-in of gateway/text/tools or gateway/text/reasoning is; pure data."""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.pieces import OpenJson, json_pieces, quoted_json_pieces
from pdserve.gateway.text.parsing.reader import (
    MAX_NAME_CHARS,
    BlockReader,
    CutOff,
    Malformed,
    Pieces,
    Reading,
)
from pdserve.gateway.text.parsing.values import json_text, json_value
from pdserve.gateway.text.parts import ContentPart


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call as a model writes it: the first has its name, and `last` ends it."""

    name: str = ""
    arguments: str = ""  # a piece of a JSON object's text
    id: str = ""  # that the model has given it
    last: bool = False


Calls = Generator[CallPiece | None, None, None]  # None: needs more text


class ContentParser(Protocol):
    """Text in any pieces in, content out; `finish` gives what was held back. `cut`: the answer has
    ended by its length, and so perhaps in the middle of a call."""

    def push(self, text: str) -> list[ContentPart]: ...

    def finish(self, *, cut: bool = False) -> list[ContentPart]: ...


class ThoughtParser(ContentParser, Protocol):
    """One of thoughts; `closed`: no more of them come."""

    @property
    def closed(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call is written whose arguments a grammar holds to a schema: `begin`, with the
    function's name for NAME, the arguments as JSON, `end`. Free text turns into calls where
    `trigger` begins."""

    begin: str
    end: str
    trigger: str


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How models of a family call tools.

    `read` reads the calls of a block from after the opener that it began with ("" for a block that
    began with one of the characters `bare` at the start of the answer, whose first call is one of a
    tool that the model has) and raises Malformed for what are none. `whole` makes a parser of whole
    answers instead, with reasoning; then `read` is not used; it begins with `opening` where the
    answer goes on with a message. `special`: texts that the parser needs even where they are
    special tokens. `around`: tags around an answer's text, which are left out.
    """

    name: str  # as vLLM calls it, where it knows it
    matches: Callable[[str], bool]  # whether a chat template is of this family
    form: CallForm
    openers: Sequence[str] = ()
    bare: str = ""
    read: Callable[[BlockReader, str, ToolSchemas], Calls] | None = None
    special: Sequence[str] = ()
    whole: Callable[[Callable[[], str], bool, ToolSchemas | None], ContentParser] | None = None
    opening: str = ""
    around: Sequence[str] = ()
    id_len: int = 0  # letters and digits of a call's id, where templates insist on so many

    @property
    def has_tags(self) -> bool:
        """Whether a call begins with a tag, which no answer in JSON begins with."""
        return self.form.trigger in self.openers


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """How models of a family think before they answer, between `begin` and `end`.

    `make(open)` makes a parser; `open`: the prompt has opened the thought already. `after`: the
    text after which the answer begins, with `lead` between where something may stand there that a
    structure leaves out. `written`: what the model writes for `begin` and `end`,
    where that is something else. `opening`: what the parser begins with where the answer goes on
    with a message. `around`: tags around the answer's text, which are left out.
    """

    name: str
    matches: Callable[[str], bool]  # whether a chat template is of this family
    make: Callable[[bool], ThoughtParser]
    begin: str
    end: str
    after: str
    special: Sequence[str] = ()
    written: tuple[str, str] | None = None
    lead: str = ""
    opening: str = ""
    around: Sequence[str] = ()


def call_of(value: Any, schemas: ToolSchemas, *, needs_arguments: bool = False) -> CallPiece:
    """A call written as {"name": ..., "arguments" or "parameters": ...}. Raises Malformed, also for
    the definition of a tool."""
    if not isinstance(value, dict):
        raise Malformed
    function = value.get("function")
    if isinstance(function, dict):
        value = function
    name = next((value[key] for key in NAME_KEYS if key in value), None)
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name or (needs_arguments and arguments is None):
        raise Malformed
    if DEFINITION_KEYS & value.keys() or (
        "arguments" not in value
        and isinstance(arguments, dict)
        and arguments.get("type") == "object"
        and not schemas.knows(name, "type")
    ):
        raise Malformed
    if isinstance(arguments, str):
        arguments = json_value(arguments) if arguments.strip() else {}
    return _whole(name, {} if arguments is None else arguments)


def _whole(name: str, arguments: Any) -> CallPiece:
    if not name or not isinstance(arguments, dict):
        raise Malformed
    return CallPiece(name, json_text(arguments), last=True)


def called(schemas: ToolSchemas, name: str, pieces: Pieces[None], id: str = "") -> Calls:
    """Gives the call of a function whose arguments come in pieces: as they come if it is one of the
    tools, otherwise whole. Arguments that have begun end where they are malformed, and what is open
    is closed. Raises CutOff, Malformed."""
    known = name in schemas
    held: list[str] = []
    written = OpenJson()
    try:
        for piece in pieces:
            if piece is None:
                yield None
            elif known:
                written.push(piece)
                yield CallPiece("" if held else name, piece, id)
                held = [piece]
            else:
                held.append(piece)
    except CutOff as end:
        if not (known and held):
            raise CutOff(name if known else "", id) from None
        written.push(end.value)
        raise CutOff(id=id, closing=end.value + written.closing) from None
    except Malformed:
        if not (known and held):
            raise
    if known and held:
        yield CallPiece(arguments=written.closing, last=True)
    else:
        yield replace(_whole(name, json_value("".join(held) or "{}")), id=id)


def json_call(reader: BlockReader, schemas: ToolSchemas, *, needs_arguments: bool = False) -> Calls:
    """Reads a call that is a JSON object. Raises CutOff, Malformed."""
    yield from reader.space()
    if (yield from reader.first()) not in ("{", ""):
        raise Malformed
    start = reader.at
    head = _CallHead(reader, schemas)
    try:
        streams = yield from head.read()
    except CutOff:
        raise CutOff(head.name if head.name in schemas else "") from None
    except Malformed:
        streams = False
    if streams:
        yield from called(schemas, head.name, head.arguments())
        return
    reader.at = start
    value = json_value((yield from reader.balanced()))
    yield call_of(value, schemas, needs_arguments=needs_arguments)


def grammar_call(
    reader: BlockReader, schemas: ToolSchemas, end: str
) -> Generator[CallPiece | None, None, bool]:
    """Reads a call as a grammar makes it, a JSON object, and its end tag; whether one begins here.
    Raises CutOff, Malformed."""
    yield from reader.space()
    if (yield from reader.first()) != "{":
        return False
    yield from json_call(reader, schemas)
    yield from reader.space()
    yield from reader.closes(end)
    return True


class _CallHead:
    """What comes before the arguments of a call that is a JSON object."""

    def __init__(self, reader: BlockReader, schemas: ToolSchemas) -> None:
        self.name = ""
        self._reader = reader
        self._schemas = schemas
        self._depth = 0

    def read(self) -> Reading[bool]:
        """Whether the arguments of a known tool follow. Raises CutOff, Malformed."""
        reader = self._reader
        opens = True
        while True:
            if opens:
                yield from reader.expect("{")
                self._depth += 1
                opens = False
            yield from reader.space()
            key = json_value((yield from reader.string()))
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            first = yield from reader.first()
            if not first:
                yield from reader.more()
            if key in NAME_KEYS and first == '"':
                self.name = json_value((yield from reader.string()))
            elif key in DEFINITION_KEYS:
                return False
            elif key in ARGUMENT_KEYS and self.name in self._schemas:
                if key == "parameters" and first == "{" and (yield from self._may_be_schema()):
                    return False
                return first in ("{", '"')
            elif key == "function" and first == "{" and self._depth == 1:
                opens = True
                continue
            else:
                yield from _skip_value(reader)
            if not (yield from reader.taken(",")):
                return False

    def _may_be_schema(self) -> Reading[bool]:
        """Whether the object that follows begins as a JSON schema, and not as arguments of the
        tool. Raises CutOff."""
        reader = self._reader
        start = reader.at
        key = ""
        yield from reader.expect("{")
        yield from reader.space()
        if (yield from reader.first()) == '"':
            key = (yield from reader.string())[1:-1]
        reader.at = start
        return key in SCHEMA_KEYS and not self._schemas.knows(self.name, key)

    def arguments(self) -> Pieces[None]:
        reader = self._reader
        if (yield from reader.first()) == "{":
            yield from json_pieces(reader)
        else:
            yield from quoted_json_pieces(reader)
        yield from self._tail()

    def _tail(self) -> Reading[None]:
        """Reads the rest of the object, as far as it is one."""
        reader = self._reader
        try:
            while self._depth:
                if (yield from reader.taken("}")):
                    self._depth -= 1
                    continue
                at = reader.at
                if not (yield from reader.takes(",")):
                    return
                yield from reader.space()
                if (yield from reader.first()) != '"':
                    reader.at = at
                    return
                yield from reader.string()
                yield from reader.space()
                yield from reader.expect(":")
                yield from _skip_value(reader)
        except CutOff:
            reader.at = len(reader.text)
        except Malformed:
            return


def _skip_value(reader: BlockReader) -> Reading[None]:
    yield from reader.space()
    first = yield from reader.first()
    if first == '"':
        yield from reader.string()
    elif first and first in "{[":
        yield from reader.balanced()
    else:
        yield from reader.until(",", "}", most=MAX_NAME_CHARS)
        reader.at -= 1


def json_arguments(reader: BlockReader, schemas: ToolSchemas, name: str, id: str = "") -> Calls:
    """Reads the arguments of a call, a JSON object. Raises CutOff, Malformed."""
    name = name.strip()
    try:
        yield from reader.space()
        first = yield from reader.first()
        if not first:
            yield from reader.more()
    except CutOff:
        raise CutOff(name if name in schemas else "", id) from None
    if first != "{" or not name:
        raise Malformed
    if name in schemas:
        yield from called(schemas, name, json_pieces(reader), id)
    else:
        yield replace(_whole(name, json_value((yield from reader.balanced()))), id=id)


def json_list(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    """Reads the calls of a JSON list, whose bracket is read. Raises CutOff, Malformed."""
    while True:
        if (yield from reader.taken("]")):
            return
        yield from json_call(reader, schemas)
        yield from reader.space()
        if (yield from reader.expect(",", "]")) == "]":
            return


def json_calls(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    """Reads a call that is a JSON object, several of them, or a list. Raises CutOff, Malformed."""
    if (yield from reader.taken("[")):
        if (yield from reader.taken("]")):
            raise Malformed
        yield from json_list(reader, schemas)
        return
    yield from json_call(reader, schemas)
    while (yield from reader.taken(";", ",")) or (yield from reader.first()) == "{":
        yield from json_call(reader, schemas)


def object_pieces(members: Pieces[None]) -> Pieces[None]:
    """An object's text from pieces of its members, which have their commas."""
    begun = False
    for piece in members:
        if piece is not None and not begun:
            begun = True
            yield f"{{{piece}"
        else:
            yield piece
    yield "}" if begun else "{}"


_FIRST_KEY = re.compile(r'\{\s*"([^"\\]{0,32})"')
_HALF_KEY = re.compile(r'\{\s*(?:"[^"\\]{0,32})?\Z')
NAME_KEYS = ("name", "tool_name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
DEFINITION_KEYS = frozenset(("description", "strict"))  # of a tool; no call has them
SCHEMA_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "$schema", "$defs")
)
CALL_KEYS = frozenset((*NAME_KEYS, *ARGUMENT_KEYS, "type", "id", "tool_call_id"))


def bare_call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    """Reads a call that is a JSON object without tags around it, and so known by its keys alone: an
    answer that begins with another object is not held back. Raises CutOff, Malformed."""
    yield from reader.space()
    while (key := _FIRST_KEY.match(reader.text, reader.at)) is None:
        rest = reader.text[reader.at : reader.at + 64]
        if rest and not _HALF_KEY.match(rest):
            raise Malformed
        yield from reader.more()
    if key[1] not in CALL_KEYS:
        raise Malformed
    yield from json_call(reader, schemas, needs_arguments=True)


def bare_calls(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    """Reads calls that are JSON objects without tags, one after the other, or a list of them.
    Raises CutOff, Malformed."""
    if (yield from reader.taken("[")):
        end = ","
        while end == ",":
            yield from bare_call(reader, schemas)
            yield from reader.space()
            end = yield from reader.expect(",", "]")
        return
    another = True
    while another:
        yield from bare_call(reader, schemas)
        yield from reader.space()
        another = bool((yield from reader.takes(";", ","))) or (yield from reader.first()) == "{"
