"""Calls of MiniMax M3: each argument's tag is its name, and a mark precedes every tag. Objects
contain such tags, and lists contain <item>."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    MAX_VALUE_DEPTH,
    BlockReader,
    CallArguments,
    Calls,
    Malformed,
    Pieces,
    Reading,
    ToolSchemas,
    calls_in_section,
    grammar_call,
    json_text,
    object_pieces,
    streamed_call,
    tagged_family,
)

MARK = "]<]minimax[>["
BEGIN, END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, INVOKE_END = f"{MARK}<invoke name=", f"{MARK}</invoke>"
ITEM = "item"


def _read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if not (yield from grammar_call(reader, schemas, END)):
        yield from calls_in_section(reader, INVOKE, END, lambda: _call(reader, schemas))


def _call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    name, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
    name = name.strip().strip('"')
    if not name:
        raise Malformed
    members = _members(reader, schemas.call(name), INVOKE_END)
    yield from streamed_call(schemas, name, object_pieces(members))


def _members(
    reader: BlockReader, arguments: CallArguments, end: str, depth: int = 0
) -> Pieces[None]:
    gap = ""
    while not (yield from reader.take_after_space(end)):
        yield from reader.expect(f"{MARK}<")
        key, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
        if not key or key.startswith("/"):
            raise Malformed
        yield from _value(reader, arguments, f"{gap}{json_text(key)}: ", key, depth)
        gap = ", "


def _value(
    reader: BlockReader, arguments: CallArguments, head: str, key: str, depth: int
) -> Pieces[None]:
    """Read a value after its tag; `head` is yielded before it."""
    end = f"{MARK}</{key}>"
    first = (yield from _element(reader)) if arguments.may_contain(key) else ""
    if not first:
        start = reader.position
        if arguments.must_contain(key) and (yield from reader.take_after_space(end)):
            yield head + ("[]" if arguments.may_be_list(key) else "{}")
            return
        reader.position = start
        is_json = depth > 0 and not arguments.knows(key)
        yield from arguments.value(head, key, reader.pieces_until(end), json=is_json)
        return
    if depth == MAX_VALUE_DEPTH:
        raise Malformed
    within = arguments.within(key)
    if first != ITEM or not arguments.may_be_list(key):
        yield f"{head}{{"
        yield from _members(reader, within, end, depth + 1)
        yield "}"
        return
    head += "["
    while not (yield from reader.take_after_space(end)):
        yield from reader.expect(f"{MARK}<{ITEM}>")
        yield from _value(reader, within, head, ITEM, depth + 1)
        head = ", "
    yield "]"


def _element(reader: BlockReader) -> Reading[str]:
    """Return the name of the element that begins here, without reading it; empty for a text."""
    start = reader.position
    name = ""
    if (yield from reader.take_after_space(f"{MARK}<")):
        name, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
    reader.position = start
    return "" if name.startswith("/") else name


FAMILIES = (
    tagged_family(
        "minimax_m3",
        BEGIN,
        END,
        _read,
        matches=lambda template: MARK in template,
        space="\n",
        special=(MARK,),
    ),
)
