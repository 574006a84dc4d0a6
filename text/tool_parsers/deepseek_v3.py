"""The calls of DeepSeek V3 and R1: a section of calls, with arguments in fenced JSON."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallForm,
    Calls,
    Malformed,
    ToolFamily,
    ToolSchemas,
    json_arguments,
    json_calls,
)

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCED = "```json"
OTHER, OTHER_END = "<tool_call>", "</tool_call>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    """Read the calls of V3, and of V3.1 with the name before the separator. Models distilled from
    R1 sometimes write JSON in other tags."""
    if opener == OTHER:
        yield from json_calls(reader, schemas)
        yield from reader.space()
        yield from reader.take_end(OTHER_END)
        return
    yield from reader.space()
    if (yield from reader.expect(CALL, END)) == END:
        return
    while True:
        yield from _call(reader, schemas)
        yield from reader.space()
        if (yield from reader.take_end(END)):
            return
        yield from reader.expect(CALL)


def _call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    name, _ = yield from reader.until(SEPARATOR, max_chars=MAX_NAME_CHARS)
    yield from reader.space()
    fenced = (yield from reader.first()) not in ("{", "")
    if fenced:
        name, _ = yield from reader.until(FENCED, max_chars=MAX_NAME_CHARS)
    yield from json_arguments(reader, schemas, name)
    yield from reader.space()
    if fenced:
        yield from reader.take_end("```")
        yield from reader.space()
    if not (yield from reader.take_end(CALL_END)):
        raise Malformed


FAMILY = ToolFamily(
    "deepseek_v3",
    lambda template: BEGIN in template and FENCED in template,
    CallForm(
        f"{BEGIN}{CALL}function{SEPARATOR}NAME\n{FENCED}\n",
        f"\n```{CALL_END}{END}",
        trigger=BEGIN,
    ),
    openers=(BEGIN, OTHER),
    read=read,
    special=(BEGIN, END, CALL, CALL_END, SEPARATOR),
)
