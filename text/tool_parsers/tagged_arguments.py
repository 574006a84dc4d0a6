"""Reads tool calls that have the function's name, followed by a pair of tags for each argument."""

import re
from collections.abc import Callable
from html import unescape

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    MAX_VALUE_DEPTH,
    BlockReader,
    CallArguments,
    Calls,
    CutOff,
    Malformed,
    Pieces,
    Reading,
    ToolFamily,
    ToolSchemas,
    calls_in_section,
    grammar_call,
    json_text,
    object_pieces,
    streamed_call,
    tagged_family,
)
from pdserve.text.reasoning import KIMI_K3_ANSWER_TAGS

# --- GLM 4.5 and Hy3: <arg_key> and <arg_value>


def _glm_members(
    reader: BlockReader, arguments: CallArguments, mark: str = "", suffix: str = ""
) -> Pieces[None]:
    """Read the arguments of a GLM call up to the end of the call, and yield them as members of a
    JSON object. `mark`: the first tag, if it is already read."""
    begin, end = f"<arg_key{suffix}>", f"</tool_call{suffix}>"
    value_end = f"</arg_value{suffix}>"
    gap = ""
    if not mark:
        mark = yield from reader.expect_after_space(begin, end)
    while mark != end:
        key, _ = yield from reader.until(f"</arg_key{suffix}>", max_chars=MAX_NAME_CHARS)
        yield from reader.expect_after_space(f"<arg_value{suffix}>")
        # An argument without a schema is JSON if it parses, else a string.
        texts = _glm_value(reader, value_end, end)
        yield from arguments.member(gap, key, texts, json=not arguments.knows(key))
        gap = ", "
        mark = yield from reader.expect_after_space(begin, end)


def _glm_value(reader: BlockReader, value_end: str, call_end: str) -> Pieces[None]:
    """Yield the text of an argument up to its end tag, which models sometimes omit at the end of an
    answer."""
    while (yield from reader.pieces_until(value_end, call_end)) == call_end:
        start = reader.position
        yield from reader.space()
        at_end = reader.ended and reader.position == len(reader.text)
        reader.position = start
        if at_end:
            reader.position -= len(call_end)
            return
        yield call_end


def _glm_tags(suffix: str = "") -> tuple[str, ...]:
    return tuple(f"<{end}arg_{part}{suffix}>" for part in ("key", "value") for end in ("", "/"))


_GLM_BEGIN, _GLM_END = "<tool_call>", "</tool_call>"


