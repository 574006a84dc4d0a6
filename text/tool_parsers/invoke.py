"""Reads tool calls written as <invoke name=...> with <parameter name=...> tags, which some families
write with a prefix before the tag names."""

from collections.abc import Callable

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallArguments,
    CallForm,
    CallPiece,
    Calls,
    CutOff,
    Malformed,
    Pieces,
    Reading,
    ToolFamily,
    ToolSchemas,
    calls_in_section,
    grammar_call,
    json_arguments,
    object_form,
    object_pieces,
    streamed_call,
    tagged_family,
)
from pdserve.text.reasoning import MUSE_ANSWER_TAGS, MUSE_MESSAGE

Value = Callable[[BlockReader, str], Pieces[None]]  # reads a value's text and its end tag


def _without_lines(reader: BlockReader, end: str) -> Pieces[None]:
    """Yield the text of an argument up to the tag `end`, without line breaks at its start and
    end."""
    lines, begun = "", False
    for text in reader.pieces_until(end):
        if text is None:
            yield None
            continue
        text = lines + text if begun else text.lstrip("\n")
        body = text.rstrip("\n")
        lines = text[len(body) :]
        if body:
            begun = True
            yield body


def _raw_text(reader: BlockReader, end: str) -> Pieces[None]:
    """Yield the text of an argument up to the tag `end`, unchanged."""
    yield from reader.pieces_until(end)


def _read_invokes(
    reader: BlockReader,
    prefix: str,
    end: str,
    schemas: ToolSchemas,
    value: Value = _without_lines,
) -> Calls:
    """Read the calls of a block up to its end tag `end`. `prefix` comes before the name in each
    inner tag; `value` reads an argument whose tag does not say whether it is a string or JSON."""
    if (yield from grammar_call(reader, schemas, end)):
        return
    yield from calls_in_section(
        reader,
        f"<{prefix}invoke name=",
        end,
        lambda: _read_invoke(reader, prefix, schemas, value),
    )


def _read_invoke(
    reader: BlockReader, prefix: str, schemas: ToolSchemas, value: Value = _without_lines
) -> Calls:
    """Read one call whose tag is open: its name, then its arguments up to the tag that closes
    it."""
    name, is_self_closing = yield from _read_head(reader)
    if is_self_closing:
        yield CallPiece(name, "{}", last=True)
        return
    tag_names = f"{prefix}invoke", f"{prefix}parameter"
    members = _read_members(reader, tag_names, schemas.call(name), value)
    yield from streamed_call(schemas, name, object_pieces(members))


def _read_head(reader: BlockReader) -> Reading[tuple[str, bool]]:
    """Read the rest of a call's first tag; return the function's name, and whether the tag is
    self-closing (the call has no arguments)."""
    head, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
    return _unquoted(head.removesuffix("/")), head.endswith("/")


def _read_members(
    reader: BlockReader, tag_names: tuple[str, str], arguments: CallArguments, value: Value
) -> Pieces[None]:
    """Read the arguments of a call up to its end tag, and yield them as members of a JSON object.
    `tag_names`: the names of the tags of a call and of an argument."""
    invoke, parameter = tag_names
    close = f"</{invoke}>"
    gap = ""
    while (yield from reader.expect_after_space(f"<{parameter} name=", close)) != close:
        head, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
        key, _, string_flag = head.partition(" string=")
        key = _unquoted(key)
        end = f"</{parameter}>"
        texts = reader.pieces_until(end)
        if not string_flag:
            yield from arguments.member(gap, key, value(reader, end))
        elif "true" in string_flag:
            yield from CallArguments(None).member(gap, key, texts)
        else:
            yield from arguments.member(gap, key, texts, json=True)
        gap = ", "


def _unquoted(text: str) -> str:
    """Return the value of a tag's attribute without its quotes. Raises Malformed if it is empty."""
    text = text.strip().strip("\"'")
    if not text:
        raise Malformed
    return text


_M2_BEGIN, _M2_END = "<minimax:tool_call>", "</minimax:tool_call>"


