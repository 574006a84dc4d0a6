"""The calls of Qwen3-Coder: <function=NAME> and <parameter=NAME> with values as plain text."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallArguments,
    CallForm,
    Calls,
    CutOff,
    Malformed,
    Pieces,
    ToolFamily,
    ToolSchemas,
    called,
    grammar_call,
    object_pieces,
)

_CLOSE, _NEXT = "</parameter>", ("<parameter=", "</function>")
# A value on separate lines may contain such tags inside a line.
_ENDS_OF_LINES = (_CLOSE, f"\n{_CLOSE}", "\n<parameter=", "\n</function>")
_ENDS = (_CLOSE, *_NEXT)


BEGIN, END = "<tool_call>", "</tool_call>"
_TAGS = ("<function=", "<parameter=")  # in its templates


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    return read_function(reader, opener, END, schemas)


def read_function(reader: BlockReader, opener: str, end: str, schemas: ToolSchemas) -> Calls:
    """Read the call of a block; the opener may be <function= itself."""
    if opener != "<function=":
        if (yield from grammar_call(reader, schemas, end)):
            return
        yield from reader.expect("<function=")
    name, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
    yield from called(schemas, name, object_pieces(_members(reader, schemas.call(name))))
    yield from reader.space()
    yield from reader.take_end(end)


def _members(reader: BlockReader, arguments: CallArguments) -> Pieces[None]:
    yield from reader.space()
    end = yield from reader.expect(*_NEXT)
    gap = ""
    while "<parameter=" in end:
        key, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
        if "\n" in key:
            raise Malformed
        end = yield from arguments.member(gap, key, _value(reader))
        gap = ", "


def _value(reader: BlockReader) -> Pieces[str]:
    """Read a value and return the next tag; the value's end tag counts only before that tag."""
    lines = yield from reader.take("\n")
    while True:
        end = yield from reader.pieces_until(*(_ENDS_OF_LINES if lines else _ENDS))
        if not end.endswith(_CLOSE):
            return end
        start = reader.position
        yield from reader.space()
        if following := (yield from reader.take(*_NEXT)):
            return following
        rest = reader.text[reader.position :]
        if reader.ended and any(mark.startswith(rest) for mark in _NEXT):
            raise CutOff
        space = reader.text[start : reader.position]
        yield end  # the tag is part of the value
        reader.text = space + reader.text[reader.position :]
        reader.position = 0


FAMILY = ToolFamily(
    "qwen3_coder",
    lambda template: all(t in template for t in _TAGS) and "<seed:tool_call>" not in template,
    CallForm(
        '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", trigger="<tool_call>"
    ),
    openers=(BEGIN, "<function="),
    read=read,
    special=(BEGIN, END),
)
