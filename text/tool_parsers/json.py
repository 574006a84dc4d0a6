"""Calls of unknown families: JSON or a list of Python calls at the start of the answer, or JSON
between tags that several families use."""

from pdserve.text.parsing import (
    BRACKETED,
    BlockReader,
    CallForm,
    Calls,
    ToolFamily,
    ToolSchemas,
    json_calls,
    mixed_calls,
)

_NAMES = "tool_call", "tool_calls", "tools", "TOOLCALL", "function_call"
TAGS = {f"<{name}>": f"</{name}>" for name in _NAMES} | {BRACKETED: "[/TOOL_CALLS]"}


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if not opener:
        yield from mixed_calls(reader, schemas)
        return
    yield from json_calls(reader, schemas)
    yield from reader.space()
    yield from reader.take_end(TAGS[opener])


FAMILY = ToolFamily(
    "json",
    lambda template: False,
    CallForm('{"name": "NAME", "arguments": ', "}", trigger='{"name": "'),
    openers=tuple(TAGS),
    bare="{[`",
    read=read,
    special=(*TAGS, *TAGS.values()),
)