def _read_minimax_m2(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    return _read_invokes(reader, "", _M2_END, schemas)


_DSML = "｜DSML｜"
# V3.2, V4, and V4.1 with a space in its tags.
_DSML_PREFIXES = {
    f"{_DSML}function_calls": _DSML,
    f"{_DSML}tool_calls": _DSML,
    f"{_DSML} calls": f"{_DSML} ",
}


def _read_dsml(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    name = opener[1:-1]
    return _read_invokes(reader, _DSML_PREFIXES[name], f"</{name}>", schemas)


_DEEPSEEK_DSML = ToolFamily(  # DeepSeek V3.2 and later
    "deepseek_dsml",
    lambda template: _DSML in template,
    object_form(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
    openers=tuple(f"<{name}>" for name in _DSML_PREFIXES),
    read=_read_dsml,
    special=(_DSML,),
)

_STEP3_BEGIN, _STEP3_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_STEP3_CALL, _STEP3_CALL_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
_STEP3_SEPARATOR, _STEP3_PREFIX = "<｜tool_sep｜>", "steptml:"


def _read_step3(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if not (yield from grammar_call(reader, schemas, _STEP3_END)):
        yield from calls_in_section(
            reader, _STEP3_CALL, _STEP3_END, lambda: _read_step3_call(reader, schemas)
        )


def _read_step3_call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    yield from reader.until(_STEP3_SEPARATOR, max_chars=MAX_NAME_CHARS)
    yield from reader.expect_after_space(f"<{_STEP3_PREFIX}invoke name=")
    yield from _read_invoke(reader, _STEP3_PREFIX, schemas)
    yield from reader.take_end_after_space(_STEP3_CALL_END)


_TO, _ATEM_BEGIN, _ATEM_END = "to=", "<atem:function_calls>", "</atem:function_calls>"


def _read_muse(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if opener == _ATEM_BEGIN:
        if not (yield from grammar_call(reader, schemas, _ATEM_END)):
            raise Malformed
        return
    recipient = yield from reader.name()
    calls = _read_invokes(reader, "atem:", _ATEM_END, schemas, _raw_text)
    try:
        yield from reader.expect(MUSE_MESSAGE)
        if recipient == "user":
            return
        yield from reader.expect_after_space(_ATEM_BEGIN)
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


_FUNCTION, _FUNCTION_END = "<function name=", "</function>"
_CDATA, _CDATA_END = "<![CDATA[", "]]>"


def _read_minicpm5(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    name, is_self_closing = yield from _read_head(reader)
    if is_self_closing:
        yield CallPiece(name, "{}", last=True)
        return
    if (yield from reader.first_after_space()) == "{":  # the form of a grammar
        yield from json_arguments(reader, schemas, name)
        yield from reader.take_end_after_space(_FUNCTION_END)
        return
    members = _read_members(reader, ("function", "param"), schemas.call(name), _text_or_cdata)
    yield from streamed_call(schemas, name, object_pieces(members))


def _text_or_cdata(reader: BlockReader, end: str) -> Pieces[None]:
    start = reader.position
    if not (yield from reader.take_after_space(_CDATA)):
        reader.position = start
        yield from reader.pieces_until(end)
        return
    yield from reader.pieces_until(_CDATA_END)
    yield from reader.expect_after_space(end)


_MINICPM5 = ToolFamily(  # <function name=...> with <param name=...> tags
    "minicpm5",
    lambda template: _FUNCTION in template,
    CallForm(_FUNCTION + '"NAME">', _FUNCTION_END, trigger=_FUNCTION),
    openers=(_FUNCTION,),
    read=_read_minicpm5,
    special=("<function", _FUNCTION_END, "<param", "</param>"),
)

FAMILIES = (
    _DEEPSEEK_DSML,
    _MINICPM5,
    tagged_family("minimax_m2", _M2_BEGIN, _M2_END, _read_minimax_m2, space="\n"),
    # A message to the tool contains the invocation. In a message to the user, such tags are text.
    ToolFamily(
        "muse_glimmer",
        lambda template: _ATEM_BEGIN in template,
        object_form(_ATEM_BEGIN, _ATEM_END),
        openers=(f" {_TO}", _TO, _ATEM_BEGIN),
        read=_read_muse,
        special=(MUSE_MESSAGE,),
        answer_tags=MUSE_ANSWER_TAGS,
    ),
    tagged_family(  # each invocation in a call's tags
        "step3",
        _STEP3_BEGIN,
        _STEP3_END,
        _read_step3,
        matches=lambda template: _STEP3_PREFIX in template,
        special=(_STEP3_CALL, _STEP3_CALL_END, _STEP3_SEPARATOR),
    ),
)
