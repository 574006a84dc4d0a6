"""The calls of Llama 4 and pythonic Llama 3.2: a Python list of calls."""

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    ToolFamily,
    bare_calls,
)
from pdserve.gateway.text.parsing.pythonic import python_calls
from pdserve.gateway.text.parsing.reader import BlockReader

BEGIN, END = "<|python_start|>", "<|python_end|>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.space()
    if (yield from reader.first()) == "{":  # the form of a grammar
        yield from bare_calls(reader, schemas)
        yield from reader.closes(END)
        return
    yield from python_calls(reader, schemas, bare=True)
    yield from reader.space()
    yield from reader.closes(END)


FAMILY = ToolFamily(
    "llama4_pythonic",
    lambda template: "<|header_start|>" in template,
    CallForm('{"name": "NAME", "parameters": ', "}", trigger='{"name": "'),
    openers=(BEGIN,),
    bare="[{",
    read=read,
    special=(BEGIN, END),
)
