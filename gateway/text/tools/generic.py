"""Calls of models that learn from the prompt how to call (text/templates/described_tools.py): JSON
in <tool_call>, or without the tags where the answer begins, since small models leave them out."""

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    ToolFamily,
    json_calls,
)
from pdserve.gateway.text.parsing.pythonic import mixed_calls, python_calls
from pdserve.gateway.text.parsing.reader import BlockReader

BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON = "```tool_code"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if not opener:
        yield from mixed_calls(reader, schemas)
        return
    if opener == PYTHON:  # as Gemma 3 has learnt it
        yield from python_calls(reader, schemas)
        yield from reader.space()
        yield from reader.closes("```")
        return
    yield from json_calls(reader, schemas)
    yield from reader.space()
    yield from reader.closes(END)


FAMILY = ToolFamily(
    "generic",  # as llama.cpp calls it
    lambda template: False,
    CallForm(BEGIN + '\n{"name": "NAME", "arguments": ', "}\n" + END, trigger=BEGIN),
    openers=(BEGIN, PYTHON),
    bare="{[`",
    read=read,
    special=(BEGIN, END),
)
