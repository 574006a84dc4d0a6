"""Calls written as <invoke name=...> with a <parameter name=...> each, which MiniMax, DeepSeek and
others make with tags of different prefixes; pure."""

from collections.abc import Callable

from pdserve.gateway.text.parsing.arguments import CallArguments, ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallPiece,
    Calls,
    called,
    grammar_call,
    object_pieces,
)
from pdserve.gateway.text.parsing.reader import (
    MAX_NAME_CHARS,
    BlockReader,
    Malformed,
    Pieces,
    Reading,
)

Value = Callable[[BlockReader, str], Pieces[None]]  # its text to the end tag, which is read


def _without_lines(reader: BlockReader, end: str) -> Pieces[None]:
    """A text without the line breaks at its beginning and end."""
    lines, begun = "", False
    for text in reader.pieces_until(end):
        if text is None:
            yield None
            continue
        text = lines + text if begun else text.lstrip("\n")
        body = text.rstrip("\n")
        lines = text[len(body) :]
        if body:
            begun = True
            yield body


def whole_text(reader: BlockReader, end: str) -> Pieces[None]:
    """A text as it is."""
    yield from reader.pieces_until(end)


def read_invokes(
    reader: BlockReader,
    prefix: str,
    end: str,
    schemas: ToolSchemas,
    value: Value = _without_lines,
) -> Calls:
    """The calls of a block to its end tag; `prefix` stands after the bracket of each inner tag, and
    `value` reads an argument that is no JSON."""
    if (yield from grammar_call(reader, schemas, end)):
        return
    begin = f"<{prefix}invoke name="
    if (yield from reader.expect(begin, end)) == end:
        return
    while True:
        yield from read_invoke(reader, prefix, schemas, value)
        yield from reader.space()
        if (yield from reader.closes(end)):
            return
        yield from reader.expect(begin)


def read_invoke(
    reader: BlockReader, prefix: str, schemas: ToolSchemas, value: Value = _without_lines
) -> Calls:
    """An invocation, from its name on."""
    name, is_whole = yield from read_head(reader)
    if is_whole:
        yield CallPiece(name, "{}", last=True)
        return
    words = f"{prefix}invoke", f"{prefix}parameter"
    members = read_members(reader, words, schemas.call(name), value)
    yield from called(schemas, name, object_pieces(members))


def read_head(reader: BlockReader) -> Reading[tuple[str, bool]]:
    """The name of an invocation, and whether its first tag ends it."""
    head, _ = yield from reader.until(">", most=MAX_NAME_CHARS)
    return unquoted(head.removesuffix("/")), head.endswith("/")


def read_members(
    reader: BlockReader, words: tuple[str, str], known: CallArguments, value: Value
) -> Pieces[None]:
    """The arguments of an invocation, to its end tag. `words`: of the tags of an invocation and an
    argument."""
    invoke, parameter = words
    close = f"</{invoke}>"
    gap = ""
    while (yield from _tag(reader, f"<{parameter} name=", close)) != close:
        head, _ = yield from reader.until(">", most=MAX_NAME_CHARS)
        key, _, said = head.partition(" string=")
        key = unquoted(key)
        end = f"</{parameter}>"
        texts = reader.pieces_until(end)
        if not said:
            yield from known.member(gap, key, value(reader, end))
        elif "true" in said:
            yield from CallArguments(None).member(gap, key, texts)
        else:
            yield from known.member(gap, key, texts, json=True)
        gap = ", "


def _tag(reader: BlockReader, *tags: str) -> Reading[str]:
    yield from reader.space()
    return (yield from reader.expect(*tags))


def unquoted(text: str) -> str:
    """The value of an attribute. Raises Malformed for an empty one."""
    text = text.strip().strip("\"'")
    if not text:
        raise Malformed
    return text
