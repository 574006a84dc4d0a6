"""The calls of MiniCPM 5: <function name=...> with <param name=...> tags, whose values may be
CDATA."""

from pdserve.text.parsing import (
    BlockReader,
    CallForm,
    CallPiece,
    Calls,
    Pieces,
    ToolFamily,
    ToolSchemas,
    called,
    json_arguments,
    object_pieces,
    read_head,
    read_members,
)

BEGIN, END = "<function name=", "</function>"
CDATA, CDATA_END = "<![CDATA[", "]]>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    name, is_self_closing = yield from read_head(reader)
    if is_self_closing:
        yield CallPiece(name, "{}", last=True)
        return
    yield from reader.space()
    if (yield from reader.first()) == "{":  # the form of a grammar
        yield from json_arguments(reader, schemas, name)
        yield from reader.space()
        yield from reader.take_end(END)
        return
    members = read_members(reader, ("function", "param"), schemas.call(name), _value)
    yield from called(schemas, name, object_pieces(members))


def _value(reader: BlockReader, end: str) -> Pieces[None]:
    start = reader.position
    yield from reader.space()
    if not (yield from reader.take(CDATA)):
        reader.position = start
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
