"""Calls written as <invoke name=...> with a <parameter name=...> each, which MiniMax and DeepSeek
make with tags of different prefixes; pure."""

from collections.abc import Generator
from typing import Any

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import Calls, FoundCall, json_call
from pdserve.gateway.text.parsing.reader import MAX_NAME_CHARS, BlockReader, Malformed
from pdserve.gateway.text.parsing.values import json_text, json_value


def read_invokes(reader: BlockReader, prefix: str, end: str, schemas: ToolSchemas) -> Calls:
    """The calls of a block to its end tag; `prefix` stands after the bracket of each inner tag."""
    yield from reader.space()
    if (yield from reader.first()) == "{":  # as a grammar makes it
        yield (yield from json_call(reader))
        yield from reader.space()
        yield from reader.closes(end)
        return
    begin = f"<{prefix}invoke name="
    if (yield from reader.expect(begin, end)) == end:
        return
    while True:
        yield (yield from _invoke(reader, prefix, schemas))
        yield from reader.space()
        if (yield from reader.closes(end)):
            return
        yield from reader.expect(begin)


def _invoke(
    reader: BlockReader, prefix: str, schemas: ToolSchemas
) -> Generator[None, None, FoundCall]:
    name, _ = yield from reader.until(">", most=MAX_NAME_CHARS)
    arguments: dict[str, Any] = {}
    if name.endswith("/"):
        return FoundCall(_unquoted(name[:-1]), "{}")
    name = _unquoted(name)
    known = schemas.call(name)
    close = f"</{prefix}invoke>"
    while True:
        yield from reader.space()
        if (yield from reader.expect(f"<{prefix}parameter name=", close)) == close:
            return FoundCall(name, json_text(arguments))
        head, _ = yield from reader.until(">", most=MAX_NAME_CHARS)
        key, _, said = head.partition(" string=")
        value, _ = yield from reader.until(f"</{prefix}parameter>")
        key = _unquoted(key)
        if said:
            arguments[key] = value if "true" in said else _json(value)
        else:
            arguments[key] = known.typed(key, value.strip("\n"))


def _unquoted(text: str) -> str:
    text = text.strip().strip("\"'")
    if not text:
        raise Malformed
    return text


def _json(text: str) -> Any:
    try:
        return json_value(text)
    except Malformed:
        return text
