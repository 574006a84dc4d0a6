"""Reads calls written as <invoke name=...> with <parameter name=...> tags; pure.

MiniMax, DeepSeek and others use these tags with different prefixes.
"""

from collections.abc import Callable

from pdserve.text.parsing.arguments import CallArguments, ToolSchemas
from pdserve.text.parsing.family import CallPiece, Calls, called, grammar_call, object_pieces
from pdserve.text.parsing.reader import MAX_NAME_CHARS, BlockReader, Malformed, Pieces, Reading

Value = Callable[[BlockReader, str], Pieces[None]]  # reads a value's text and its end tag


def _without_lines(reader: BlockReader, end: str) -> Pieces[None]:
    """Yield a text up to `end` without leading and trailing line breaks."""
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


def raw_text(reader: BlockReader, end: str) -> Pieces[None]:
    """Yield a text up to `end` unchanged."""
    yield from reader.pieces_until(end)


def read_invokes(
    reader: BlockReader,
    prefix: str,
    end: str,
    schemas: ToolSchemas,
    value: Value = _without_lines,
) -> Calls:
    """Read the calls of a block up to its end tag. `prefix` follows the bracket of each inner tag;
    `value` reads an argument that is not JSON."""
    if (yield from grammar_call(reader, schemas, end)):
        return
    begin = f"<{prefix}invoke name="
    if (yield from reader.expect(begin, end)) == end:
        return
    while True:
        yield from read_invoke(reader, prefix, schemas, value)
        yield from reader.space()
        if (yield from reader.take_end(end)):
            return
        yield from reader.expect(begin)


def read_invoke(
    reader: BlockReader, prefix: str, schemas: ToolSchemas, value: Value = _without_lines
) -> Calls:
    """Read an invocation, beginning at its name."""
    name, is_self_closing = yield from read_head(reader)
    if is_self_closing:
        yield CallPiece(name, "{}", last=True)
        return
    tag_names = f"{prefix}invoke", f"{prefix}parameter"
    members = read_members(reader, tag_names, schemas.call(name), value)
    yield from called(schemas, name, object_pieces(members))


def read_head(reader: BlockReader) -> Reading[tuple[str, bool]]:
    """Read the name of an invocation; also return whether its first tag is self-closing."""
    head, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
    return unquoted(head.removesuffix("/")), head.endswith("/")


def read_members(
    reader: BlockReader, tag_names: tuple[str, str], arguments: CallArguments, value: Value
) -> Pieces[None]:
    """Read the arguments of an invocation up to its end tag. `tag_names`: the tag names of an
    invocation and of an argument."""
    invoke, parameter = tag_names
    close = f"</{invoke}>"
    gap = ""
    while (yield from _tag(reader, f"<{parameter} name=", close)) != close:
        head, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
        key, _, string_flag = head.partition(" string=")
        key = unquoted(key)
        end = f"</{parameter}>"
        texts = reader.pieces_until(end)
        if not string_flag:
            yield from arguments.member(gap, key, value(reader, end))
        elif "true" in string_flag:
            yield from CallArguments(None).member(gap, key, texts)
        else:
            yield from arguments.member(gap, key, texts, json=True)
        gap = ", "


def _tag(reader: BlockReader, *tags: str) -> Reading[str]:
    yield from reader.space()
    return (yield from reader.expect(*tags))


def unquoted(text: str) -> str:
    """Return the value of an attribute without quotes. Raises Malformed if it is empty."""
    text = text.strip().strip("\"'")
    if not text:
        raise Malformed
    return text
