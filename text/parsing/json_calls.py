"""Reads tool calls that are JSON objects, or whose arguments are; pure. Readers are generators of
call pieces. They raise CutOff if the text ends inside a call, Malformed if the text is not a
call."""

import re
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from pdserve.text.parsing.arguments import ToolSchemas
from pdserve.text.parsing.family import CallPiece, Calls, ToolFamily
from pdserve.text.parsing.pieces import OpenJson, json_pieces, quoted_json_pieces
from pdserve.text.parsing.reader import (
    MAX_NAME_CHARS,
    BlockReader,
    CutOff,
    Malformed,
    Pieces,
    Reading,
)
from pdserve.text.parsing.values import json_text, json_value

_FIRST_KEY = re.compile(r'\{\s*"([^"\\]{0,32})"')
_HALF_KEY = re.compile(r'\{\s*(?:"[^"\\]{0,32})?\Z')
NAME_KEYS = ("name", "tool_name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
DEFINITION_KEYS = frozenset(("description", "strict"))  # of a tool definition; no call has them
SCHEMA_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "$schema", "$defs")
)
CALL_KEYS = frozenset((*NAME_KEYS, *ARGUMENT_KEYS, "type", "id", "tool_call_id"))


def call_of(value: Any, schemas: ToolSchemas, *, needs_arguments: bool = False) -> CallPiece:
    """Convert a parsed JSON object {"name": ..., "arguments" or "parameters": ...} to a call.
    Raises Malformed if the value is not a call, e.g. if it is the definition of a tool."""
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
    return _complete_call(name, {} if arguments is None else arguments)


def _complete_call(name: str, arguments: Any) -> CallPiece:
    if not name or not isinstance(arguments, dict):
        raise Malformed
    return CallPiece(name, json_text(arguments), last=True)


def streamed_call(schemas: ToolSchemas, name: str, pieces: Pieces[None], id: str = "") -> Calls:
    """Yield the call of the function `name`, whose arguments come as pieces of JSON.

    For a known tool the pieces are yielded as they come, and the call ends as cut off where they
    become malformed; a call of an unknown tool is yielded whole. Raises CutOff; Malformed if the
    pieces become malformed before one was yielded.
    """
    is_known = name in schemas
    held: list[str] = []
    output = OpenJson()
    try:
        for piece in pieces:
            if piece is None:
                yield None
            elif is_known:
                output.push(piece)
                yield CallPiece("" if held else name, piece, id)
                held = [piece]
            else:
                held.append(piece)
    except CutOff as end:
        if not (is_known and held):
            raise CutOff(name if is_known else "", id, certain=True) from None
        output.push(end.value)
        raise CutOff(id=id, closing=end.value + output.closing) from None
    except Malformed:
        if not (is_known and held):
            raise
        yield CallPiece(last=True, cut=True)
        return
    if is_known and held:
        yield CallPiece(last=True)
    else:
        yield replace(_complete_call(name, json_value("".join(held) or "{}")), id=id)


def json_call(reader: BlockReader, schemas: ToolSchemas, *, needs_arguments: bool = False) -> Calls:
    """Read one call that is a JSON object, e.g. {"name": ..., "arguments": {...}}; the arguments of
    a known tool are streamed. Raises CutOff, Malformed."""
    if (yield from reader.first_after_space()) not in ("{", ""):
        raise Malformed
    start = reader.position
    head = _CallHead(reader, schemas)
    try:
        streams = yield from head.read()
    except CutOff:
        name = head.name if head.name in schemas else ""
        raise CutOff(name, certain=head.has_arguments) from None
    except Malformed:
        streams = False
    if streams:
        yield from streamed_call(schemas, head.name, head.arguments())
        return
    reader.position = start
    value = json_value((yield from reader.balanced()))
    yield call_of(value, schemas, needs_arguments=needs_arguments)


def grammar_call(
    reader: BlockReader, schemas: ToolSchemas, end: str
) -> Generator[CallPiece | None, None, bool]:
    """Read one call in the form that grammars use, a JSON object and the tag `end`. Returns False,
    without reading, if no JSON object begins here. Raises CutOff, Malformed."""
    if (yield from reader.first_after_space()) != "{":
        return False
    yield from json_call(reader, schemas)
    yield from reader.take_end_after_space(end)
    return True


