"""The calls of Gemma 4: call:NAME{key:value} with values in Gemma's notation."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallForm,
    Calls,
    GemmaLiteralPieces,
    Malformed,
    ToolFamily,
    ToolSchemas,
    called,
    grammar_call,
)

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    return read_call(reader, END, schemas, GemmaLiteralPieces(reader))


def read_call(
    reader: BlockReader, end: str, schemas: ToolSchemas, literals: GemmaLiteralPieces
) -> Calls:
    if (yield from grammar_call(reader, schemas, end)):
        return
    yield from reader.expect("call:")
    name, mark = yield from reader.until("{", end, max_chars=MAX_NAME_CHARS)
    name = name.strip()
    if mark == end or not name:
        raise Malformed
    reader.position -= 1
    yield from called(schemas, name, literals.value())
    yield from reader.space()
    if not (yield from reader.take_end(end)):
        raise Malformed


FAMILY = ToolFamily(
    "gemma4",
    lambda template: BEGIN in template,
    CallForm(BEGIN + '{"name": "NAME", "arguments": ', "}" + END, trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=(BEGIN, END, QUOTE),
)
