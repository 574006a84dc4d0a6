"""The calls of MiniMax M2: <invoke> in <minimax:tool_call>."""

from pdserve.text.parsing.arguments import ToolSchemas
from pdserve.text.parsing.family import CallForm, Calls, ToolFamily
from pdserve.text.parsing.invoke import read_invokes
from pdserve.text.parsing.reader import BlockReader

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
