"""Calls of Kimi K3: <|open|>call with attributes, which contains typed arguments."""

import re
from html import unescape

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallArguments,
    Calls,
    Malformed,
    Pieces,
    ToolSchemas,
    calls_in_section,
    grammar_call,
    object_pieces,
    streamed_call,
    tagged_family,
)
from pdserve.text.reasoning import KIMI_K3_ANSWER_TAGS

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
BEGIN, END = f"{OPEN}tools{SEPARATOR}", f"{CLOSE}tools{SEPARATOR}"
_CALL_END, _ARGUMENT_END = f"{CLOSE}call{SEPARATOR}", f"{CLOSE}argument{SEPARATOR}"
_ARGUMENT = f"{OPEN}argument "
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if not (yield from grammar_call(reader, schemas, END)):
        yield from calls_in_section(reader, f"{OPEN}call ", END, lambda: _call(reader, schemas))


def _call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    head, _ = yield from reader.until(SEPARATOR, max_chars=MAX_NAME_CHARS)
    name = _attributes(head).get("tool", "")
    if not name:
        raise Malformed
    yield from streamed_call(schemas, name, object_pieces(_members(reader)))


def _attributes(text: str) -> dict[str, str]:
    return {match[1]: unescape(match[2]) for match in _ATTRIBUTE.finditer(text)}


def _members(reader: BlockReader) -> Pieces[None]:
    gap = ""
    yield from reader.space()
    while (yield from reader.expect(_ARGUMENT, _CALL_END)) == _ARGUMENT:
        head, _ = yield from reader.until(SEPARATOR, max_chars=MAX_NAME_CHARS)
        attributes = _attributes(head)
        key = attributes.get("key", "")
        if not key:
            raise Malformed
        is_json = attributes.get("type", "string") != "string"
        yield from CallArguments(None).member(gap, key, _value(reader), json=is_json)
        gap = ", "
        yield from reader.space()


def _value(reader: BlockReader) -> Pieces[None]:
    """Read a value; its end tag counts only before another tag."""
    while True:
        end = yield from reader.pieces_until(_ARGUMENT_END)
        start = reader.position
        follows = yield from reader.take_after_space(_ARGUMENT, _CALL_END)
        rest = reader.text[reader.position :]
        reader.position = start
        if follows or (reader.ended and any(t.startswith(rest) for t in (_ARGUMENT, _CALL_END))):
            return
        yield end


FAMILIES = (
    tagged_family(
        "kimi_k3",
        BEGIN,
        END,
        _read,
        matches=lambda template: OPEN in template,
        special=(OPEN, CLOSE, SEPARATOR),
        answer_tags=KIMI_K3_ANSWER_TAGS,
    ),
)
