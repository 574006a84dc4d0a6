"""The calls of GLM 4.5 and later: a name, then <arg_key> and <arg_value> in <tool_call>."""

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

END = "</tool_call>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if (yield from grammar_call(reader, schemas, END)):
        return
    name, end = yield from reader.until("<arg_key>", END, most=MAX_NAME_CHARS)
    name = name.strip()
    if not name or any(char.isspace() for char in name):
        raise Malformed
    yield from called(schemas, name, object_pieces(_members(reader, end, schemas.call(name))))


def _members(reader: BlockReader, end: str, known: CallArguments) -> Pieces[None]:
    gap = ""
    while end != END:
        key, _ = yield from reader.until("</arg_key>", most=MAX_NAME_CHARS)
        yield from reader.space()
        yield from reader.expect("<arg_value>")
        # What the tools do not describe is JSON, or else a string.
        yield from known.member(gap, key, _value(reader), json=not known.knows(key))
        gap = ", "
        yield from reader.space()
        end = yield from reader.expect("<arg_key>", END)


def _value(reader: BlockReader) -> Pieces[None]:
    """A value, whose end tag models sometimes leave out at the end of the answer."""
    while (yield from reader.pieces_until("</arg_value>", END)) == END:
        start = reader.at
        yield from reader.space()
        at_end = reader.ended and reader.at == len(reader.text)
        reader.at = start
        if at_end:
            reader.at -= len(END)
            return
        yield END


FAMILY = ToolFamily(
    "glm45",
    lambda template: "<arg_key>" in template,
    CallForm(
        '<tool_call>{"name": "NAME", "arguments": ', "}</tool_call>", trigger="<tool_call>"
    ),
    openers=("<tool_call>",),
    read=read,
    special=(
        "<tool_call>", END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ),
)  # fmt: skip
