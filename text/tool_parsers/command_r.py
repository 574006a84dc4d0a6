"""The calls of Command R and R+: a JSON list in fenced code, after the word Action."""

from pdserve.text.parsing import BlockReader, CallForm, Calls, ToolFamily, ToolSchemas, json_calls

BEGIN, FENCED = "Action:", "```json"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.space()
    yield from reader.expect(FENCED)
    yield from json_calls(reader, schemas)
    yield from reader.space()
    yield from reader.take_end("```")


FAMILY = ToolFamily(
    "command_r",
    lambda template: BEGIN in template and FENCED in template,
    CallForm(f'{BEGIN} {FENCED}\n[{{"tool_name": "NAME", "parameters": ', "}]\n```", trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
)
