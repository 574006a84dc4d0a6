"""The calls of Llama 3.1 to 3.3 and derived models: JSON objects or lists, or Python lists, at the
start of the answer or after <|python_tag|>; or JSON in <function=NAME>."""

from pdserve.text.parsing.arguments import ToolSchemas
from pdserve.text.parsing.family import CallForm, Calls, ToolFamily, json_arguments
from pdserve.text.parsing.pythonic import mixed_calls, python_calls
from pdserve.text.parsing.reader import MAX_NAME_CHARS, BlockReader

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
