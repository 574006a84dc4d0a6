"""Qwen3-Coder's calls: <function=NAME> and <parameter=NAME> with values as plain text."""

from collections.abc import Generator
from typing import Any

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    FoundCall,
    ToolFamily,
    json_call,
)
from pdserve.gateway.text.parsing.reader import MAX_NAME_CHARS, BlockReader, Malformed
from pdserve.gateway.text.parsing.values import json_text

_CLOSE, _NEXT = "</parameter>", ("<parameter=", "</function>")
# A value on lines of its own may have such tags within its lines.
_ENDS_OF_LINES = (_CLOSE, f"\n{_CLOSE}", "\n<parameter=", "\n</function>")
_ENDS = (_CLOSE, *_NEXT)


BEGIN, END = "<tool_call>", "</tool_call>"
_TAGS = ("<function=", "<parameter=")  # in its templates


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    return read_function(reader, opener, END, schemas)


def read_function(reader: BlockReader, opener: str, end: str, schemas: ToolSchemas) -> Calls:
    """The call of a block, which may begin with <function= without an opener of its own."""
    if opener != "<function=":
        yield from reader.space()
        if (yield from reader.first()) == "{":  # as a grammar makes it
            yield (yield from json_call(reader))
            yield from reader.space()
            yield from reader.closes(end)
            return
        yield from reader.expect("<function=")
    yield (yield from _function(reader, schemas))
    yield from reader.space()
    yield from reader.closes(end)


def _function(reader: BlockReader, schemas: ToolSchemas) -> Generator[None, None, FoundCall]:
    name, _ = yield from reader.until(">", most=MAX_NAME_CHARS)
    known = schemas.call(name)
    arguments: dict[str, Any] = {}
    yield from reader.space()
    end = yield from reader.expect("<parameter=", "</function>")
    while "<parameter=" in end:
        key, _ = yield from reader.until(">", most=MAX_NAME_CHARS)
        if "\n" in key:
            raise Malformed
        value, end = yield from _value(reader)
        arguments[key] = known.typed(key, value)
    return FoundCall(name, json_text(arguments))


def _value(reader: BlockReader) -> Generator[None, None, tuple[str, str]]:
    """A value, and the tag that follows it. Its end tag is one only before the next tag."""
    lines = yield from reader.takes("\n")
    start = reader.at
    while True:
        _, end = yield from reader.until(*(_ENDS_OF_LINES if lines else _ENDS))
        close = reader.at
        if not end.endswith(_CLOSE):
            return reader.text[start : close - len(end)], end
        yield from reader.space()
        if following := (yield from reader.takes(*_NEXT)):
            return reader.text[start : close - len(end)], following
        reader.at = close


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
