"""Llama 4's calls, and those of pythonic Llama 3.2: a Python list of calls."""

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    FoundCall,
    ToolFamily,
    bare_calls,
)
from pdserve.gateway.text.parsing.reader import MAX_NAME_CHARS, BlockReader, Malformed
from pdserve.gateway.text.parsing.values import Literals, json_text

BEGIN, END = "<|python_start|>", "<|python_end|>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.space()
    if (yield from reader.first()) == "{":  # as a grammar makes it
        yield from bare_calls(reader)
        yield from reader.closes(END)
        return
    yield from reader.expect("[")
    calls = []  # a list that is cut off is no list
    end = ","
    while end == ",":
        yield from reader.space()
        name, _ = yield from reader.until("(", most=MAX_NAME_CHARS)
        if not all(part.isidentifier() for part in name.replace("-", "_").split(".")):
            raise Malformed
        reader.at -= 1
        arguments = Literals((yield from reader.balanced("python")), at=1)
        made = {}
        while not arguments.taken(")"):
            key = arguments.name()
            if not arguments.taken("="):
                raise Malformed
            made[key] = arguments.value()
            if not arguments.taken(",") and arguments.text[arguments.at :] != ")":
                raise Malformed
        yield from reader.space()
        end = yield from reader.expect(",", "]")
        calls.append(FoundCall(name, json_text(made)))
    yield from reader.space()
    yield from reader.closes(END)
    yield from calls


FAMILY = ToolFamily(
    "llama4_pythonic",
    lambda template: "<|header_start|>" in template,
    CallForm('{"name": "NAME", "parameters": ', "}", trigger='{"name": "'),
    openers=(BEGIN,),
    bare="[{",
    read=read,
    special=(BEGIN, END),
)
