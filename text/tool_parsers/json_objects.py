"""Reads tool calls that are JSON objects with the function's name and its arguments, between tags
or at the start of the answer."""

from collections.abc import Callable, Mapping

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    MISTRAL_CALLS,
    BlockReader,
    CallForm,
    Calls,
    ToolFamily,
    ToolSchemas,
    json_arguments,
    json_call,
    json_calls,
    json_list,
    object_form,
)
from pdserve.text.tool_parsers.pythonic import mixed_calls, python_calls

BARE_JSON = "{[`"  # the first character of JSON or fenced code
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


def _read_between(tags: Mapping[str, str]) -> Callable[[BlockReader, str, ToolSchemas], Calls]:
    """Return a reader of blocks of calls. `tags` maps each begin tag of a block to its end tag; a
    block without tags is read as well."""

    def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
        if not opener:
            yield from mixed_calls(reader, schemas)
            return
        yield from json_calls(reader, schemas)
        yield from reader.take_end_after_space(tags[opener])

    return read


def _listed(
    name: str,
    tags: Mapping[str, str],
    matches: Callable[[str], bool],
    *,
    key: str = "name",
    arguments: str = "arguments",
    answer_tags: tuple[str, ...] = (),
) -> ToolFamily:
    """Return a family that writes its calls as a sequence or a list of JSON objects.

    `tags` maps each begin tag of a block to its end tag; under a grammar, calls are between the
    first pair. `key` and `arguments`: the object's keys for the function's name and arguments.
    """
    begin, end = next(iter(tags.items()))
    return ToolFamily(
        name,
        matches,
        CallForm(f'{begin}[{{"{key}": "NAME", "{arguments}": ', f"}}]{end}", trigger=begin),
        openers=tuple(tags),
        read=_read_between(tags),
        special=(*tags, *tags.values()),
        answer_tags=answer_tags,
    )


# Qwen 2.5 Coder often writes the second tag, or none.
_HERMES_TAGS = {TOOL_CALL: TOOL_CALL_END, "<tools>": "</tools>"}
_OTHERS = ("<arg_key>", "<function=", "<tool_calls>", "]<]minimax[>[")  # of families with this tag
_HERMES = ToolFamily(  # Hermes, Qwen 2.5, Qwen 3 and many others
    "hermes",
    lambda template: TOOL_CALL in template and not any(other in template for other in _OTHERS),
    object_form(TOOL_CALL, TOOL_CALL_END, "\n"),
    openers=tuple(_HERMES_TAGS),
    bare=BARE_JSON,
    read=_read_between(_HERMES_TAGS),
    special=(TOOL_CALL, TOOL_CALL_END),
)

# Tags that several families use.
_NAMES = "tool_call", "tool_calls", "tools", "TOOLCALL", "function_call"
_JSON_TAGS = {f"<{name}>": f"</{name}>" for name in _NAMES} | {MISTRAL_CALLS: "[/TOOL_CALLS]"}
_JSON = ToolFamily(  # unknown families
    "json",
    lambda template: False,
    CallForm('{"name": "NAME", "arguments": ', "}", trigger='{"name": "'),
    openers=tuple(_JSON_TAGS),
    bare=BARE_JSON,
    read=_read_between(_JSON_TAGS),
    special=(*_JSON_TAGS, *_JSON_TAGS.values()),
)

_TOOL_CODE = "```tool_code"  # the form that Gemma 3 is trained on
_read_tool_call = _read_between({TOOL_CALL: TOOL_CALL_END})


