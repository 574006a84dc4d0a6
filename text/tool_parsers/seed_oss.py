"""The calls of Seed-OSS: as Qwen3-Coder's, between other tags."""

from pdserve.text.parsing import BlockReader, CallForm, Calls, ToolFamily, ToolSchemas
from pdserve.text.tool_parsers.qwen3_coder import read_function

BEGIN, END = "<seed:tool_call>", "</seed:tool_call>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    return read_function(reader, opener, END, schemas)


FAMILY = ToolFamily(
    "seed_oss",
    lambda template: BEGIN in template,
    CallForm(BEGIN + '\n{"name": "NAME", "arguments": ', "}\n" + END, trigger=BEGIN),
    openers=(BEGIN, "<function="),
    read=read,
    special=(BEGIN, END),
)
