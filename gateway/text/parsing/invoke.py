"""Calls written as <invoke name=...> with a <parameter name=...> each, which MiniMax and DeepSeek
make with tags of different prefixes; pure."""

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


def read_invokes(reader: BlockReader, prefix: str, end: str, schemas: ToolSchemas) -> Calls:
    """The calls of a block to its end tag; `prefix` stands after the bracket of each inner tag."""
    if (yield from grammar_call(reader, schemas, end)):
        return
    begin = f"<{prefix}invoke name="
    if (yield from reader.expect(begin, end)) == end:
        return
    while True:
        yield from read_invoke(reader, prefix, schemas)
        yield from reader.space()
        if (yield from reader.closes(end)):
            return
        yield from reader.expect(begin)


def read_invoke(reader: BlockReader, prefix: str, schemas: ToolSchemas) -> Calls:
    """An invocation, from its name on."""
    name, _ = yield from reader.until(">", most=MAX_NAME_CHARS)
    if name.endswith("/"):
        yield CallPiece(_unquoted(name[:-1]), "{}", last=True)
        return
    name = _unquoted(name)
    yield from called(schemas, name, object_pieces(_members(reader, prefix, schemas.call(name))))


def _members(reader: BlockReader, prefix: str, known: CallArguments) -> Pieces[None]:
    close = f"</{prefix}invoke>"
    gap = ""
    while (yield from _tag(reader, f"<{prefix}parameter name=", close)) != close:
        head, _ = yield from reader.until(">", most=MAX_NAME_CHARS)
        key, _, said = head.partition(" string=")
        key = _unquoted(key)
        texts = reader.pieces_until(f"</{prefix}parameter>")
        if not said:
            yield from known.member(gap, key, _without_lines(texts))
        elif "true" in said:
            yield from CallArguments(None).member(gap, key, texts)
        else:
            yield from known.member(gap, key, texts, json=True)
        gap = ", "


def _tag(reader: BlockReader, *tags: str) -> Reading[str]:
    yield from reader.space()
    return (yield from reader.expect(*tags))


def _without_lines(texts: Pieces[str]) -> Pieces[None]:
    """A text without the line breaks at its beginning and end."""
    lines, begun = "", False
    for text in texts:
        if text is None:
            yield None
            continue
        text = lines + text if begun else text.lstrip("\n")
        body = text.rstrip("\n")
        lines = text[len(body) :]
        if body:
            begun = True
            yield body


def _unquoted(text: str) -> str:
    text = text.strip().strip("\"'")
    if not text:
        raise Malformed
    return text