def _read_glm(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if (yield from grammar_call(reader, schemas, _GLM_END)):
        return
    name, end = yield from reader.until("<arg_key>", _GLM_END, max_chars=MAX_NAME_CHARS)
    name = name.strip()
    if not name or any(char.isspace() for char in name):
        raise Malformed
    members = _glm_members(reader, schemas.call(name), end)
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
        members = _glm_members(reader, schemas.call(name), suffix=_SUFFIX)
        yield from streamed_call(schemas, name, object_pieces(members))
        if (yield from reader.take_end_after_space(_HY3_END)):
            return
        yield from reader.expect(_HY3_CALL)


# --- Qwen3-Coder and Seed-OSS: <function=NAME> and <parameter=NAME> with plain text

_FUNCTION = "<function="
_PARAMETER_END, _AFTER_PARAMETER = "</parameter>", ("<parameter=", "</function>")
# A value on separate lines may contain such tags inside a line.
_ENDS_ON_LINES = (_PARAMETER_END, f"\n{_PARAMETER_END}", "\n<parameter=", "\n</function>")
_VALUE_ENDS = (_PARAMETER_END, *_AFTER_PARAMETER)


def _qwen_members(reader: BlockReader, arguments: CallArguments) -> Pieces[None]:
    end = yield from reader.expect_after_space(*_AFTER_PARAMETER)
    gap = ""
    while "<parameter=" in end:
        key, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
        if "\n" in key:
            raise Malformed
        end = yield from arguments.member(gap, key, _qwen_value(reader))
        gap = ", "


def _qwen_value(reader: BlockReader) -> Pieces[str]:
    """Yield the text of an argument, and return the tag after it. A value's end tag inside the text
    counts only if another tag of the call follows it."""
    lines = yield from reader.take("\n")
    while True:
        end = yield from reader.pieces_until(*(_ENDS_ON_LINES if lines else _VALUE_ENDS))
        if not end.endswith(_PARAMETER_END):
            return end
        start = reader.position
        if following := (yield from reader.take_after_space(*_AFTER_PARAMETER)):
            return following
        rest = reader.text[reader.position :]
        if reader.ended and any(mark.startswith(rest) for mark in _AFTER_PARAMETER):
            raise CutOff
        space = reader.text[start : reader.position]
        yield end  # the tag is part of the value
        reader.text = space + reader.text[reader.position :]
        reader.position = 0


def _qwen_family(name: str, begin: str, end: str, matches: Callable[[str], bool]) -> ToolFamily:
    """Return a family that writes each call between the tags `begin` and `end`; a model may omit
    `begin`."""

    def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
        if opener != _FUNCTION:
            if (yield from grammar_call(reader, schemas, end)):
                return
            yield from reader.expect(_FUNCTION)
        name, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
        members = _qwen_members(reader, schemas.call(name))
        yield from streamed_call(schemas, name, object_pieces(members))
        yield from reader.take_end_after_space(end)

    return tagged_family(name, begin, end, read, matches=matches, space="\n", openers=(_FUNCTION,))


# --- Kimi K3: <|open|>call with attributes, which contains typed arguments

_K3_OPEN, _K3_CLOSE, _K3_SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
_K3_BEGIN, _K3_END = f"{_K3_OPEN}tools{_K3_SEPARATOR}", f"{_K3_CLOSE}tools{_K3_SEPARATOR}"
_K3_CALL_END, _K3_ARGUMENT_END = (
    f"{_K3_CLOSE}call{_K3_SEPARATOR}",
    f"{_K3_CLOSE}argument{_K3_SEPARATOR}",
)
_K3_ARGUMENT = f"{_K3_OPEN}argument "
_K3_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _read_kimi_k3(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if not (yield from grammar_call(reader, schemas, _K3_END)):
        yield from calls_in_section(
            reader, f"{_K3_OPEN}call ", _K3_END, lambda: _k3_call(reader, schemas)
        )


def _k3_call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    head, _ = yield from reader.until(_K3_SEPARATOR, max_chars=MAX_NAME_CHARS)
    name = _k3_attributes(head).get("tool", "")
    if not name:
        raise Malformed
    yield from streamed_call(schemas, name, object_pieces(_k3_members(reader)))


def _k3_attributes(text: str) -> dict[str, str]:
    return {match[1]: unescape(match[2]) for match in _K3_ATTRIBUTE.finditer(text)}


def _k3_members(reader: BlockReader) -> Pieces[None]:
    gap = ""
    yield from reader.space()
    while (yield from reader.expect(_K3_ARGUMENT, _K3_CALL_END)) == _K3_ARGUMENT:
        head, _ = yield from reader.until(_K3_SEPARATOR, max_chars=MAX_NAME_CHARS)
        attributes = _k3_attributes(head)
        key = attributes.get("key", "")
        if not key:
            raise Malformed
        is_json = attributes.get("type", "string") != "string"
        yield from CallArguments(None).member(gap, key, _k3_value(reader), json=is_json)
        gap = ", "
        yield from reader.space()


def _k3_value(reader: BlockReader) -> Pieces[None]:
    """Yield the text of an argument up to its end tag. An end tag inside the text counts only if
    another tag of the call follows it."""
    while True:
        end = yield from reader.pieces_until(_K3_ARGUMENT_END)
        start = reader.position
        follows = yield from reader.take_after_space(_K3_ARGUMENT, _K3_CALL_END)
        rest = reader.text[reader.position :]
        reader.position = start
        if follows or (
            reader.ended and any(t.startswith(rest) for t in (_K3_ARGUMENT, _K3_CALL_END))
        ):
            return
        yield end


# --- MiniMax M3: each argument's tag is its name, and a mark precedes every tag. Objects contain
# such tags, and lists contain <item>.

_M3_MARK = "]<]minimax[>["
_M3_BEGIN, _M3_END = f"{_M3_MARK}<tool_call>", f"{_M3_MARK}</tool_call>"
_M3_INVOKE, _M3_INVOKE_END = f"{_M3_MARK}<invoke name=", f"{_M3_MARK}</invoke>"
_M3_ITEM = "item"


def _read_minimax_m3(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if not (yield from grammar_call(reader, schemas, _M3_END)):
        yield from calls_in_section(reader, _M3_INVOKE, _M3_END, lambda: _m3_call(reader, schemas))


def _m3_call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    name, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
    name = name.strip().strip('"')
    if not name:
        raise Malformed
    members = _m3_members(reader, schemas.call(name), _M3_INVOKE_END)
    yield from streamed_call(schemas, name, object_pieces(members))


def _m3_members(
    reader: BlockReader, arguments: CallArguments, end: str, depth: int = 0
) -> Pieces[None]:
    gap = ""
    while not (yield from reader.take_after_space(end)):
        yield from reader.expect(f"{_M3_MARK}<")
        key, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
        if not key or key.startswith("/"):
            raise Malformed
        yield from _m3_value(reader, arguments, f"{gap}{json_text(key)}: ", key, depth)
        gap = ", "


def _m3_value(
    reader: BlockReader, arguments: CallArguments, head: str, key: str, depth: int
) -> Pieces[None]:
    """Read the value of an argument, whose begin tag is already read, and yield it as JSON after
    `head`."""
    end = f"{_M3_MARK}</{key}>"
    first = (yield from _m3_element(reader)) if arguments.may_contain(key) else ""
    if not first:
        start = reader.position
        if arguments.must_contain(key) and (yield from reader.take_after_space(end)):
            yield head + ("[]" if arguments.may_be_list(key) else "{}")
            return
        reader.position = start
        is_json = depth > 0 and not arguments.knows(key)
        yield from arguments.value(head, key, reader.pieces_until(end), json=is_json)
        return
    if depth == MAX_VALUE_DEPTH:
        raise Malformed
    within = arguments.within(key)
    if first != _M3_ITEM or not arguments.may_be_list(key):
        yield f"{head}{{"
        yield from _m3_members(reader, within, end, depth + 1)
        yield "}"
        return
    head += "["
    while not (yield from reader.take_after_space(end)):
        yield from reader.expect(f"{_M3_MARK}<{_M3_ITEM}>")
        yield from _m3_value(reader, within, head, _M3_ITEM, depth + 1)
        head = ", "
    yield "]"


def _m3_element(reader: BlockReader) -> Reading[str]:
    """Return the name of the tag that comes next, without reading it; "" if text comes next."""
    start = reader.position
    name = ""
    if (yield from reader.take_after_space(f"{_M3_MARK}<")):
        name, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
    reader.position = start
    return "" if name.startswith("/") else name


FAMILIES = (
    tagged_family(
        "glm45",
        _GLM_BEGIN,
        _GLM_END,
        _read_glm,
        matches=lambda template: "<arg_key>" in template,
        special=_glm_tags(),
    ),
    tagged_family(  # calls in a section, with a suffix on the tags
        "hy3",
        _HY3_BEGIN,
        _HY3_END,
        _read_hy3,
        matches=lambda template: "<tool_sep{" in template or _HY3_SEPARATOR in template,
        special=(_HY3_CALL, f"</tool_call{_SUFFIX}>", _HY3_SEPARATOR, *_glm_tags(_SUFFIX)),
    ),
    tagged_family(
        "kimi_k3",
        _K3_BEGIN,
        _K3_END,
        _read_kimi_k3,
        matches=lambda template: _K3_OPEN in template,
        special=(_K3_OPEN, _K3_CLOSE, _K3_SEPARATOR),
        answer_tags=KIMI_K3_ANSWER_TAGS,
    ),
    tagged_family(
        "minimax_m3",
        _M3_BEGIN,
        _M3_END,
        _read_minimax_m3,
        matches=lambda template: _M3_MARK in template,
        space="\n",
        special=(_M3_MARK,),
    ),
    _qwen_family(
        "qwen3_coder",
        "<tool_call>",
        "</tool_call>",
        lambda t: _FUNCTION in t and "<parameter=" in t and "<seed:tool_call>" not in t,
    ),
    _qwen_family(
        "seed_oss",
        "<seed:tool_call>",
        "</seed:tool_call>",
        lambda template: "<seed:tool_call>" in template,
    ),
)