class _CallHead:
    """Reads the part of a call's JSON object before the arguments, where the function's name is."""

    def __init__(self, reader: BlockReader, schemas: ToolSchemas) -> None:
        self.name = ""
        self.has_arguments = False  # of a known tool, unless they are a schema
        self._reader = reader
        self._schemas = schemas
        self._depth = 0

    def read(self) -> Reading[bool]:
        """Read the object up to the arguments; return whether they can be streamed: they belong to
        a known tool and are an object or a string. Raises CutOff, Malformed."""
        reader = self._reader
        opens = True
        while True:
            if opens:
                yield from reader.expect("{")
                self._depth += 1
                opens = False
            yield from reader.space()
            key = json_value((yield from reader.string()))
            yield from reader.expect_after_space(":")
            yield from reader.space()
            self.has_arguments = key in ARGUMENT_KEYS and self.name in self._schemas
            first = yield from reader.first()
            if not first:
                yield from reader.more()
            if key in NAME_KEYS and first == '"':
                self.name = json_value((yield from reader.string()))
            elif key in DEFINITION_KEYS:
                return False
            elif self.has_arguments:
                if key == "parameters" and first == "{" and (yield from self._may_be_schema()):
                    return False
                return first in ("{", '"')
            elif key == "function" and first == "{" and self._depth == 1:
                opens = True
                continue
            else:
                yield from _skip_value(reader)
            if not (yield from reader.take_after_space(",")):
                if not (yield from reader.first()):
                    yield from reader.more()
                return False

    def _may_be_schema(self) -> Reading[bool]:
        """Return whether the object that begins here looks like the JSON schema of a tool's
        definition, rather than like arguments of the tool. Raises CutOff."""
        reader = self._reader
        start = reader.position
        key = ""
        yield from reader.expect("{")
        if (yield from reader.first_after_space()) == '"':
            key = (yield from reader.string())[1:-1]
        reader.position = start
        return key in SCHEMA_KEYS and not self._schemas.knows(self.name, key)

    def arguments(self) -> Pieces[None]:
        reader = self._reader
        if (yield from reader.first()) == "{":
            yield from json_pieces(reader)
        else:
            yield from quoted_json_pieces(reader)
        yield from self._tail()

    def _tail(self) -> Reading[None]:
        """Read the rest of the call's object after the arguments, as far as it is valid JSON."""
        reader = self._reader
        try:
            while self._depth:
                if (yield from reader.take_after_space("}")):
                    self._depth -= 1
                    continue
                start = reader.position
                if not (yield from reader.take(",")):
                    return
                if (yield from reader.first_after_space()) != '"':
                    reader.position = start
                    return
                yield from reader.string()
                yield from reader.expect_after_space(":")
                yield from _skip_value(reader)
        except CutOff:
            reader.position = len(reader.text)
        except Malformed:
            return


def _skip_value(reader: BlockReader) -> Reading[None]:
    first = yield from reader.first_after_space()
    if first == '"':
        yield from reader.string()
    elif first and first in "{[":
        yield from reader.balanced()
    else:
        yield from reader.until(",", "}", max_chars=MAX_NAME_CHARS)
        reader.position -= 1


def json_arguments(reader: BlockReader, schemas: ToolSchemas, name: str, id: str = "") -> Calls:
    """Read the arguments of a call of the function `name`, a JSON object; those of a known tool are
    streamed. `id`: the model's id of the call. Raises CutOff, Malformed."""
    name = name.strip()
    try:
        first = yield from reader.first_after_space()
        if not first:
            yield from reader.more()
    except CutOff:
        raise CutOff(name if name in schemas else "", id, certain=True) from None
    if first != "{" or not name:
        raise Malformed
    if name in schemas:
        yield from streamed_call(schemas, name, json_pieces(reader), id)
    else:
        yield replace(_complete_call(name, json_value((yield from reader.balanced()))), id=id)


