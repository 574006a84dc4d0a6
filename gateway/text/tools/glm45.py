"""The calls of GLM 4.5 and later: a name, then <arg_key> and <arg_value> in <tool_call>."""

from collections.abc import Generator
from typing import Any

from pdserve.gateway.text.parsing.arguments import CallArguments, ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    FoundCall,
    ToolFamily,
    json_call,
)
from pdserve.gateway.text.parsing.reader import MAX_NAME_CHARS, BlockReader, CutOff, Malformed
from pdserve.gateway.text.parsing.values import json_text, json_value

END = "</tool_call>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.space()
    if (yield from reader.first()) == "{":  # as a grammar makes it
        yield (yield from json_call(reader))
        yield from reader.space()
        yield from reader.closes(END)
        return
    name, end = yield from reader.until("<arg_key>", END, most=MAX_NAME_CHARS)
    name = name.strip()
    if not name or any(char.isspace() for char in name):
        raise Malformed
    known = schemas.call(name)
    arguments: dict[str, Any] = {}
    while end != END:
        key, _ = yield from reader.until("</arg_key>", most=MAX_NAME_CHARS)
        yield from reader.space()
        yield from reader.expect("<arg_value>")
        value = yield from _value(reader)
        arguments[key] = _typed(value, known, key)
        yield from reader.space()
        end = yield from reader.expect("<arg_key>", END)
    yield FoundCall(name, json_text(arguments))


def _value(reader: BlockReader) -> Generator[None, None, str]:
    """A value, whose end tag models sometimes leave out at the end of a call."""
    start = reader.at
    try:
        value, _ = yield from reader.until("</arg_value>")
    except CutOff:
        rest = reader.text[start:].rstrip()
        if not rest.endswith(END):
            raise
        value = rest.removesuffix(END)
        reader.at = start + len(value)
    return value


def _typed(text: str, known: CallArguments, key: str) -> Any:
    """What the tools do not describe is JSON, or else a string."""
    if known.knows(key):
        return known.typed(key, text)
    try:
        return json_value(text)
    except Malformed:
        return text


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
