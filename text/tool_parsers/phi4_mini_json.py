"""The calls of Phi-4-mini and Firefunction: a JSON list after functools, or in <|tool_call|>."""

from pdserve.text.parsing import (
    BlockReader,
    CallForm,
    Calls,
    ToolFamily,
    ToolSchemas,
    json_call,
    json_list,
)

BEGIN, END, WORD = "<|tool_call|>", "<|/tool_call|>", "functools"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.space()
    if opener == BEGIN and (yield from reader.first()) == "{":
        yield from json_call(reader, schemas)
    else:
        yield from reader.expect("[")
        yield from json_list(reader, schemas)
    yield from reader.space()
    yield from reader.take_end(END)


FAMILY = ToolFamily(
    "phi4_mini_json",
    lambda template: "<|tool|>" in template or BEGIN in template or WORD in template,
    CallForm(WORD + '[{"name": "NAME", "arguments": ', "}]", trigger=WORD),
    openers=(BEGIN, WORD),
    read=read,
    special=(BEGIN, END),
)
