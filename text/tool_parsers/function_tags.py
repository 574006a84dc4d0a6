"""Calls as <function=NAME> with <parameter=NAME> tags, whose values are plain text."""

from collections.abc import Callable

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallArguments,
    Calls,
    CutOff,
    Malformed,
    Pieces,
    ToolFamily,
    ToolSchemas,
    grammar_call,
    object_pieces,
    streamed_call,
    tagged_family,
)

_FUNCTION = "<function="
_CLOSE, _NEXT = "</parameter>", ("<parameter=", "</function>")
# A value on separate lines may contain such tags inside a line.
_ENDS_OF_LINES = (_CLOSE, f"\n{_CLOSE}", "\n<parameter=", "\n</function>")
_ENDS = (_CLOSE, *_NEXT)


def _members(reader: BlockReader, arguments: CallArguments) -> Pieces[None]:
    end = yield from reader.expect_after_space(*_NEXT)
    gap = ""
    while "<parameter=" in end:
        key, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
        if "\n" in key:
            raise Malformed
        end = yield from arguments.member(gap, key, _value(reader))
        gap = ", "


def _value(reader: BlockReader) -> Pieces[str]:
    """Read a value and return the next tag; the value's end tag counts only before that tag."""
    lines = yield from reader.take("\n")
    while True:
        end = yield from reader.pieces_until(*(_ENDS_OF_LINES if lines else _ENDS))
        if not end.endswith(_CLOSE):
            return end
        start = reader.position
        if following := (yield from reader.take_after_space(*_NEXT)):
            return following
        rest = reader.text[reader.position :]
        if reader.ended and any(mark.startswith(rest) for mark in _NEXT):
            raise CutOff
        space = reader.text[start : reader.position]
        yield end  # the tag is part of the value
        reader.text = space + reader.text[reader.position :]
        reader.position = 0


def _family(name: str, begin: str, end: str, matches: Callable[[str], bool]) -> ToolFamily:
    """Return a family with calls between two tags, the first of which a model may omit."""

    def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
        if opener != _FUNCTION:
            if (yield from grammar_call(reader, schemas, end)):
                return
            yield from reader.expect(_FUNCTION)
        name, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
        members = _members(reader, schemas.call(name))
        yield from streamed_call(schemas, name, object_pieces(members))
        yield from reader.take_end_after_space(end)

    return tagged_family(name, begin, end, read, matches=matches, space="\n", openers=(_FUNCTION,))


FAMILIES = (
    _family(
        "qwen3_coder",
        "<tool_call>",
        "</tool_call>",
        lambda t: _FUNCTION in t and "<parameter=" in t and "<seed:tool_call>" not in t,
    ),
    _family(
        "seed_oss",
        "<seed:tool_call>",
        "</seed:tool_call>",
        lambda template: "<seed:tool_call>" in template,
    ),
)
