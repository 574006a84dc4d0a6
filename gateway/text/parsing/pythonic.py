"""Calls written as in Python, NAME(key=value, ...); pure."""

import re

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import Calls, called
from pdserve.gateway.text.parsing.pieces import LiteralPieces
from pdserve.gateway.text.parsing.reader import MAX_NAME_CHARS, BlockReader, Malformed, Pieces

_NAME = re.compile(r"\w[\w.-]*")


def python_call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    """Reads a call. Raises CutOff, Malformed."""
    yield from reader.space()
    start = reader.at
    while True:
        found = _NAME.match(reader.text, start)
        end = found.end() if found else start
        if end - start > MAX_NAME_CHARS or (not found and start < len(reader.text)):
            raise Malformed
        if end < len(reader.text):
            break
        yield from reader.more()
    name = reader.text[start:end]
    reader.at = end
    yield from reader.expect("(")
    if not all(part.isidentifier() for part in name.replace("-", "_").split(".")):
        raise Malformed
    yield from called(schemas, name, _arguments(reader))


def _arguments(reader: BlockReader) -> Pieces[None]:
    """The keywords to the closing bracket, as an object."""
    literals = LiteralPieces(reader)
    head = "{"
    while not (yield from reader.taken(")")):
        yield from reader.space()
        key, _ = yield from reader.until("=", most=MAX_NAME_CHARS)
        key = key.rstrip()
        if not key.isidentifier():
            raise Malformed
        yield from literals.value(f'{head}"{key}": ')
        head = ", "
        if not (yield from reader.taken(",")):
            yield from reader.expect(")")
            break
    yield "}" if head == ", " else "{}"
