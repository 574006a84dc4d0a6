"""The calls of Functionary 3.2: after >>>, which ends the prompt, the model writes a function's
name, or "all" for text to the user, and a line break."""

from pdserve.text.parsing import (
    BlockReader,
    CallForm,
    Calls,
    Malformed,
    ToolFamily,
    ToolSchemas,
    json_arguments,
)

BEGIN, USER = ">>>", "all"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    name = yield from reader.name()
    if not (opener or name == USER or name in schemas):
        raise Malformed
    yield from reader.expect("\n")
    if name != USER:
        yield from json_arguments(reader, schemas, name)


FAMILY = ToolFamily(
    "functionary",
    lambda template: ">>>${recipient}" in template or f"{BEGIN}{USER}" in template,
    CallForm(f"{BEGIN}NAME\n", "", trigger=BEGIN),
    openers=(BEGIN,),
    bare="abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_",
    read=read,
)
