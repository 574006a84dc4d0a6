"""The calls of Hermes, Qwen 2.5, Qwen 3 and many others: JSON in <tool_call>."""

from pdserve.text.parsing import (
    BlockReader,
    CallForm,
    Calls,
    ToolFamily,
    ToolSchemas,
    json_calls,
    mixed_calls,
)

OTHERS = ("<arg_key>", "<function=", "<tool_calls>", "]<]minimax[>[")  # of families with this tag
# Qwen 2.5 Coder often writes the second tag, or none.
TAGS = {"<tool_call>": "</tool_call>", "<tools>": "</tools>"}


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if not opener:
        yield from mixed_calls(reader, schemas)
        return
    yield from json_calls(reader, schemas)
    yield from reader.space()
    yield from reader.take_end(TAGS[opener])


FAMILY = ToolFamily(
    "hermes",
    lambda template: "<tool_call>" in template and not any(o in template for o in OTHERS),
    CallForm(
        '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", trigger="<tool_call>"
    ),
    openers=tuple(TAGS),
    bare="{[`",
    read=read,
    special=("<tool_call>", "</tool_call>"),
)
