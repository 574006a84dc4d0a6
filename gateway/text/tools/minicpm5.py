"""The calls of MiniCPM 5: <function name=...> with a <param name=...> each, whose value may be
CDATA."""

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    ToolFamily,
    called,
    json_arguments,
    object_pieces,
)
from pdserve.gateway.text.parsing.invoke import read_members, unquoted
from pdserve.gateway.text.parsing.reader import MAX_NAME_CHARS, BlockReader, Pieces

BEGIN, END = "<function name=", "</function>"
CDATA, CDATA_END = "<![CDATA[", "]]>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    head, _ = yield from reader.until(">", most=MAX_NAME_CHARS)
    name = unquoted(head)
    yield from reader.space()
    if (yield from reader.first()) == "{":  # as a grammar makes it
        yield from json_arguments(reader, schemas, name)
        yield from reader.space()
        yield from reader.closes(END)
        return
    members = read_members(reader, ("function", "param"), schemas.call(name), _value)
    yield from called(schemas, name, object_pieces(members))


def _value(reader: BlockReader, end: str) -> Pieces[None]:
    start = reader.at
    yield from reader.space()
    if not (yield from reader.takes(CDATA)):
        reader.at = start
        yield from reader.pieces_until(end)
        return
    yield from reader.pieces_until(CDATA_END)
    yield from reader.space()
    yield from reader.expect(end)


FAMILY = ToolFamily(
    "minicpm5",
    lambda template: BEGIN in template,
    CallForm(BEGIN + '"NAME">', END, trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=("<function", END, "<param", "</param>"),
)
