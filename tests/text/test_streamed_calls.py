"""Generated calls of every family, cut at random: the pieces add up and are returned early."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from builders.tool_answers import TOOL_ANSWERS

from pdserve.text import (
    AnswerFormat,
    ContentPart,
    ToolCallPart,
    arguments_object,
    calls_of,
    text_of,
)
from pdserve.text.parsing import ContentParser, ToolSchemas
from pdserve.text.tool_parsers import tool_family, tool_parser_names

NAMES = tool_parser_names()
NUM_CALLS = 500  # per family, two in an answer
PIECE_CHARS = 4  # about the length of a token
MAX_TOKENS_BEHIND = 3


class Notation(NamedTuple):
    """Notation of arguments: `member` returns the parts of one argument before and from its value;
    `gap` separates two."""

    member: Callable[[str, Any], tuple[str, str]]
    gap: str = ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _gemma(quote: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(quote, one) for one in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(quote, one)}" for key, one in value.items()) + "}"
    return _json(value)


def _tagged(before: str, after: str, write: Callable[[Any], str] = _plain) -> Notation:
    return Notation(lambda key, value: (before.replace("KEY", key), write(value) + after))


def _dsml(key: str, value: Any) -> tuple[str, str]:
    kind = "true" if isinstance(value, str) else "false"
    head = f'<｜DSML｜parameter name="{key}" string="{kind}">'
    return head, f"{_plain(value)}</｜DSML｜parameter>\n"


def _minimax_m3(key: str, value: Any) -> tuple[str, str]:
    return f"]<]minimax[>[<{key}>", f"{_plain(value)}]<]minimax[>[</{key}>"


def _kimi_k3(key: str, value: Any) -> tuple[str, str]:
    kind = "string" if isinstance(value, str) else "object"
    head = f'<|open|>argument key="{key}" type="{kind}"<|sep|>'
    return head, f"{_plain(value)}<|close|>argument<|sep|>"


PYTHON = Notation(lambda key, value: (f"{key}=", repr(value)), ", ")
TAGGED = {
    "qwen3_coder": _tagged("<parameter=KEY>\n", "\n</parameter>\n"),
    "seed_oss": _tagged("<parameter=KEY>", "</parameter>\n"),
    "glm45": _tagged("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    "minimax_m2": _tagged('<parameter name="KEY">', "</parameter>\n"),
    "step3": _tagged('<steptml:parameter name="KEY">', "</steptml:parameter>"),
    "minimax_m3": Notation(_minimax_m3),
    "deepseek_dsml": Notation(_dsml),
    "kimi_k3": Notation(_kimi_k3),
    "hy3": _tagged(
        "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>",
        "</arg_value:opensource>\n",
    ),
    "minicpm5": _tagged('<param name="KEY">', "</param>"),
    "muse_glimmer": _tagged('<atem:parameter name="KEY">', "</atem:parameter>\n"),
    "gemma4": Notation(lambda key, value: (f"{key}:", _gemma('<|"|>', value)), ","),
    "functiongemma": Notation(lambda key, value: (f"{key}:", _gemma("<escape>", value)), ","),
    "llama4_pythonic": PYTHON,
    "lfm2": PYTHON,
    "olmo3": PYTHON,
    "pythonic": PYTHON,
}
QUOTED = {"lfm2": '"', "olmo3": '"', "pythonic": '"', "llama4_pythonic": "'"}


def _member_of(name: str, city: str) -> str:
    """The argument in the call of the sample answer."""
    if name not in TAGGED:
        return f'{{"city": "{city}"}}'
    if name in QUOTED:
        return f"city={QUOTED[name]}{city}{QUOTED[name]}"
    return "".join(TAGGED[name].member("city", city))


def _written(name: str, arguments: dict[str, Any]) -> tuple[str, int]:
    """The arguments as the family writes them, and the offset of the first value."""
    if name not in TAGGED:
        return json.dumps(arguments, ensure_ascii=len(arguments) % 2 == 0), 0
    notation = TAGGED[name]
    parts = [notation.member(key, value) for key, value in arguments.items()]
    first = len(parts[0][0]) if parts else 0
    return notation.gap.join(head + value for head, value in parts), first


STRINGS = [
    "", "Paris", "it's", 'say "hi"', "a\\b\\n", "line\n\tline", "é漢🙂", "{[(", ")]}", "a < b",
    "=,:;", "null", "12", "true", "'", "x" * 60, "\u2028", "</p", "```", "C:\\new",
]  # fmt: skip


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 3:
        return "".join(rng.choices(STRINGS, k=rng.randrange(1, 4)))
    if kind == 3:
        return rng.choice([0, -7, 10**18, 1.5, -2.5e-7, 0.1])
    if kind < 6:
        return rng.choice([True, False, None])
    num = rng.randrange(4)
    if kind == 6:
        return [_value(rng, depth + 1) for _ in range(num)]
    return {f"k{n}": _value(rng, depth + 1) for n in range(num)}


def _arguments(rng: random.Random) -> dict[str, Any]:
    return {f"{rng.choice('abcdef')}{n}": _value(rng, 0) for n in range(rng.randrange(5))}


TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip


def _schemas(rng: random.Random, *several: dict[str, Any]) -> ToolSchemas:
    """The schemas of one tool; strings may also be null."""
    properties: dict[str, Any] = {}
    for arguments in several:
        for key, value in arguments.items():
            kind = TYPES[type(value)]
            properties[key] = {"type": ["string", "null"] if kind == "string" else kind}
            if kind == "string" and (
                rng.random() < 0.7 or value.strip().lower() in ("null", "none")
            ):
                properties[key] = {"type": "string"}
    return ToolSchemas({"get_weather": {"type": "object", "properties": properties}})


def _parser(name: str, schemas: ToolSchemas) -> ContentParser:
    parser = AnswerFormat(tool_family(name), None, schemas).parser()
    assert parser is not None
    return parser


def _calls(content: list[ContentPart]) -> list[tuple[str, str]]:
    assert not text_of(content).strip()
    return [(call.name, call.arguments) for call in calls_of(content)]


@pytest.mark.parametrize("name", NAMES)
def test_generated_calls(name: str) -> None:
    rng = random.Random(f"calls of {name}")
    answer = TOOL_ANSWERS[name].calls
    for member in (_member_of(name, "Paris"), _member_of(name, "Rome")):
        assert answer.count(member) == 1
    num_streamed = 0
    for _ in range(NUM_CALLS // 2):
        first = _arguments(rng)
        second = {key: value for key, value in _arguments(rng).items() if key not in first}
        text = answer.replace(_member_of(name, "Rome"), _written(name, second)[0])
        text = text.replace(_member_of(name, "Paris"), _written(name, first)[0])
        schemas = _schemas(rng, first, second)
        parser = _parser(name, schemas)
        whole = _calls(parser.push(text) + parser.finish())
        assert [(tool, json.loads(given)) for tool, given in whole] == [
            ("get_weather", first), ("get_weather", second),
        ], text  # fmt: skip
        parser, content = _parser(name, schemas), []
        mean, at = rng.choice([2, 8, 30]), 0
        while at < len(text):
            size = rng.randrange(1, 2 * mean)
            content += parser.push(text[at : at + size])
            at += size
        num_streamed += sum(isinstance(part, ToolCallPart) for part in content)
        assert _calls(content + parser.finish()) == whole, text
    assert num_streamed > 3 * NUM_CALLS


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_streamed_early(name: str) -> None:
    """Return a piece at most a few tokens after the first argument begins, whatever its value, and
    with nearly every token while a long text is generated."""
    rng = random.Random(f"beginnings of {name}")
    answer = TOOL_ANSWERS[name].call
    member = _member_of(name, "Paris")
    for long in (False,) * 20 + (True,):
        arguments = {"a": "the text of a file\n" * 130} if long else {"a": _value(rng, 0)}
        written, first = _written(name, arguments)
        begins = answer.index(member) + first
        text = answer.replace(member, written)
        parser = _parser(name, _schemas(rng, arguments))
        given: list[int] = []
        for at in range(0, len(text), PIECE_CHARS):
            content = parser.push(text[at : at + PIECE_CHARS])
            if any(isinstance(part, ToolCallPart) and part.arguments for part in content):
                given.append(at // PIECE_CHARS)
        if not given:  # only at the end
            assert len(text) - begins < (MAX_TOKENS_BEHIND + 1) * PIECE_CHARS, text
            continue
        assert given[0] - begins // PIECE_CHARS <= MAX_TOKENS_BEHIND, text
        if long:
            assert len(given) > len(written) // PIECE_CHARS * 0.9


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_end_in_long_numbers_are_json(name: str) -> None:
    """Give JSON wherever the answer ends, and independent of the cut."""
    arguments = {"a": 123456789012, "b": [1, -0.123456789], "c": {"d": 1234567}}
    answer = TOOL_ANSWERS[name].call
    member = _member_of(name, "Paris")
    text = answer.replace(member, _written(name, arguments)[0])
    schemas = _schemas(random.Random(1), arguments)
    endings = set()
    for end in range(answer.index(member), len(text) + 1):
        parser = _parser(name, schemas)
        whole = [call.arguments for call in calls_of(parser.push(text[:end]) + parser.finish())]
        endings |= set(whole)
        if end % 8 == 0:
            parser = _parser(name, schemas)
            content = [part for char in text[:end] for part in parser.push(char)]
            assert [call.arguments for call in calls_of(content + parser.finish())] == whole
    assert all(isinstance(json.loads(ending), dict) for ending in endings)
    assert not any("null" in ending for ending in endings)
    assert any(ending.startswith('{"a": 12345}') for ending in endings)
    assert '{"a": 123456789012, "b": [1, -0.1234567' in "".join(endings)


def test_a_value_that_only_begins_as_a_number_is_a_string() -> None:
    for name, written in (
        ("hermes", '{"a": 192.168.0.1, "b": 2024-01-02}'),
        ("pythonic", "a=192.168.0.1, b=2024-01-02"),
    ):
        answer = TOOL_ANSWERS[name].call.replace(_member_of(name, "Paris"), written)
        expected = {"a": "192.168.0.1", "b": "2024-01-02"}
        parser = _parser(name, ToolSchemas({"get_weather": {}}))
        content = [part for char in answer for part in parser.push(char)] + parser.finish()
        assert [json.loads(given) for _, given in _calls(content)] == [expected]


PLAIN = sorted(TAGGED.keys() - QUOTED.keys() - {"gemma4", "functiongemma"})


@pytest.mark.parametrize("name", PLAIN)
def test_a_value_that_is_too_deep_is_a_string(name: str) -> None:
    """The arguments, an object around the value, are parsed back in every API."""
    answer = TOOL_ANSWERS[name].call
    for levels, is_string in ((199, False), (200, True), (201, True)):
        value: Any = []
        for _ in range(levels - 1):
            value = [value]
        text = answer.replace(_member_of(name, "Paris"), "".join(TAGGED[name].member("q", value)))
        for kind in ("array", ["array", "string"], ["array", "null"], None):
            schema = {"properties": {"q": {"type": kind}} if kind else {}}
            for tools in ({"get_weather": schema}, {"other": schema}):
                parser = _parser(name, ToolSchemas(tools))
                [(_, given)] = _calls(parser.push(text) + parser.finish())
                read = arguments_object(given)["q"]
                assert _plain(read) == _json(value)
                kept = isinstance(read, str)
                assert kept or not is_string


def test_an_answer_that_ends_within_a_value_keeps_it() -> None:
    hermes = '<tool_call>{"name": "f", "arguments": '
    glm = "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>"
    for name, text, expected in (
        ("hermes", hermes + '{"n": 12345', {"n": 12345}),
        ("hermes", hermes + '{"n": [1, 12345', {"n": [1, 12345]}),
        ("hermes", hermes + '{"a": "x", "n": true', {"a": "x", "n": True}),
        ("hermes", hermes + '{"a": "x", "n": tru', {"a": "x"}),
        ("hermes", hermes + r'"{\"n\": [1, 2', {"n": [1, 2]}),
        ("lfm2", "<|tool_call_start|>[f(n=12345", {"n": 12345}),
        ("glm45", glm + "12", {"n": 12}),
        ("glm45", glm + "[1, 12</arg_v", {"n": [1, 12]}),
    ):
        for pieces in ([text], [*text]):
            parser = _parser(name, ToolSchemas({"f": {}}))
            content = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
            assert [json.loads(given) for _, given in _calls(content)] == [expected]
