"""The calls of Kimi K2: a section of calls with ids functions.NAME:INDEX, which later turns must
repeat. The model sometimes omits the section's tags."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallForm,
    Calls,
    Malformed,
    ToolFamily,
    ToolSchemas,
    json_arguments,
)

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.space()
    if opener == BEGIN and (yield from reader.expect(CALL, END)) == END:
        return
    while True:
        call_id, _ = yield from reader.until(ARGUMENTS, max_chars=MAX_NAME_CHARS)
        call_id = call_id.strip()
        plain = call_id.removeprefix("functions.")
        name, _, index = plain.rpartition(":")
        is_standard_id = name and call_id.startswith("functions.") and index.isdecimal()
        yield from json_arguments(reader, schemas, name or plain, call_id if is_standard_id else "")
        yield from reader.space()
        closed = yield from reader.take_end(CALL_END)
        if not (closed or opener == CALL):
            raise Malformed
        yield from reader.space()
        if (yield from reader.take_end(END)):
            return
        if opener == BEGIN:
            yield from reader.expect(CALL)
        elif not (yield from reader.take(CALL)):
            return


FAMILY = ToolFamily(
    "kimi_k2",
    lambda template: BEGIN in template,
    CallForm(f"{BEGIN}{CALL}functions.NAME:0{ARGUMENTS}", f"{CALL_END}{END}", trigger=BEGIN),
    openers=(BEGIN, CALL),
    read=read,
    special=(BEGIN, END, CALL, CALL_END, ARGUMENTS),
)
