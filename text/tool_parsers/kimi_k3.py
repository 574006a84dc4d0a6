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
    ToolFamily,
    ToolSchemas,
    grammar_call,
    object_form,
    object_pieces,
    streamed_call,
)
from pdserve.text.reasoning import KIMI_K3_ANSWER_TAGS

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
BEGIN, END = f"{OPEN}tools{SEPARATOR}", f"{CLOSE}tools{SEPARATOR}"
_CALL_END, _ARGUMENT_END = f"{CLOSE}call{SEPARATOR}", f"{CLOSE}argument{SEPARATOR}"
_ARGUMENT = f"{OPEN}argument "
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if (yield from grammar_call(reader, schemas, END)):
        return
    while (yield from reader.expect(f"{OPEN}call ", END)) != END:
        head, _ = yield from reader.until(SEPARATOR, max_chars=MAX_NAME_CHARS)
        name = _attributes(head).get("tool", "")
        if not name:
            raise Malformed
        yield from streamed_call(schemas, name, object_pieces(_members(reader)))
        yield from reader.space()
        if (yield from reader.take_end(END)):
            return


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
        yield from reader.space()
        follows = yield from reader.take(_ARGUMENT, _CALL_END)
        rest = reader.text[reader.position :]
        reader.position = start
        if follows or (reader.ended and any(t.startswith(rest) for t in (_ARGUMENT, _CALL_END))):
            return
        yield end


FAMILIES = (
    ToolFamily(
        "kimi_k3",
        lambda template: OPEN in template,
        object_form(BEGIN, END),
        openers=(BEGIN,),
        read=_read,
        special=(OPEN, CLOSE, SEPARATOR),
        answer_tags=KIMI_K3_ANSWER_TAGS,
    ),
)