def _read_generic(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if opener != _TOOL_CODE:
        yield from _read_tool_call(reader, opener, schemas)
        return
    yield from python_calls(reader, schemas)
    yield from reader.take_end_after_space("```")


# Models whose prompt describes the form (text/templates/turns.py). Small ones omit the tags.
_GENERIC = ToolFamily(
    "generic",  # llama.cpp's name
    lambda template: False,
    object_form(TOOL_CALL, TOOL_CALL_END, "\n"),
    openers=(TOOL_CALL, _TOOL_CODE),
    bare=BARE_JSON,
    read=_read_generic,
    special=(TOOL_CALL, TOOL_CALL_END),
)

_ACTION, _FENCED = "Action:", "```json"


def _read_command_r(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.expect_after_space(_FENCED)
    yield from json_calls(reader, schemas)
    yield from reader.take_end_after_space("```")


_COMMAND_R = ToolFamily(  # Command R and R+: a list in fenced code, after the word Action
    "command_r",
    lambda template: _ACTION in template and _FENCED in template,
    CallForm(
        f'{_ACTION} {_FENCED}\n[{{"tool_name": "NAME", "parameters": ', "}]\n```", trigger=_ACTION
    ),
    openers=(_ACTION,),
    read=_read_command_r,
)

_PHI_CALL, _PHI_CALL_END, _FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools"


def _read_phi4(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if opener == _PHI_CALL and (yield from reader.first_after_space()) == "{":
        yield from json_call(reader, schemas)
    else:
        yield from reader.expect("[")
        yield from json_list(reader, schemas)
    yield from reader.take_end_after_space(_PHI_CALL_END)


_PHI4 = ToolFamily(  # Phi-4-mini and Firefunction: a list after functools, or between tags
    "phi4_mini_json",
    lambda t: "<|tool|>" in t or _PHI_CALL in t or _FUNCTOOLS in t,
    CallForm(f'{_FUNCTOOLS}[{{"name": "NAME", "arguments": ', "}]", trigger=_FUNCTOOLS),
    openers=(_PHI_CALL, _FUNCTOOLS),
    read=_read_phi4,
    special=(_PHI_CALL, _PHI_CALL_END),
)

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PYTHON_TAG, _EOM = "<|python_tag|>", "<|eom_id|>"


def _read_llama3(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    if opener == _FUNCTION:
        name, _ = yield from reader.until(">", max_chars=MAX_NAME_CHARS)
        yield from json_arguments(reader, schemas, name)
        yield from reader.take_end_after_space(_FUNCTION_END)
        return
    first = yield from reader.first_after_space()
    if opener and first.isidentifier():
        yield from python_calls(reader, schemas)
    else:
        yield from mixed_calls(reader, schemas)
    yield from reader.take_end(_EOM)


# Llama 3.1 to 3.3 and derived models: JSON objects or lists, or Python lists, at the start of the
# answer or after <|python_tag|>; or the arguments in <function=NAME>.
_LLAMA3 = ToolFamily(
    "llama3_json",
    lambda t: "<|start_header_id|>" in t and "<TOOLCALL>" not in t and _FUNCTOOLS not in t,
    CallForm('{"name": "NAME", "parameters": ', "}", trigger='{"name": "'),
    openers=(_PYTHON_TAG, _FUNCTION),
    bare=BARE_JSON,
    read=_read_llama3,
    special=(_PYTHON_TAG, _EOM),
)

_ACTION_START = "<|START_ACTION|>"
_COMMAND_A = _listed(  # Command R7B and Command A
    "command_a",
    {_ACTION_START: "<|END_ACTION|>"},
    lambda template: _ACTION_START in template,
    key="tool_name",
    arguments="parameters",
)

_GIGACHAT_CALL, _HEADER = "<|function_call|>", "function call<|role_sep|>"
_MESSAGE_END = "<|message_sep|>"
_SEPARATOR = f"{_MESSAGE_END}\n\n"
_GIGACHAT3 = _listed(  # after a tag, or after the header of a message
    "gigachat3",
    {_GIGACHAT_CALL: _SEPARATOR, f"{_SEPARATOR}{_HEADER}": _SEPARATOR, _HEADER: _SEPARATOR},
    lambda template: _GIGACHAT_CALL in template or "<|role_sep|>" in template,
    answer_tags=(_SEPARATOR, _MESSAGE_END),
)

FAMILIES = (
    _COMMAND_A,
    _COMMAND_R,
    _GENERIC,
    _GIGACHAT3,
    _HERMES,
    _listed(  # after the tag of its plug-ins
        "internlm2",
        {"<|action_start|><|plugin|>": "<|action_end|>"},
        lambda template: "<|plugin|>" in template,
        arguments="parameters",
    ),
    _listed(  # Jamba, Apriel, Hunyuan and MiniMax M1
        "jamba", {"<tool_calls>": "</tool_calls>"}, lambda template: "<tool_calls>" in template
    ),
    _JSON,
    _LLAMA3,
    _listed("nemotron", {"<TOOLCALL>": "</TOOLCALL>"}, lambda template: "<TOOLCALL>" in template),
    _PHI4,
)
