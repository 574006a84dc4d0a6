"""The calls of MiniMax M2: <invoke> in <minimax:tool_call>."""

from pdserve.text.parsing import BlockReader, CallForm, Calls, ToolFamily, ToolSchemas, read_invokes

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    return read_invokes(reader, "", END, schemas)


FAMILY = ToolFamily(
    "minimax_m2",
    lambda template: BEGIN in template,
    CallForm(BEGIN + '\n{"name": "NAME", "arguments": ', "}\n" + END, trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=(BEGIN, END),
)
