"""The calls of Step 3: <steptml:invoke> in tags like DeepSeek's."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallForm,
    Calls,
    ToolFamily,
    ToolSchemas,
    grammar_call,
    read_invoke,
)

BEGIN, END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"
PREFIX = "steptml:"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if (yield from grammar_call(reader, schemas, END)):
        return
    while (yield from reader.expect(CALL, END)) == CALL:
        yield from reader.until(SEPARATOR, max_chars=MAX_NAME_CHARS)
        yield from reader.space()
        yield from reader.expect(f"<{PREFIX}invoke name=")
        yield from read_invoke(reader, PREFIX, schemas)
        yield from reader.space()
        yield from reader.take_end(CALL_END)
        yield from reader.space()
        if (yield from reader.take_end(END)):
            return


FAMILY = ToolFamily(
    "step3",
    lambda template: PREFIX in template,
    CallForm(BEGIN + '{"name": "NAME", "arguments": ', "}" + END, trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=(BEGIN, END, CALL, CALL_END, SEPARATOR),
)
