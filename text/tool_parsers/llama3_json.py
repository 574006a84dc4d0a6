"""The calls of Llama 3.1 to 3.3 and derived models: JSON objects or lists, or Python lists, at the
start of the answer or after <|python_tag|>; or JSON in <function=NAME>."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallForm,
    Calls,
    ToolFamily,
    ToolSchemas,
    json_arguments,
    mixed_calls,
    python_calls,
)

OTHERS = "<TOOLCALL>", "functools"  # of families with the same header
FUNCTION, FUNCTION_END = "<function=", "</function>"
TAG, END = "<|python_tag|>", "<|eom_id|>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if opener == FUNCTION:
        name, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
        yield from json_arguments(reader, schemas, name)
        yield from reader.space()
        yield from reader.take_end(FUNCTION_END)
        return
    yield from reader.space()
    first = yield from reader.first()
    if opener and first.isidentifier():
        yield from python_calls(reader, schemas)
    else:
        yield from mixed_calls(reader, schemas)
    yield from reader.take_end(END)


FAMILY = ToolFamily(
    "llama3_json",
    lambda template: (
        "<|start_header_id|>" in template and not any(other in template for other in OTHERS)
    ),
    CallForm('{"name": "NAME", "parameters": ', "}", trigger='{"name": "'),
    openers=(TAG, FUNCTION),
    bare="{[`",
    read=read,
    special=(TAG, END),
)
