"""The calls of Muse Glimmer: a message to the tool that contains <atem:invoke>. In a message to the
user, such tags are text."""

from pdserve.text.parsing import (
    BlockReader,
    CallForm,
    Calls,
    CutOff,
    Malformed,
    ToolFamily,
    ToolSchemas,
    grammar_call,
    raw_text,
    read_invokes,
)
from pdserve.text.reasoning import MESSAGE
from pdserve.text.reasoning.muse_glimmer import AROUND

TO, BEGIN, END = "to=", "<atem:function_calls>", "</atem:function_calls>"


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if opener == BEGIN:
        if not (yield from grammar_call(reader, schemas, END)):
            raise Malformed
        return
    recipient = yield from reader.name()
    calls = read_invokes(reader, "atem:", END, schemas, raw_text)
    try:
        yield from reader.expect(MESSAGE)
        if recipient == "user":
            return
        yield from reader.space()
        yield from reader.expect(BEGIN)
        for first in calls:
            if first is not None:
                break
            yield None
        else:
            return
    except CutOff as end:
        if end.name or recipient not in schemas:
            raise
        raise CutOff(recipient) from None
    yield first
    yield from calls


FAMILY = ToolFamily(
    "muse_glimmer",
    lambda template: BEGIN in template,
    CallForm(BEGIN + '{"name": "NAME", "arguments": ', "}" + END, trigger=BEGIN),
    openers=(f" {TO}", TO, BEGIN),
    read=read,
    special=(MESSAGE,),
    around=AROUND,
)
