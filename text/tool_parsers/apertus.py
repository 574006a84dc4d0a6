"""The calls of Apertus: a JSON list of objects whose only key is the function's name."""

from pdserve.text.parsing import (
    BlockReader,
    CallForm,
    Calls,
    ToolFamily,
    ToolSchemas,
    json_arguments,
    json_value,
)

BEGIN, END = "<|tools_prefix|>", "<|tools_suffix|>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.space()
    yield from reader.expect("[")
    end = ","
    while end == ",":
        yield from reader.space()
        yield from reader.expect("{")
        yield from reader.space()
        name = json_value((yield from reader.string()))
        yield from reader.space()
        yield from reader.expect(":")
        yield from json_arguments(reader, schemas, name)
        yield from reader.take_after_space("}")
        yield from reader.space()
        end = yield from reader.expect(",", "]")
    yield from reader.space()
    yield from reader.take_end(END)


FAMILY = ToolFamily(
    "apertus",
    lambda template: BEGIN in template,
    CallForm(f'{BEGIN}[{{"NAME": ', f"}}]{END}", trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=(BEGIN, END),
)
