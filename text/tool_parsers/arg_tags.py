"""Calls with a name, then the arguments in <arg_key> and <arg_value> tags."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallArguments,
    Calls,
    Malformed,
    Pieces,
    ToolSchemas,
    grammar_call,
    object_pieces,
    streamed_call,
    tagged_family,
)


def _members(
    reader: BlockReader, arguments: CallArguments, mark: str = "", suffix: str = ""
) -> Pieces[None]:
    """Read the arguments up to the end of the call. `mark`: the first tag, if already read."""
    begin, end = f"<arg_key{suffix}>", f"</tool_call{suffix}>"
    value_end = f"</arg_value{suffix}>"
    gap = ""
    if not mark:
        mark = yield from reader.expect_after_space(begin, end)
    while mark != end:
        key, _ = yield from reader.until(f"</arg_key{suffix}>", max_chars=MAX_NAME_CHARS)
        yield from reader.expect_after_space(f"<arg_value{suffix}>")
        # An argument without a schema is JSON if it parses, else a string.
        texts = _value(reader, value_end, end)
        yield from arguments.member(gap, key, texts, json=not arguments.knows(key))
        gap = ", "
        mark = yield from reader.expect_after_space(begin, end)


def _value(reader: BlockReader, value_end: str, call_end: str) -> Pieces[None]:
    """Read a value; models sometimes omit its end tag at the end of the answer."""
    while (yield from reader.pieces_until(value_end, call_end)) == call_end:
        start = reader.position
        yield from reader.space()
        at_end = reader.ended and reader.position == len(reader.text)
        reader.position = start
        if at_end:
            reader.position -= len(call_end)
            return
        yield call_end


def _tags_within(suffix: str = "") -> tuple[str, ...]:
    return tuple(f"<{end}arg_{part}{suffix}>" for part in ("key", "value") for end in ("", "/"))


_GLM_BEGIN, _GLM_END = "<tool_call>", "</tool_call>"


def _read_glm(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if (yield from grammar_call(reader, schemas, _GLM_END)):
        return
    name, end = yield from reader.until("<arg_key>", _GLM_END, max_chars=MAX_NAME_CHARS)
    name = name.strip()
    if not name or any(char.isspace() for char in name):
        raise Malformed
    members = _members(reader, schemas.call(name), end)
    yield from streamed_call(schemas, name, object_pieces(members))


_SUFFIX = ":opensource"
_HY3_BEGIN, _HY3_END = f"<tool_calls{_SUFFIX}>", f"</tool_calls{_SUFFIX}>"
_HY3_CALL, _HY3_SEPARATOR = f"<tool_call{_SUFFIX}>", f"<tool_sep{_SUFFIX}>"


def _read_hy3(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if (yield from grammar_call(reader, schemas, _HY3_END)):
        return
    yield from reader.expect(_HY3_CALL)
    while True:
        name, _ = yield from reader.until(_HY3_SEPARATOR, max_chars=MAX_NAME_CHARS)
        name = name.strip()
        if not name:
            raise Malformed
        members = _members(reader, schemas.call(name), suffix=_SUFFIX)
        yield from streamed_call(schemas, name, object_pieces(members))
        if (yield from reader.take_end_after_space(_HY3_END)):
            return
        yield from reader.expect(_HY3_CALL)


FAMILIES = (
    tagged_family(
        "glm45",
        _GLM_BEGIN,
        _GLM_END,
        _read_glm,
        matches=lambda template: "<arg_key>" in template,
        special=_tags_within(),
    ),
    tagged_family(  # calls in a section, with a suffix on the tags
        "hy3",
        _HY3_BEGIN,
        _HY3_END,
        _read_hy3,
        matches=lambda template: "<tool_sep{" in template or _HY3_SEPARATOR in template,
        special=(_HY3_CALL, f"</tool_call{_SUFFIX}>", _HY3_SEPARATOR, *_tags_within(_SUFFIX)),
    ),
)
