"""Calls of no family in particular: a JSON object, or a list of them, where the answer begins."""

from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    Schemas,
    ToolFamily,
    bare_call,
)
from pdserve.gateway.text.parsing.reader import BlockReader


def read(reader: BlockReader, opener: str, schemas: Schemas) -> Calls:
    yield from reader.space()
    listed = yield from reader.takes("[")
    while True:
        yield (yield from bare_call(reader))
        yield from reader.space()
        if not listed:
            if not (yield from reader.takes(",", ";")):
                return
        elif (yield from reader.expect(",", "]")) == "]":
            return


FAMILY = ToolFamily(
    "json",
    lambda template: False,
    CallForm('{"name": "NAME", "arguments": ', "}", trigger='{"name": "'),
    bare="{[",
    read=read,
)
