"""The calls of Llama 3.1 to 3.3: JSON objects where the answer begins, or after <|python_tag|>."""

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    ToolFamily,
    bare_calls,
)
from pdserve.gateway.text.parsing.reader import BlockReader

TAG, END = "<|python_tag|>", "<|eom_id|>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from bare_calls(reader, schemas)
    yield from reader.closes(END)


FAMILY = ToolFamily(
    "llama3_json",
    lambda template: "<|start_header_id|>" in template,
    CallForm('{"name": "NAME", "parameters": ', "}", trigger='{"name": "'),
    openers=(TAG,),
    bare="{",
    read=read,
    special=(TAG, END),
)