def json_list(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    """Read the calls in a JSON list, whose opening bracket has been read, up to its closing
    bracket. Raises CutOff, Malformed."""
    while True:
        if (yield from reader.take_after_space("]")):
            return
        yield from json_call(reader, schemas)
        if (yield from reader.expect_after_space(",", "]")) == "]":
            return


def json_calls(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    """Read one or more calls: JSON objects separated by commas, semicolons or white space, or a
    JSON list of them. Raises CutOff, Malformed."""
    if (yield from reader.take_after_space("[")):
        if (yield from reader.take_after_space("]")):
            raise Malformed
        yield from json_list(reader, schemas)
        return
    yield from json_call(reader, schemas)
    while (yield from reader.take_after_space(";", ",")) or (yield from reader.first()) == "{":
        yield from json_call(reader, schemas)


def in_form_only(family: ToolFamily) -> ToolFamily:
    """Return a copy of a tool family that reads only calls written as its grammar form
    (`family.form`). For answers under a grammar, in which calls in another form would not be held
    to their tools' schemas."""
    form = family.form
    prefix, suffix = form.begin.removeprefix(form.trigger).split("NAME")

    def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
        if prefix:
            yield from reader.expect(prefix)
        name, _ = yield from reader.until(suffix, max_chars=MAX_NAME_CHARS)
        yield from json_arguments(reader, schemas, name)
        if form.end:
            yield from reader.take_end(form.end)

    return replace(family, openers=(form.trigger,), bare="", read=read, in_fences=True)


def calls_in_section(
    reader: BlockReader, begin: str, end: str, read_call: Callable[[], Calls]
) -> Calls:
    """Read the calls of a section: each begins with the tag `begin`, and the tag `end` ends the
    section. `read_call` reads one call after its tag. Raises CutOff, Malformed."""
    if (yield from reader.expect(begin, end)) == end:
        return
    while True:
        yield from read_call()
        if (yield from reader.take_end_after_space(end)):
            return
        yield from reader.expect(begin)


def listed_calls(reader: BlockReader, read_call: Callable[[], Calls]) -> Calls:
    """Read calls separated by commas, up to a closing square bracket. `read_call` reads one call.
    Raises CutOff, Malformed."""
    mark = ","
    while mark == ",":
        yield from read_call()
        mark = yield from reader.expect_after_space(",", "]")


def object_pieces(members: Pieces[None]) -> Pieces[None]:
    """Yield the text of a JSON object from pieces of its members, adding the braces. The pieces
    must include the commas between members."""
    begun = False
    for piece in members:
        if piece is not None and not begun:
            begun = True
            yield f"{{{piece}"
        else:
            yield piece
    yield "}" if begun else "{}"


def _first_key(reader: BlockReader) -> Reading[str]:
    """Return the first key of the JSON object that begins here; the read position stays before the
    object. Raises CutOff, Malformed."""
    while (match := _FIRST_KEY.match(reader.text, reader.position)) is None:
        rest = reader.text[reader.position : reader.position + 64]
        if rest and not _HALF_KEY.match(rest):
            raise Malformed
        yield from reader.more()
    return match[1]


def bare_call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    """Read one call that is a JSON object without tags around it. The first key decides whether it
    is a call, so that another JSON object at the beginning of an answer is not held back. Raises
    CutOff, Malformed."""
    yield from reader.space()
    if (yield from _first_key(reader)) not in CALL_KEYS:
        raise Malformed
    yield from json_call(reader, schemas, needs_arguments=True)


def bare_calls(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    """Read one or more calls without tags around them: a sequence of JSON objects, a list of them,
    or {"tool_calls": [...]} as xLAM 1 writes it. Raises CutOff, Malformed."""
    first = yield from reader.first_after_space()
    wrapped = first == "{" and (yield from _first_key(reader)) == "tool_calls"
    if wrapped:
        head, _ = yield from reader.until("[", max_chars=MAX_NAME_CHARS)
        if head.partition(":")[2].strip():
            raise Malformed
    if wrapped or (yield from reader.take_after_space("[")):
        yield from listed_calls(reader, lambda: bare_call(reader, schemas))
        if wrapped:
            yield from reader.take_after_space("}")
        return
    has_next = True
    while has_next:
        yield from bare_call(reader, schemas)
        has_next = (
            bool((yield from reader.take_after_space(";", ",")))
            or (yield from reader.first()) == "{"
        )
