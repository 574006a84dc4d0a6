"""Gemma 4's calls: call:NAME{key:value} in its own notation of values."""

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    FoundCall,
    ToolFamily,
    json_call,
)
from pdserve.gateway.text.parsing.reader import MAX_NAME_CHARS, BlockReader, Malformed
from pdserve.gateway.text.parsing.values import GemmaLiterals, json_text

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.space()
    if (yield from reader.first()) == "{":  # as a grammar makes it
        yield (yield from json_call(reader))
        if not (yield from reader.closes(END)):
            raise Malformed
        return
    yield from reader.expect("call:")
    name, mark = yield from reader.until("{", END, most=MAX_NAME_CHARS)
    name = name.strip()
    if mark == END or not name:
        raise Malformed
    reader.at -= 1
    arguments = GemmaLiterals((yield from reader.balanced("gemma"))).whole()
    yield from reader.space()
    if not (yield from reader.closes(END)):
        raise Malformed
    yield FoundCall(name, json_text(arguments))


FAMILY = ToolFamily(
    "gemma4",
    lambda template: BEGIN in template,
    CallForm(BEGIN + '{"name": "NAME", "arguments": ', "}" + END, trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=(BEGIN, END, QUOTE),
)
