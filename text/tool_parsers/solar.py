"""The calls of Solar Open, with ids of ten letters and digits, which later turns must repeat."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallForm,
    Calls,
    ToolFamily,
    ToolSchemas,
    json_arguments,
)
from pdserve.text.reasoning.solar import AROUND

BEGIN, END = "<|tool_call:begin|>", "<|tool_call:end|>"
NAME, ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
ID_LEN = 10
NO_ID = "0" * ID_LEN  # the id in a grammar's call


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    id, _ = yield from reader.until(NAME, max_chars=MAX_NAME_CHARS)
    name, _ = yield from reader.until(ARGUMENTS, max_chars=MAX_NAME_CHARS)
    id = id.strip()
    yield from json_arguments(reader, schemas, name, "" if id == NO_ID else id)
    yield from reader.space()
    yield from reader.take_end(END)


FAMILY = ToolFamily(
    "solar",
    lambda template: NAME in template,
    CallForm(f"{BEGIN}{NO_ID}{NAME}NAME{ARGUMENTS}", END, trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=(BEGIN, END, NAME, ARGUMENTS),
    around=AROUND,
    id_len=ID_LEN,
)
