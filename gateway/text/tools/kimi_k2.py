"""Kimi K2's calls: a section of them, named functions.NAME:INDEX."""

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import CallForm, Calls, ToolFamily, json_arguments
from pdserve.gateway.text.parsing.reader import MAX_NAME_CHARS, BlockReader

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    while True:
        yield from reader.space()
        if (yield from reader.expect(CALL, END)) == END:
            return
        name, _ = yield from reader.until(ARGUMENTS, most=MAX_NAME_CHARS)
        name = name.strip().removeprefix("functions.").rpartition(":")[0] or name.strip()
        call = yield from json_arguments(reader, name)
        yield from reader.space()
        yield from reader.expect(CALL_END)
        yield call


FAMILY = ToolFamily(
    "kimi_k2",
    lambda template: BEGIN in template,
    CallForm(f"{BEGIN}{CALL}functions.NAME:0{ARGUMENTS}", f"{CALL_END}{END}", trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=(BEGIN, END, CALL, CALL_END, ARGUMENTS),
)
