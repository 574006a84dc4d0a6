"""The calls of GLM 4.5 and later: in <tool_call>, a name, then <arg_key> and <arg_value> tags.

Other families use the same tags with a suffix.
"""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallArguments,
    CallForm,
    Calls,
    Malformed,
    Pieces,
    ToolFamily,
    ToolSchemas,
    called,
    grammar_call,
    object_pieces,
)

END = "</tool_call>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if (yield from grammar_call(reader, schemas, END)):
        return
    name, end = yield from reader.until("<arg_key>", END, max_chars=MAX_NAME_CHARS)
    name = name.strip()
    if not name or any(char.isspace() for char in name):
        raise Malformed
    yield from called(schemas, name, object_pieces(members(reader, schemas.call(name), end)))


def members(
    reader: BlockReader, arguments: CallArguments, mark: str = "", suffix: str = ""
) -> Pieces[None]:
    """Read the arguments up to the end of the call. `mark`: the first tag, if already read."""
    begin, end = f"<arg_key{suffix}>", f"</tool_call{suffix}>"
    value_end = f"</arg_value{suffix}>"
    gap = ""
    if not mark:
        yield from reader.space()
        mark = yield from reader.expect(begin, end)
    while mark != end:
        key, _ = yield from reader.until(f"</arg_key{suffix}>", max_chars=MAX_NAME_CHARS)
        yield from reader.space()
        yield from reader.expect(f"<arg_value{suffix}>")
        # An argument without a schema is JSON if it parses, else a string.
        texts = _value(reader, value_end, end)
        yield from arguments.member(gap, key, texts, json=not arguments.knows(key))
        gap = ", "
        yield from reader.space()
        mark = yield from reader.expect(begin, end)


def _value(reader: BlockReader, value_end: str, call_end: str) -> Pieces[None]:
    """Read a value; models sometimes omit its end tag at the end of the answer."""
    while (yield from reader.pieces_until(value_end, call_end)) == call_end:
        start = reader.position
        yield from reader.space()
        at_end = reader.ended and reader.position == len(reader.text)
        reader.position = start
        if at_end:
            reader.position -= len(call_end)
            return
        yield call_end


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
