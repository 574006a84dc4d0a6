"""The calls of Mistral after [TOOL_CALLS]: a JSON list, or name[ARGS]{...} in newer models."""

from pdserve.text.parsing import (
    BRACKETED,
    MAX_NAME_CHARS,
    BlockReader,
    CallForm,
    Calls,
    ToolFamily,
    ToolSchemas,
    json_arguments,
    json_list,
)

BEGIN, ARGUMENTS, CALL_ID = BRACKETED, "[ARGS]", "[CALL_ID]"
_ENDS_OF_NAME = (ARGUMENTS, CALL_ID, "{")


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.space()
    if (yield from reader.take("[")):
        yield from json_list(reader, schemas)
        return
    name, mark = yield from reader.until(*_ENDS_OF_NAME, " ", "\n", max_chars=MAX_NAME_CHARS)
    if mark.isspace():
        yield from reader.space()
        mark = yield from reader.expect(*_ENDS_OF_NAME)
    if mark == CALL_ID:
        yield from reader.until(ARGUMENTS, max_chars=MAX_NAME_CHARS)
    elif mark == "{":
        reader.position -= 1
    yield from json_arguments(reader, schemas, name)


FAMILY = ToolFamily(
    "mistral",
    lambda template: BEGIN in template,
    # The list form, which all these models can write.
    CallForm(f'{BEGIN}[{{"name": "NAME", "arguments": ', "}]", trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=(BEGIN, ARGUMENTS, CALL_ID),
    id_len=9,
)
