"""Calls of no family in particular: a JSON object, or a list of them, where the answer begins."""

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    ToolFamily,
    bare_calls,
)
from pdserve.gateway.text.parsing.reader import BlockReader


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    return bare_calls(reader, schemas)


FAMILY = ToolFamily(
    "json",
    lambda template: False,
    CallForm('{"name": "NAME", "arguments": ', "}", trigger='{"name": "'),
    bare="{[",
    read=read,
)
