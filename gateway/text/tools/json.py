"""Calls of no family in particular: a JSON object, or a list of them, where the answer begins."""

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    ToolFamily,
    bare_call,
    bare_calls,
)
from pdserve.gateway.text.parsing.reader import BlockReader


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.space()
    if not (yield from reader.takes("[")):
        yield from bare_calls(reader)
        return
    end = ","
    while end == ",":
        yield (yield from bare_call(reader))
        yield from reader.space()
        end = yield from reader.expect(",", "]")


FAMILY = ToolFamily(
    "json",
    lambda template: False,
    CallForm('{"name": "NAME", "arguments": ', "}", trigger='{"name": "'),
    bare="{[",
    read=read,
)
