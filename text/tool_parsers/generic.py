"""The calls of models whose prompt describes the form (text/templates/described_tools.py): JSON in
<tool_call>, or without tags at the start of the answer, since small models omit them."""

from pdserve.text.parsing import (
    BlockReader,
    CallForm,
    Calls,
    ToolFamily,
    ToolSchemas,
    json_calls,
    mixed_calls,
    python_calls,
)

BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON = "```tool_code"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if not opener:
        yield from mixed_calls(reader, schemas)
        return
    if opener == PYTHON:  # the form that Gemma 3 is trained on
        yield from python_calls(reader, schemas)
        yield from reader.space()
        yield from reader.take_end("```")
        return
    yield from json_calls(reader, schemas)
    yield from reader.space()
    yield from reader.take_end(END)


FAMILY = ToolFamily(
    "generic",  # llama.cpp's name
    lambda template: False,
    CallForm(BEGIN + '\n{"name": "NAME", "arguments": ', "}\n" + END, trigger=BEGIN),
    openers=(BEGIN, PYTHON),
    bare="{[`",
    read=read,
    special=(BEGIN, END),
)
