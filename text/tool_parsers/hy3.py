"""The calls of Hy3: as GLM's, in a section, with a suffix on the tags."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallForm,
    Calls,
    Malformed,
    ToolFamily,
    ToolSchemas,
    called,
    grammar_call,
    object_pieces,
)
from pdserve.text.tool_parsers.glm45 import members

SUFFIX = ":opensource"
BEGIN, END = f"<tool_calls{SUFFIX}>", f"</tool_calls{SUFFIX}>"
CALL, CALL_END, SEPARATOR = (
    f"<tool_call{SUFFIX}>",
    f"</tool_call{SUFFIX}>",
    f"<tool_sep{SUFFIX}>",
)
WITHIN = tuple(f"<{slash}arg_{kind}{SUFFIX}>" for kind in ("key", "value") for slash in ("", "/"))


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if (yield from grammar_call(reader, schemas, END)):
        return
    yield from reader.expect(CALL)
    while True:
        name, _ = yield from reader.until(SEPARATOR, max_chars=MAX_NAME_CHARS)
        name = name.strip()
        if not name:
            raise Malformed
        arguments = members(reader, schemas.call(name), suffix=SUFFIX)
        yield from called(schemas, name, object_pieces(arguments))
        yield from reader.space()
        if (yield from reader.take_end(END)):
            return
        yield from reader.expect(CALL)


FAMILY = ToolFamily(
    "hy3",
    lambda template: "<tool_sep{" in template or SEPARATOR in template,
    CallForm(BEGIN + '{"name": "NAME", "arguments": ', "}" + END, trigger=BEGIN),
    openers=(BEGIN,),
    read=read,
    special=(BEGIN, END, CALL, CALL_END, SEPARATOR, *WITHIN),
)
