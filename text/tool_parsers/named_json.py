"""Reads tool calls that have the function's name outside the JSON, usually between tags, followed
by the arguments as JSON."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    MISTRAL_CALLS,
    BlockReader,
    CallForm,
    Calls,
    Malformed,
    ToolFamily,
    ToolSchemas,
    calls_in_section,
    json_arguments,
    json_calls,
    json_list,
    json_value,
    listed_calls,
)
from pdserve.text.reasoning import SOLAR_ANSWER_TAGS

_APERTUS_BEGIN, _APERTUS_END = "<|tools_prefix|>", "<|tools_suffix|>"


def _read_apertus(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    yield from reader.expect_after_space("[")
    yield from listed_calls(reader, lambda: _read_apertus_call(reader, schemas))
    yield from reader.take_end_after_space(_APERTUS_END)


def _read_apertus_call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    yield from reader.expect_after_space("{")
    yield from reader.space()
    name = json_value((yield from reader.string()))
    yield from reader.expect_after_space(":")
    yield from json_arguments(reader, schemas, name)
    yield from reader.take_after_space("}")


_APERTUS = ToolFamily(  # a list of objects whose only key is the function's name
    "apertus",
    lambda template: _APERTUS_BEGIN in template,
    CallForm(f'{_APERTUS_BEGIN}[{{"NAME": ', f"}}]{_APERTUS_END}", trigger=_APERTUS_BEGIN),
    openers=(_APERTUS_BEGIN,),
    read=_read_apertus,
    special=(_APERTUS_BEGIN, _APERTUS_END),
)

_DS_BEGIN, _DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DS_SEPARATOR, _FENCED = "<｜tool▁sep｜>", "```json"
_DISTILLED, _DISTILLED_END = "<tool_call>", "</tool_call>"


def _read_deepseek(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    """Read the calls of DeepSeek V3, or of V3.1, which writes the function's name before the
    separator. Models distilled from R1 sometimes write JSON objects between other tags, which are
    read as well."""
    if opener == _DISTILLED:
        yield from json_calls(reader, schemas)
        yield from reader.take_end_after_space(_DISTILLED_END)
        return
    yield from reader.space()
    yield from calls_in_section(
        reader, _DS_CALL, _DS_END, lambda: _read_deepseek_call(reader, schemas)
    )


def _read_deepseek_call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    name, _ = yield from reader.until(_DS_SEPARATOR, max_chars=MAX_NAME_CHARS)
    fenced = (yield from reader.first_after_space()) not in ("{", "")
    if fenced:
        name, _ = yield from reader.until(_FENCED, max_chars=MAX_NAME_CHARS)
    yield from json_arguments(reader, schemas, name)
    yield from reader.space()
    if fenced:
        yield from reader.take_end("```")
        yield from reader.space()
    if not (yield from reader.take_end(_DS_CALL_END)):
        raise Malformed


def _deepseek(name: str, form: CallForm, *, fenced: bool) -> ToolFamily:
    """Return a family of DeepSeek models; `fenced`: they write arguments in fenced code."""
    return ToolFamily(
        name,
        lambda template: _DS_BEGIN in template and (_FENCED in template) == fenced,
        form,
        openers=(_DS_BEGIN, _DISTILLED),
        read=_read_deepseek,
        special=(_DS_BEGIN, _DS_END, _DS_CALL, _DS_CALL_END, _DS_SEPARATOR),
    )


_DEEPSEEK_V3 = _deepseek(  # V3 and R1
    "deepseek_v3",
    CallForm(
        f"{_DS_BEGIN}{_DS_CALL}function{_DS_SEPARATOR}NAME\n{_FENCED}\n",
        f"\n```{_DS_CALL_END}{_DS_END}",
        trigger=_DS_BEGIN,
    ),
    fenced=True,
)
_DEEPSEEK_V31 = _deepseek(
    "deepseek_v31",
    CallForm(
        f"{_DS_BEGIN}{_DS_CALL}NAME{_DS_SEPARATOR}", f"{_DS_CALL_END}{_DS_END}", trigger=_DS_BEGIN
    ),
    fenced=False,
)

_RECIPIENT, _USER = ">>>", "all"


def _read_functionary(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    name = yield from reader.name()
    if not (opener or name == _USER or name in schemas):
        raise Malformed
    yield from reader.expect("\n")
    if name != _USER:
        yield from json_arguments(reader, schemas, name)


# Functionary 3.2: after >>>, which ends the prompt, the model writes a function's name, or "all"
# for text to the user, and a line break.
_FUNCTIONARY = ToolFamily(
    "functionary",
    lambda template: ">>>${recipient}" in template or f"{_RECIPIENT}{_USER}" in template,
    CallForm(f"{_RECIPIENT}NAME\n", "", trigger=_RECIPIENT),
    openers=(_RECIPIENT,),
    bare="abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_",
    read=_read_functionary,
)

_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"


def _read_kimi_k2(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    """Read the calls of Kimi K2, which have ids functions.NAME:INDEX that later turns must repeat.
    The model sometimes omits the tags of the section of calls."""
    if (
        opener == _KIMI_BEGIN
        and (yield from reader.expect_after_space(_KIMI_CALL, _KIMI_END)) == _KIMI_END
    ):
        return
    while True:
        call_id, _ = yield from reader.until(_KIMI_ARGUMENTS, max_chars=MAX_NAME_CHARS)
        call_id = call_id.strip()
        plain = call_id.removeprefix("functions.")
        name, _, index = plain.rpartition(":")
        is_standard_id = name and call_id.startswith("functions.") and index.isdecimal()
        yield from json_arguments(reader, schemas, name or plain, call_id if is_standard_id else "")
        closed = yield from reader.take_end_after_space(_KIMI_CALL_END)
        if not (closed or opener == _KIMI_CALL):
            raise Malformed
        if (yield from reader.take_end_after_space(_KIMI_END)):
            return
        if opener == _KIMI_BEGIN:
            yield from reader.expect(_KIMI_CALL)
        elif not (yield from reader.take(_KIMI_CALL)):
            return


_KIMI_K2 = ToolFamily(
    "kimi_k2",
    lambda template: _KIMI_BEGIN in template,
    CallForm(
        f"{_KIMI_BEGIN}{_KIMI_CALL}functions.NAME:0{_KIMI_ARGUMENTS}",
        f"{_KIMI_CALL_END}{_KIMI_END}",
        trigger=_KIMI_BEGIN,
    ),
    openers=(_KIMI_BEGIN, _KIMI_CALL),
    read=_read_kimi_k2,
    special=(_KIMI_BEGIN, _KIMI_END, _KIMI_CALL, _KIMI_CALL_END, _KIMI_ARGUMENTS),
)

_MISTRAL_ARGUMENTS, _MISTRAL_ID = "[ARGS]", "[CALL_ID]"
_ENDS_OF_NAME = (_MISTRAL_ARGUMENTS, _MISTRAL_ID, "{")


def _read_mistral(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    """Read the calls of Mistral models: a JSON list, or NAME[ARGS]{...}, which newer models
    write."""
    if (yield from reader.take_after_space("[")):
        yield from json_list(reader, schemas)
        return
    name, mark = yield from reader.until(*_ENDS_OF_NAME, " ", "\n", max_chars=MAX_NAME_CHARS)
    if mark.isspace():
        mark = yield from reader.expect_after_space(*_ENDS_OF_NAME)
    if mark == _MISTRAL_ID:
        yield from reader.until(_MISTRAL_ARGUMENTS, max_chars=MAX_NAME_CHARS)
    elif mark == "{":
        reader.position -= 1
    yield from json_arguments(reader, schemas, name)


_MISTRAL = ToolFamily(
    "mistral",
    lambda template: MISTRAL_CALLS in template,
    # The list form, which all these models can write.
    CallForm(f'{MISTRAL_CALLS}[{{"name": "NAME", "arguments": ', "}]", trigger=MISTRAL_CALLS),
    openers=(MISTRAL_CALLS,),
    read=_read_mistral,
    special=(MISTRAL_CALLS, _MISTRAL_ARGUMENTS, _MISTRAL_ID),
    id_len=9,
)

_SOLAR_BEGIN, _SOLAR_END = "<|tool_call:begin|>", "<|tool_call:end|>"
_SOLAR_NAME, _SOLAR_ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
_SOLAR_ID_LEN = 10
_NO_ID = "0" * _SOLAR_ID_LEN  # the id in a grammar's call


def _read_solar(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    """Read one call of Solar models, with an id of ten letters and digits that later turns must
    repeat."""
    id, _ = yield from reader.until(_SOLAR_NAME, max_chars=MAX_NAME_CHARS)
    name, _ = yield from reader.until(_SOLAR_ARGUMENTS, max_chars=MAX_NAME_CHARS)
    id = id.strip()
    yield from json_arguments(reader, schemas, name, "" if id == _NO_ID else id)
    yield from reader.take_end_after_space(_SOLAR_END)


_SOLAR = ToolFamily(
    "solar",
    lambda template: _SOLAR_NAME in template,
    CallForm(
        f"{_SOLAR_BEGIN}{_NO_ID}{_SOLAR_NAME}NAME{_SOLAR_ARGUMENTS}",
        _SOLAR_END,
        trigger=_SOLAR_BEGIN,
    ),
    openers=(_SOLAR_BEGIN,),
    read=_read_solar,
    special=(_SOLAR_BEGIN, _SOLAR_END, _SOLAR_NAME, _SOLAR_ARGUMENTS),
    answer_tags=SOLAR_ANSWER_TAGS,
    id_len=_SOLAR_ID_LEN,
)

FAMILIES = (_APERTUS, _DEEPSEEK_V3, _DEEPSEEK_V31, _FUNCTIONARY, _KIMI_K2, _MISTRAL, _SOLAR)
