"""MiniMax M3's calls: an argument's name is its tag, and a mark stands before every tag."""

from pdserve.gateway.text.parsing.arguments import CallArguments, ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    ToolFamily,
    called,
    grammar_call,
    object_pieces,
)
from pdserve.gateway.text.parsing.reader import MAX_NAME_CHARS, BlockReader, Malformed, Pieces

MARK = "]<]minimax[>["
BEGIN, END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, INVOKE_END = f"{MARK}<invoke name=", f"{MARK}</invoke>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if (yield from grammar_call(reader, schemas, END)):
        return
    while (yield from reader.expect(INVOKE, END)) == INVOKE:
        name, _ = yield from reader.until(">", most=MAX_NAME_CHARS)
        name = name.strip().strip('"')
        if not name:
            raise Malformed
        yield from called(schemas, name, object_pieces(_members(reader, schemas.call(name))))
        yield from reader.space()
        if (yield from reader.closes(END)):
            return


def _members(reader: BlockReader, known: CallArguments) -> Pieces[None]:
    gap = ""
    while not (yield from reader.taken(INVOKE_END)):
        yield from reader.expect(f"{MARK}<")
        key, _ = yield from reader.until(">", most=MAX_NAME_CHARS)
        if not key or key.startswith("/"):
            raise Malformed
        yield from known.member(gap, key, _text(reader, f"{MARK}</{key}>"))
        gap = ", "


def _text(reader: BlockReader, end: str) -> Pieces[None]:
    yield from reader.pieces_until(end)


FAMILY = ToolFamily(
    "minimax_m3",
    lambda template: MARK in template,
    CallForm(BEGIN + '\n{"name": "NAME", "arguments": ', "}\n" + END, trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=(MARK, BEGIN, END),
)
