"""The calls of FunctionGemma: as Gemma 4's, between other tags."""

from pdserve.text.parsing import (
    BlockReader,
    CallForm,
    Calls,
    FunctionGemmaPieces,
    ToolFamily,
    ToolSchemas,
)
from pdserve.text.tool_parsers.gemma4 import read_call

BEGIN, END, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    return read_call(reader, END, schemas, FunctionGemmaPieces(reader))


FAMILY = ToolFamily(
    "functiongemma",
    lambda template: BEGIN in template,
    CallForm(BEGIN + '{"name": "NAME", "arguments": ', "}" + END, trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=(BEGIN, END, QUOTE),
)
