"""Hermes' calls, which Qwen 2.5, Qwen 3 and many others make: JSON in <tool_call>."""

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import CallForm, Calls, ToolFamily, json_calls
from pdserve.gateway.text.parsing.reader import BlockReader

OTHERS = ("<arg_key>", "<function=")  # of families with the same tag


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from json_calls(reader, schemas)
    yield from reader.space()
    yield from reader.closes("</tool_call>")


FAMILY = ToolFamily(
    "hermes",
    lambda template: "<tool_call>" in template and not any(o in template for o in OTHERS),
    CallForm(
        '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", trigger="<tool_call>"
    ),
    openers=("<tool_call>",),
    read=read,
    special=("<tool_call>", "</tool_call>"),
)
