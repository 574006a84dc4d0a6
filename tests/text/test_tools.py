"""The parsers of tool calls, one for the call format of each family.

Over 400 lines: every family with the same few samples and cuts, which share how parsers are made.
"""

import json
import random
import re
from collections.abc import Iterable
from itertools import count, pairwise, product
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import tokenizers
from builders.byte_tokenizer import VOCAB_SIZE, write_tokenizer
from builders.tool_answers import TOOL_ANSWERS
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text import (
    AnswerFormat,
    ContentPart,
    ToolCallPart,
    arguments_object,
    calls_of,
    reasoning_of,
    text_of,
)
from pdserve.text.parsing import CallStream, ContentParser, Malformed, ToolSchemas, json_value
from pdserve.text.parsing.call_stream import MAX_CALL_CHARS, MAX_SPACE
from pdserve.text.parsing.values import MAX_VALUES
from pdserve.text.reasoning import reasoning_family, reasoning_parser_names
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import Tokenizer
from pdserve.text.tool_parsers import (
    FALLBACK_PARSER,
    tool_family,
    tool_family_of,
    tool_parser_names,
)

PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome"})
NAMES = tool_parser_names()
TOOLS = ToolSchemas({"get_weather": {}, "f": {}})
# calls without a tag, only at the start
AT_START = {"llama3_json", "llama4_pythonic", "pythonic", "json"}
TAGGED = sorted(set(NAMES) - AT_START - {"gpt_oss"})
OWN_IDS = {"kimi_k2": "functions.get_weather:0", "solar": "a1b2c3d4e5"}


def make(name: str, schemas: ToolSchemas | None = None, parallel: bool = True) -> ContentParser:
    family = tool_family(name)
    assert family is not None
    ids = count()
    schemas = TOOLS if schemas is None else schemas
    if family.make_parser is not None:
        return family.make_parser(lambda: f"call_{next(ids)}", parallel, schemas)
    return CallStream(family, schemas, lambda: f"call_{next(ids)}", parallel)


def parse(
    name: str, pieces: Iterable[str], *, cut: bool = False, **options: Any
) -> list[ContentPart]:
    parser = make(name, **options)
    content = [part for piece in pieces for part in parser.push(piece)]
    return content + parser.finish(cut=cut)


def made(content: list[ContentPart]) -> tuple[str, list[tuple[str, Any]]]:
    """The text, and the calls with their arguments; incomplete arguments stay text."""
    return text_of(content), [(c.name, arguments_of(c.arguments)) for c in calls_of(content)]


def arguments_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def final(name: str, text: str) -> str:
    """A text as the model writes it in a final answer."""
    return f"<|channel|>final<|message|>{text}" if name == "gpt_oss" else text


def test_every_family_is_in_the_table() -> None:
    assert set(NAMES) == set(TOOL_ANSWERS)
    assert tool_family("none") is None


def test_family(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            family = tool_family(name)
            assert family is not None
            assert family.name == name
            assert "NAME" in family.form.begin
            assert family.form.begin.startswith(family.form.trigger)
            known_by = TOOL_ANSWERS[name].known_by
            assert tool_family_of("x" + known_by + "y") == (name if known_by else FALLBACK_PARSER)


def test_other_templates_use_the_fallback() -> None:
    assert tool_family_of("{% for tool in tools %}") == FALLBACK_PARSER


def test_call(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            parts = parse(name, [TOOL_ANSWERS[name].call])
            assert made(parts) == ("", [PARIS])
            first, *rest = parts
            assert first == ToolCallPart(0, OWN_IDS.get(name, "call_0"), "get_weather", "")
            assert all(
                isinstance(part, ToolCallPart) and part.arguments and not part.id for part in rest
            )


SPECIAL = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|\]<\]minimax\[>\[")


def tokens_of(path: Path, special: Iterable[str]) -> Tokenizer:
    """A byte tokenizer whose special tokens are the tags in these texts."""
    write_tokenizer(path)
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tags = {tag for text in special for tag in SPECIAL.findall(text) or [text]}
    num_tags = inner.add_special_tokens(sorted(tags))
    return Tokenizer(inner.to_str().encode(), TextModelInfo(VOCAB_SIZE + num_tags))


def test_answers_whose_tags_are_special_tokens(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Parse the decoded text, whether each tag is one special token or several tokens."""
    rows: list[tuple[str, str, str, tuple[str, str, list[Any]]]] = [
        (name, "", TOOL_ANSWERS[name].calls, ("", "", [PARIS, ROME])) for name in NAMES
    ]
    for name in reasoning_parser_names():
        family = reasoning_family(name)
        assert family is not None
        begin, end = family.written or (family.begin, family.end)
        end += "<|start|>assistant" * (name == "gpt_oss") + family.opening
        rows += [("", name, f"{begin}\nSo.{end}\nHi", ("So.", "Hi", []))]
    rows += [
        ("gigachat3", "", "Hi<|message_sep|>\n\n", ("", "Hi", [])),
        ("", "gemma4", "Hi<channel|>", ("", "Hi", [])),
    ]
    for tools, reasoning, answer, expected in rows:
        with subtests.test(tools=tools, reasoning=reasoning, answer=answer):
            form = AnswerFormat(tool_family(tools), reasoning_family(reasoning), TOOLS)
            tokens = tokens_of(tmp_path, form.special)
            text = tokens.incremental(keep=form.special)
            parser = form.parser()
            assert parser is not None
            content: list[ContentPart] = []
            for id in tokens.encode(answer, add_special_tokens=False, parse_special=True):
                content += parser.push(text.push([id]))
            content += parser.push(text.flush()) + parser.finish()
            said, calls = made(content)
            assert (reasoning_of(content).strip(), said.strip(), calls) == expected


def test_parallel_calls(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            answer = TOOL_ANSWERS[name].calls
            parts = parse(name, [answer])
            assert made(parts) == ("", [PARIS, ROME])
            if name not in OWN_IDS:
                assert [call.id for call in calls_of(parts)] == ["call_0", "call_1"]
            assert made(parse(name, [answer], parallel=False)) == ("", [PARIS])


def test_call_ids_of_the_model_are_kept() -> None:
    calls = TOOL_ANSWERS["kimi_k2"].calls
    first, rome = calls.split(":0", 1)
    parts = parse("kimi_k2", first + ":3" + rome.replace(":0", ":4"))
    own = ["functions.get_weather:3", "functions.get_weather:4"]
    assert [call.id for call in calls_of(parts)] == own
    twice = [call.id for call in calls_of(parse("kimi_k2", calls))]
    assert twice == ["functions.get_weather:0", "call_0"]  # ids are unique
    odd = [call.id for call in calls_of(parse("kimi_k2", calls.replace("functions.", "")))]
    assert odd == ["call_0", "call_1"]


def test_a_constant_id_from_a_grammar_is_replaced() -> None:
    twice = form_of("solar") * 2
    assert [call.id for call in calls_of(parse("solar", [twice]))] == ["call_0", "call_1"]


def test_a_call_may_be_a_single_tag() -> None:
    answer = '<function name="f"/>'
    for pieces in ([answer], answer, [answer * 2]):
        text, calls = made(parse("minicpm5", pieces))
        assert text == ""
        assert calls == [("f", {})] * "".join(pieces).count("/>")


def test_every_cut_gives_the_same_result(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            answer = TOOL_ANSWERS[name].calls
            if name not in AT_START:
                ended = "<|end|><|start|>assistant" * (name == "gpt_oss")
                answer = final(name, "First: ") + ended + answer
            whole = made(parse(name, [answer]))
            assert whole[1] == [PARIS, ROME]
            assert made(parse(name, answer)) == whole
            for at in range(len(answer)):
                assert made(parse(name, [answer[:at], answer[at:]])) == whole


def test_a_call_made_by_a_grammar_is_parsed(subtests: pytest.Subtests) -> None:
    """Parse JSON arguments, which a grammar produces for every family."""
    for name in NAMES:
        with subtests.test(name):
            one = form_of(name)
            assert made(parse(name, [one])) == ("", [PARIS])
            assert made(parse(name, one)) == ("", [PARIS])
            if name != "gpt_oss":  # its call ends the answer
                for between in ("", "\n"):
                    several = one + between + one.replace("Paris", "Rome")
                    assert made(parse(name, several)) == ("", [PARIS, ROME])


def test_a_call_cut_before_its_arguments_is_text(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            cut = TOOL_ANSWERS[name].cut
            text, calls = made(parse(name, cut))
            assert calls == []
            if name == "gpt_oss":  # its header says where a text goes, and is not text
                assert cut.endswith(text)
            else:
                assert text == cut


def test_the_written_part_of_a_cut_call_is_returned(subtests: pytest.Subtests) -> None:
    for name in [*TAGGED, "gpt_oss"]:
        with subtests.test(name):
            answer = TOOL_ANSWERS[name]
            cut = answer.calls[: answer.calls.rindex("Rome") + 2]
            for pieces in ([cut], cut):
                parts = parse(name, pieces, cut=True)
                assert made(parts) == ("", [PARIS, ("get_weather", '{"city": "Ro')])
                assert [call.cut for call in calls_of(parts)] == [False, True]
                ended = parse(name, pieces)  # not cut: complete JSON
                assert made(ended) == ("", [PARIS, ("get_weather", {"city": "Ro"})])
                assert not any(call.cut for call in calls_of(ended))


def test_a_cut_call_leaves_no_tag(subtests: pytest.Subtests) -> None:
    """Drop a call cut before the end of the tool's name; later, return it without arguments or with
    some."""
    for name in [*TAGGED, "gpt_oss"]:
        with subtests.test(name):
            family = tool_family(name)
            assert family is not None
            call = TOOL_ANSWERS[name].call
            given: list[str] = []
            opener = next((o for o in family.openers if call.startswith(o)), "")
            special = any(text in opener for text in family.special) or name == "gpt_oss"
            for at in range(len(opener) or len("<|channel|>"), len(call)):
                parts = parse(name, ["Hi.\n" * (name != "gpt_oss"), call[:at]], cut=True)
                text, calls = made(parts)
                assert text.strip() in ("Hi.", "") or not (special or calls)
                assert len(calls) <= 1
                given += [c.arguments for c in calls_of(parts)]
            assert given[0] == ""
            assert len(set(given)) > 4
            assert all(later.startswith(one) for one, later in pairwise(given))


def test_an_untagged_call_is_cut_once_its_arguments_begin(
    subtests: pytest.Subtests,
) -> None:
    """Also in fenced code, and if a message is addressed to the tool. Before its arguments, it is
    text."""
    one = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    wrapped = f'{{"tool_calls": [{one}]}}'
    rows = [(name, TOOL_ANSWERS[name].call) for name in sorted(AT_START)]
    rows += [(name, text) for name in ("hermes", "json") for text in (one, wrapped)]
    rows += [(name, f"```json\n{text}") for name, text in rows if name == "hermes"]
    rows += [("llama3_json", f"```json\n[{one}]"), ("llama3_json", TOOL_ANSWERS["pythonic"].call)]
    for name, call in rows:
        with subtests.test(name=name, call=call):
            begins = re.search(r'\(|(arguments|parameters)": ', call)
            assert begins is not None
            texts: list[str] = []
            for at in range(begins.end(), call.index("}" if "}" in call else ")")):
                for pieces in ([call[:at]], call[:at]):
                    parts = parse(name, pieces, cut=True)
                    [part] = calls_of(parts)
                    assert (text_of(parts), part.name, part.cut) == ("", "get_weather", True)
                    texts.append(part.arguments)
                assert not any(part.cut for part in calls_of(parse(name, call[:at])))
            assert all(later.startswith(one) for one, later in pairwise(texts))
            before = call[: begins.start()]
            assert made(parse(name, before, cut=True)) == (before, [])
    call = TOOL_ANSWERS["muse_glimmer"].call
    for at in range(call.index("<") + 1, call.rindex("</")):
        [part] = calls_of(parts := parse("muse_glimmer", call[:at], cut=True))
        is_cut = "</atem:invoke>" not in call[:at]
        assert (text_of(parts), part.name, part.cut) == ("", "get_weather", is_cut)


FORMS = [
    ("lfm2", '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]'
     "<|tool_call_end|>"),
    ("llama4_pythonic", '[{"name": "get_weather", "parameters": {"city": "Paris"}}]'),
    ("llama4_pythonic", '<|python_start|>get_weather(city="Paris")<|python_end|>'),
    ("json", '{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}]}'),
    ("generic", '```tool_code\nprint(get_weather(city="Paris"))\n```'),
    ("generic", '```tool_code\nget_weather(city="Paris")\n```\n'),
    ("kimi_k2", TOOL_ANSWERS["kimi_k2"].call.replace(":0", "")),
    ("llama3_json", '<|python_tag|>get_weather.call(city="Paris")'),
    ("llama3_json", '[print(get_weather(city="Paris"))]'),
]  # fmt: skip


def test_other_formats_that_models_write(subtests: pytest.Subtests) -> None:
    for name, answer in FORMS:
        with subtests.test(name=name, answer=answer):
            for pieces in ([answer], answer):
                assert made(parse(name, pieces)) == ("", [PARIS])


def test_fenced_code_without_a_call_is_text(subtests: pytest.Subtests) -> None:
    call = TOOL_ANSWERS["generic"].call
    code = f"```tool_code\nx = 1\n{call}\n```\nso"
    for before in ("", "So:\n"):
        for pieces in ([before + code + call], before + code + call):
            assert made(parse("generic", pieces)) == (before + code, [PARIS])
    inline = 'Write ```tool_code\nprint("x")\n```'
    for text in (inline, '{"tool_calls": []}', '{"tool_calls": {"a": [{"name": "f"}]}}'):
        with subtests.test(text=text):
            assert made(parse("generic", text)) == (text, [])


def test_a_final_opening_tag_is_text_unless_the_answer_was_cut(
    subtests: pytest.Subtests,
) -> None:
    for name in TAGGED:
        with subtests.test(name):
            family = tool_family(name)
            assert family is not None
            for opener in family.openers[: 1 if name == "kimi_k3" else None]:
                special = any(text in opener for text in family.special)
                text = f"Wrap it in {opener}"
                assert made(parse(name, text)) == (text, [])
                left = "Wrap it in " if special else text
                assert made(parse(name, text, cut=True)) == (left, [])
                assert made(parse(name, opener)) == ("" if special else opener, [])
                ordinary = f"To cache it, use {opener}"
                behind = TOOL_ANSWERS[name].call + ordinary
                assert made(parse(name, behind)) == (ordinary, [PARIS])
                if special:
                    ordinary = ordinary.removesuffix(f" {opener}")
                assert made(parse(name, behind, cut=True)) == (ordinary, [PARIS])


def test_a_call_in_fenced_code_is_text(subtests: pytest.Subtests) -> None:
    for name in TAGGED:
        with subtests.test(name):
            call = TOOL_ANSWERS[name].call
            quoted = "So:\n```\n" + call.replace("```", "~~~") + "\n```\nand "
            assert made(parse(name, [quoted + call])) == (quoted.rstrip(), [PARIS])
            assert made(parse(name, quoted + "so on")) == (quoted + "so on", [])


NO_FENCES = [
    "Quote it with ``` as you like.\n", "See ```x``` and ```` ``` ````:\n", "```sh -c``` ok\n",
    "````\n```\n````\n", "````\n```py\n`````  \n", "```\na ``` b\n```\n", "  ```py\nx\n  ```\n",
    "```\n```", "```\nx\n```py\n```\n", "`" * 5000 + "\n",
]  # fmt: skip


def test_backticks_that_open_no_fence_hide_no_call(subtests: pytest.Subtests) -> None:
    for before in NO_FENCES:
        with subtests.test(before=before):
            answer = before + TOOL_ANSWERS["hermes"].call
            assert made(parse("hermes", [answer])) == (before.rstrip(), [PARIS])
            assert made(parse("hermes", answer)) == (before.rstrip(), [PARIS])


def test_an_unclosed_fence_hides_a_call(subtests: pytest.Subtests) -> None:
    for before in ["```\n", "````md\n```\nx\n```\n", "```\n```py\n", "~\n ```\n x```\n"]:
        with subtests.test(before=before):
            answer = before + TOOL_ANSWERS["hermes"].call
            assert made(parse("hermes", [answer])) == (answer, [])
            assert made(parse("hermes", answer)) == (answer, [])


def test_an_untagged_call_must_begin_the_answer(subtests: pytest.Subtests) -> None:
    for name in sorted(AT_START):
        with subtests.test(name):
            call = TOOL_ANSWERS[name].call
            assert made(parse(name, "Like this: " + call)) == ("Like this: " + call, [])


def test_an_untagged_call_must_name_a_known_tool(subtests: pytest.Subtests) -> None:
    for name, text in product(
        sorted(AT_START), ['{"name": "Bob", "parameters": {}}', "[Bob(a=1)]"]
    ):
        with subtests.test(name=name, text=text):
            assert made(parse(name, [text])) == (text, [])
            assert made(parse(name, text + " and so on")) == (text + " and so on", [])


def test_an_untagged_call_after_spaces_does_not_depend_on_the_cut(
    subtests: pytest.Subtests,
) -> None:
    for name, num_spaces in product(sorted(AT_START), [MAX_SPACE - 1, MAX_SPACE, 3 * MAX_SPACE]):
        with subtests.test(name=name, num_spaces=num_spaces):
            text = " " * num_spaces + TOOL_ANSWERS[name].call
            whole = made(parse(name, [text]))
            assert made(parse(name, text)) == whole
            said, calls = whole
            if num_spaces < MAX_SPACE:
                assert calls
            else:
                assert (said, calls) == (text, [])


def test_a_json_answer_is_not_held_back(subtests: pytest.Subtests) -> None:
    for name in sorted(AT_START):
        with subtests.test(name):
            parser = make(name)
            assert text_of(parser.push('{"capital": ')) == '{"capital":'
            assert text_of(parser.push('"Paris"}') + parser.finish()) == ' "Paris"}'


TEXTS = "Hello!", "", " \n", "a < b and [1] {2}", "{}", "[]", "[1, 2]", '{"a": 1} is', "```x"


def test_text_without_calls_is_unchanged(subtests: pytest.Subtests) -> None:
    for name, text in product(NAMES, TEXTS):
        with subtests.test(name=name, text=text):
            assert made(parse(name, final(name, text))) == (text, [])


MALFORMED = {
    "hermes": [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"a": 1}</tool_call>',
        "<tool_call>[]",
    ],
    "qwen3_coder": [
        "<tool_call>hi</tool_call>",
        "<function=f>x</function>",
        "<function=" + "a" * 600,
    ],
    "seed_oss": ["<seed:tool_call>hi</seed:tool_call>", "<seed:tool_call>\n<function=f>x"],
    "glm45": ["<tool_call>two words</tool_call>", "<tool_call>f<arg_key>a</arg_key>b</tool_call>"],
    "mistral": ["[TOOL_CALLS] no json at all", "[TOOL_CALLS][1]", "[TOOL_CALLS]f[ARGS]x"],
    "gemma4": [
        "<|tool_call>call:f no brace<tool_call|>",
        "<|tool_call>call:f{a}<tool_call|>",
        "<|tool_call>call:f{a:|}<tool_call|>",
    ],
    "minimax_m2": ["<minimax:tool_call>x</minimax:tool_call>"],
    "kimi_k2": ["<|tool_calls_section_begin|>x<|tool_calls_section_end|>"],
    "deepseek_v3": [DS + "x" for DS in ("<｜tool▁calls▁begin｜>",)],
    "deepseek_dsml": ["<｜DSML｜tool_calls>x</｜DSML｜tool_calls>"],
    "phi4_mini_json": ["functools are fine", "<|tool_call|>x<|/tool_call|>", "functools[1]"],
    "llama3_json": ['{"name": "f", "parameters": 1} x', '{"name": 1, "parameters": {}}'],
    "llama4_pythonic": ["[f(1)]", "[f(a=x)]", "[g(a=1]", "[1 f()]"],
    "json": ['[{"name": "f"}]', '{"name": "g", "arguments": {}, "x": NaN}'],
}


def test_malformed_calls_are_text(subtests: pytest.Subtests) -> None:
    for name, texts in MALFORMED.items():
        for text in texts:
            with subtests.test(name=name, text=text):
                assert made(parse(name, [text])) == (text, [])
                assert made(parse(name, text)) == (text, [])


def test_a_call_after_malformed_ones(subtests: pytest.Subtests) -> None:
    for name in ("hermes", "qwen3_coder", "gemma4", "mistral"):
        with subtests.test(name):
            broken = "\n".join(MALFORMED[name][:1] + MALFORMED[name][-1:] * 2)
            answer = f"{broken}\n{TOOL_ANSWERS[name].call}"
            for pieces in ([answer], answer):
                assert made(parse(name, pieces)) == (broken, [PARIS])


def test_a_missing_bracket_hides_no_later_call(subtests: pytest.Subtests) -> None:
    """Keep a call of a known tool whose arguments have begun, marked as cut if they are incomplete;
    other malformed calls are text."""
    for name in ("hermes", "gemma4", "kimi_k2", "deepseek_v31"):
        with subtests.test(name):
            answer = TOOL_ANSWERS[name]
            at = answer.call.rindex("}")
            broken = answer.call[:at] + answer.call[at + 1 :]
            for between in ("", "\n"):
                whole = broken + between + answer.call.replace("Paris", "Rome")
                first = PARIS if name == "hermes" else (PARIS[0], '{"city": "Paris"')
                for pieces in ([whole], whole):
                    parts = parse(name, pieces)
                    assert made(parts) == ("", [first, ROME])
                    assert [call.cut for call in calls_of(parts)] == [first != PARIS, False]
                unknown = whole.replace("get_weather", "g", 1)
                text, calls = made(parse(name, unknown))
                assert (text, calls) == (broken.replace("get_weather", "g"), [ROME])


@pytest.mark.parametrize("between", ["", "\n", " and "])
def test_a_missing_brace_of_named_arguments_hides_no_later_call(between: str) -> None:
    broken = '{"a": [1, {"b": "}"}'
    whole = f'[TOOL_CALLS]f[ARGS]{broken}{between}[TOOL_CALLS]f[ARGS]{{"a": [1]}}'
    for pieces in ([whole], whole):
        calls = [("f", broken), ("f", {"a": [1]})]
        assert made(parse("mistral", pieces)) == (between.strip(), calls)
        text = whole.replace("f[", "g[", 1)
        given_back = "[TOOL_CALLS]g[ARGS]" + broken + between.rstrip()
        assert made(parse("mistral", [text])) == (given_back, calls[1:])


BROKEN = [
    ("llama4_pythonic", "[f(a=1] so", "so", '{"a": 1'),
    ("llama4_pythonic", "[f(a='x', b=y)]", "y)]", '{"a": "x"'),
    ("lfm2", '<|tool_call_start|>[f(a="x" + y)]', "+ y)]", '{"a": "x"'),
    ("json", '{"name": "f", "arguments": {}, "x": NaN} so', "so", "{}"),
    ("json", '{"name": "f", "arguments": {"a": [1, NaN]}} so', "NaN]}} so", '{"a": [1'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, , 2]}}', ", 2]}}", '{"a": [1'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, x', ', x', '{"a": 1}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "print("hi")"}}', 'hi")"}}',
     '{"a": "print("'),
    ("gpt_oss", TOOL_ANSWERS["gpt_oss"].call.replace('}', ' x}').replace("get_weather", "f"), "x}",
     '{"city": "Paris"'),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value>so", "so", '{"a": "b"'),
    ("qwen3_coder", "<function=f><parameter=a>b</parameter></function>so", "so", '{"a": "b"}'),
]  # fmt: skip


def test_a_started_call_ends_where_it_is_malformed(subtests: pytest.Subtests) -> None:
    """Mark it as cut, so that no client executes it."""
    for name, text, rest, arguments in BROKEN:
        with subtests.test(text=text):
            for pieces in ([text], text):
                parts = parse(name, pieces)
                assert text_of(parts) == rest
                is_cut = not arguments.endswith("}")
                assert [(c.name, c.arguments, c.cut) for c in calls_of(parts)] == [
                    ("f", arguments, is_cut)
                ]


def test_arguments_malformed_before_the_first_value_are_no_call(subtests: pytest.Subtests) -> None:
    texts = [
        f'<tool_call>{{"name":"f","arguments":{a}}}</tool_call>' for a in ('{"n": NaN}', "{x}")
    ]
    for name, text in [("hermes", text) for text in texts] + [("llama4_pythonic", "[f(s=name)]")]:
        with subtests.test(text=text):
            for pieces in ([text], text):
                assert made(parse(name, pieces)) == (text, [])


def test_only_cut_arguments_may_be_incomplete() -> None:
    for text in ("nope", "[1]", '{"a": 1}x', '{"a": [1', "NaN"):
        with pytest.raises(ValueError):
            arguments_object(text)
    assert arguments_object('{"a": [1, "b', cut=True) == {"a": [1]}
    assert arguments_object("", cut=True) == arguments_object("{}") == {}


TOLERATED = [
    ('{"a": """say "hi"\n\\"""x""", \'b\': \'\'\'it\'s\'\'\', "c": "", \'d\': \'\'}',
     '{"a": "say \\"hi\\"\\n\\"\\"\\"x", "b": "it\'s", "c": "", "d": ""}'),
    ("{'s': 'x<y', \"t\": 'it\\'s \"it\"'}", '{"s": "x<y", "t": "it\'s \\"it\\""}'),
    ('{"n": True, "a": [None, 1_000, 0x1F,],}', '{"n": true, "a": [null, 1000, 31]}'),
    ('{ "a" : 1.50 ,"b":\n[ 1e5 ,{}, [ ] ] }', '{ "a" : 1.50 ,"b":\n[ 1e5 ,{}, [ ] ] }'),
    ('{"a": "\\ud800 \\u12 \\ud83d\\ude00"}', '{"a": "\\\\ud800 \\\\u12 \\ud83d\\ude00"}'),
]  # fmt: skip


def test_json_in_other_notations_is_converted(subtests: pytest.Subtests) -> None:
    for written, arguments in TOLERATED:
        with subtests.test(written=written):
            text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
            for pieces in ([text], text):
                parts = parse("hermes", pieces)
                assert [c.arguments for c in calls_of(parts)] == [arguments]
                assert arguments_object(arguments) == json.loads(arguments)


def test_a_malformed_list_ends_a_call() -> None:
    schemas = ToolSchemas({"f": {"properties": {"a": {"type": "array"}}}})
    for value, read in (
        ("[1, 2", {"a": [1, 2], "b": "y"}), ("[1, 1_000]", {"a": [1, 1000], "b": "y"}),
        ("[1, x, 2]", '{"a": [1'), ("[1] + [2]", '{"a": [1]'),
    ):  # fmt: skip
        call = f"<function=f><parameter=a>{value}</parameter><parameter=b>y</parameter></function>"
        for pieces in ([call], call):
            parts = parse("qwen3_coder", pieces, schemas=schemas)
            assert made(parts)[1] == [("f", read)]
            assert [call.cut for call in calls_of(parts)] == [isinstance(read, str)]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_complete_calls_are_json(name: str) -> None:
    """Also for calls with random mistakes, and independent of the cut."""
    rng = random.Random(f"mistakes of {name}")
    schemas = ToolSchemas({"get_weather": {"properties": {"days": {"type": "array"}}}})
    num_calls = 0
    for _ in range(100):
        chars = list(TOOL_ANSWERS[name].calls)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(chars) - 1)
            match rng.randrange(3):
                case 0:
                    del chars[at]
                case 1:
                    chars.insert(at, chars[at])
                case _:
                    chars[at], chars[at + 1] = chars[at + 1], chars[at]
        parts = parse(name, ["".join(chars)], schemas=schemas)
        assert made(parse(name, chars, schemas=schemas)) == made(parts), "".join(chars)
        for call in calls_of(parts):
            assert isinstance(arguments_object(call.arguments, cut=call.cut), dict), "".join(chars)
            num_calls += 1
    assert num_calls > 50


def test_a_call_with_oversized_arguments_is_cut() -> None:
    parser = make("hermes")
    parts = parser.push('<tool_call>{"name": "f", "arguments": {"a": [1], "')
    for _ in range(2 * MAX_CALL_CHARS // (1 << 16)):
        parts += parser.push("x" * (1 << 16))
    parts += parser.finish()
    assert [(c.arguments, c.cut) for c in calls_of(parts)] == [('{"a": [1]', True)]


DEFINITION = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_a_tool_definition_is_not_a_call(subtests: pytest.Subtests) -> None:
    described = {"name": "get_weather", "description": "d", "parameters": DEFINITION}
    definitions = [
        {"type": "function", "function": described}, described,
        {"name": "get_weather", "strict": True}, {"name": "g", "parameters": DEFINITION},
        {"name": "get_weather", "parameters": DEFINITION},
    ]  # fmt: skip
    families = [family for name in NAMES if (family := tool_family(name)) is not None]
    num_families = 0
    for family, definition in product(families, definitions):
        begin = family.form.begin
        at = max(begin.find('{"name"'), begin.find('{"tool_name"'))
        if at < 0:
            continue
        num_families += definition is described
        end = family.form.end[1:]
        for tag in family.answer_tags:
            end = end.replace(tag, "")
        with subtests.test(family=family.name, definition=definition):
            text = begin[:at] + json.dumps(definition) + end
            for pieces in ([text], text):
                assert made(parse(family.name, pieces)) == (text, [])
    assert num_families > 20
    text = f"<tools>\n{json.dumps(definitions[0])}\n</tools>"
    assert made(parse("hermes", text)) == (text, [])


def test_arguments_may_have_the_names_of_schema_keywords() -> None:
    call = json.dumps({"name": "f", "parameters": DEFINITION})
    schemas = ToolSchemas({"f": {"properties": {"type": {}, "properties": {}}}})
    assert made(parse("hermes", call, schemas=schemas)) == ("", [("f", DEFINITION)])


def test_fenced_calls_followed_by_text_are_text(subtests: pytest.Subtests) -> None:
    one = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    fenced = f"```json\n{one}\n```"
    for name in ("hermes", "json", "generic", "llama3_json"):
        with subtests.test(name):
            both = f"{fenced}\n{fenced.replace('Paris', 'Rome')}\n"
            explained = f"{fenced}\nThis is how you would call it."
            for pieces in (list, lambda text: [text]):
                assert made(parse(name, pieces(fenced))) == ("", [PARIS])
                assert made(parse(name, pieces(both))) == ("", [PARIS, ROME])
                assert made(parse(name, pieces(explained))) == (explained, [])


AROUND = {
    "command_a": "<|START_RESPONSE|>TEXT<|END_RESPONSE|>",
    "kimi_k3": "<|open|>response<|sep|>TEXT<|close|>response<|sep|>",
    "solar": "<|content|>TEXT<|end|>",
    "muse_glimmer": " to=user<|message|>TEXT<|eot|>",
    "ernie45": "<response>\nTEXT\n</response>\n",
    "hunyuan_a13b": "<answer>\nTEXT\n</answer>\n",
}


def test_tags_around_a_text_are_removed(subtests: pytest.Subtests) -> None:
    """Remove them with and without tools or a structure; an incomplete tag is text."""
    for name, tags in AROUND.items():
        family, reasoning = tool_family(name), reasoning_family(name)
        for text, tools, structured in product(
            ('{"a": "<|"}', "a < b"), (family, None), (False, True)
        ):
            with subtests.test(name=name, text=text, tools=bool(tools), structured=structured):
                form = AnswerFormat(tools, reasoning, TOOLS, calls_first=structured)
                answer = tags.replace("TEXT", text)
                for pieces in ([answer], answer):
                    parser = form.parser()
                    assert parser is not None
                    parts = [part for piece in pieces for part in parser.push(piece)]
                    assert made(parts + parser.finish()) == (text, [])
                for at in range(1, answer.index(text)):
                    half = answer[:at]
                    parser = form.parser()
                    assert parser is not None
                    assert text_of(parser.push(half) + parser.finish()) in (half, half.lstrip(), "")


def test_tags_within_a_text_are_text(subtests: pytest.Subtests) -> None:
    """Keep tags in fenced code, in JSON strings and in quotes; remove tags after the text."""
    for name, tags in AROUND.items():
        family, reasoning = tool_family(name), reasoning_family(name)
        for text, tools, structured in product(
            (
                f"Use it so:\n```\n{tags}\n```",
                json.dumps({"a": f"{tags}x"}),
                f"The tags are `{tags}`.",
                f"```\n{tags}",
            ),
            (family, None),
            (False, True),
        ):
            form = AnswerFormat(tools, reasoning, TOOLS, calls_first=structured)
            is_open = text.startswith("```")
            answers = [text] if is_open else [text, tags.replace("TEXT", text)]
            for answer in answers:
                with subtests.test(name=name, answer=answer, tools=bool(tools)):
                    for pieces in ([answer], answer):
                        parser = form.parser()
                        assert parser is not None
                        parts = [part for piece in pieces for part in parser.push(piece)]
                        assert made(parts + parser.finish()) == (text, [])


def test_tags_before_a_call_are_removed(subtests: pytest.Subtests) -> None:
    for name, tags in AROUND.items():
        with subtests.test(name):
            tools = name if tool_family(name) else "hermes"
            form = AnswerFormat(tool_family(tools), reasoning_family(name), TOOLS)
            answer = f"{tags}\n{TOOL_ANSWERS[tools].call}{tags}"
            for pieces in ([answer], answer):
                parser = form.parser()
                assert parser is not None
                parts = [part for piece in pieces for part in parser.push(piece)]
                assert made(parts + parser.finish()) == ("TEXT\nTEXT", [PARIS])


def test_a_solar_message_before_calls_is_the_text() -> None:
    answer = f"Hi<|end|><|begin|>assistant<|tool_calls|>{TOOL_ANSWERS['solar'].call}<|calls|>"
    for pieces in ([answer], answer):
        assert made(parse("solar", pieces)) == ("Hi", [PARIS])


def test_the_prompt_of_functionary_ends_with_the_first_tag() -> None:
    call = TOOL_ANSWERS["functionary"].calls.removeprefix(">>>")
    for pieces in (list, lambda text: [text]):
        assert made(parse("functionary", pieces(call))) == ("", [PARIS, ROME])
        assert made(parse("functionary", pieces(f"all\nI look.>>>{call}"))) == (
            "I look.", [PARIS, ROME],
        )  # fmt: skip
        for text in ("allowed\n{}", "all of it\n", "g\n{}", "get_weather", "Hello\n{}"):
            assert made(parse("functionary", pieces(text))) == (text, [])


def test_a_value_may_be_cdata() -> None:
    for value in ("<a href='/x'>y</a></param>", "", "]]", "a\n"):
        for space in ("", "\n"):
            cdata = f"{space}<![CDATA[{value}]]>{space}"
            call = TOOL_ANSWERS["minicpm5"].call.replace("Paris", cdata)
            for pieces in ([call], call):
                expected = ("get_weather", {"city": value})
                assert made(parse("minicpm5", pieces)) == ("", [expected])


def minimax_m3(value: Any) -> str:
    """A value as the template of the model writes it."""
    mark = "]<]minimax[>["
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = [("item", item) for item in value]
    else:
        return value if isinstance(value, str) else json.dumps(value)
    return "".join(f"{mark}<{key}>{minimax_m3(one)}{mark}</{key}>" for key, one in pairs)


NESTED = {
    "properties": {
        "place": {"$ref": "#/$defs/Place"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        "matrix": {"type": "array"},
        "text": {"type": "string"},
    },
    "$defs": {
        "Place": {
            "properties": {"code": {"type": "string"}, "at": {"type": "array"}, "in": {"$ref": "#"}}
        }
    },
}


def test_nested_elements_in_an_argument(subtests: pytest.Subtests) -> None:
    place = {"code": "007", "at": [1.5, -2], "in": {"text": "1", "place": {"code": "1"}}}
    for name, value in [
        ("place", place), ("places", [place, place]), ("matrix", [[1, 2], ["a", True]]),
        ("other", {"a": {"b": [1, "x"]}}), ("text", f"{minimax_m3({'a': 1})} so"),
    ]:  # fmt: skip
        with subtests.test(name):
            call = TOOL_ANSWERS["minimax_m3"].call.replace("<city>Paris", f"<{name}>CITY")
            call = call.replace("</city>", f"</{name}>").replace("CITY", minimax_m3(value))
            for pieces in ([call], call):
                parts = parse("minimax_m3", pieces, schemas=ToolSchemas({"get_weather": NESTED}))
                assert made(parts) == ("", [("get_weather", {name: value})])
                assert sum(isinstance(part, ToolCallPart) for part in parts) > 2


def test_empty_elements_and_members_called_item() -> None:
    item = {"item": {"type": "string"}, "items": {"type": "array"}, "more": {"type": "object"}}
    order = {"type": "object", "properties": item}
    schemas = ToolSchemas({"get_weather": {"properties": {"order": order, "text": {}, **item}}})
    for written, value in [
        ({"order": {"item": "a", "items": ["b"]}}, None),
        ({"order": {"item": "a", "items": "", "more": " \n"}},
         {"order": {"item": "a", "items": [], "more": {}}}),
        ({"items": "", "more": "", "text": "", "item": ""},
         {"items": [], "more": {}, "text": "", "item": ""}),
    ]:  # fmt: skip
        city = minimax_m3({"city": "Paris"})
        call = TOOL_ANSWERS["minimax_m3"].call
        assert city in call
        call = call.replace(city, minimax_m3(written))
        for pieces in ([call], call):
            parts = parse("minimax_m3", pieces, schemas=schemas)
            assert made(parts) == ("", [("get_weather", value or written)])


def test_deeply_nested_elements_take_linear_time() -> None:
    deep = "]<]minimax[>[<a>" * 20_000
    call = TOOL_ANSWERS["minimax_m3"].call.replace("Paris", deep)
    began = process_time()
    for pieces in ([call], call):
        parts = parse("minimax_m3", pieces)
        [part] = calls_of(parts)
        assert (part.name, part.cut) == ("get_weather", True)
        assert call.endswith(text_of(parts))
        assert isinstance(arguments_object(part.arguments, cut=True), dict)
    assert process_time() - began < 10


def test_an_argument_without_a_name_is_no_call() -> None:
    call = TOOL_ANSWERS["kimi_k3"].call
    nameless = call.replace('key="city" ', "").replace(' key="city"', "")
    assert nameless != call
    text, calls = made(parse("kimi_k3", nameless))
    assert calls == []
    assert text


def test_invalid_escapes_are_escaped() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "\\d\\u00e9\\\n\\"}}</tool_call>'
    value = "\\dé\\\n" + '"}}</tool_call>'
    parts = parse("hermes", call)
    assert made(parts) == made(parse("hermes", [call]))
    assert json.loads(calls_of(parts)[0].arguments) == {"a": value}


def test_a_call_of_an_unknown_function_is_returned() -> None:
    """Leave the error to the client, as vLLM does."""
    assert made(parse("hermes", TOOL_ANSWERS["hermes"].call)) == ("", [PARIS])


def test_oversized_literals_are_no_complete_call() -> None:
    deep = f"[f(a={'[' * 100}{']' * 100})]"
    assert made(parse("llama4_pythonic", [deep])) == (deep, [])
    call = f"[f(a=[{'1,' * 5000}1])]"
    text, [(name, arguments)] = made(parse("llama4_pythonic", [call]))
    assert name == "f"
    assert call.endswith(text)
    assert len(text) > 30
    assert len(arguments) < 3 * MAX_VALUES + 10
    unknown = call.replace("f", "g", 1)
    assert made(parse("llama4_pythonic", [unknown])) == (unknown, [])


LITERALS = [
    ("'it\\'s'", "it's"), ('"a\\n\\x41\\u00e9\\q"', "a\nA\u00e9\\q"), ("-1.5e3", -1500.0),
    ("(1, 2,)", [1, 2]), ("(5)", 5), ("('a'\n 'b')", "ab"), ("{'a': (1), 'b': (1,), 'c': ()}",
                                                        {"a": 1, "b": [1], "c": []}),
    ("((1), (2, (3)))", [1, [2, 3]]),
    ("{'a': None, 'b': [True]}", {"a": None, "b": [True]}), ("{}", {}), ("false", False),
    ("'" + "\\ud800" + "'", "\\ud800"), (r"['\ud83d\ude00']", ["\U0001f600"]), ("['']", [""]),
    ('"""say "hi"\n""\\""""', 'say "hi"\n"""'), ("'''it's'''", "it's"),
    (r'r"C:\new\""', r'C:\new\"'), ('"a" \'b\'\n r"c"', "abc"), ('{"a": "b" "c"}', {"a": "bc"}),
]  # fmt: skip
TYPE_NAMES = "array", "object", "number", "boolean", "null"


def test_python_literals(subtests: pytest.Subtests) -> None:
    for text, value in LITERALS:
        with subtests.test(text=text):
            call = f"[f(a={text})]"
            assert made(parse("llama4_pythonic", call)) == ("", [("f", {"a": value})])


def test_invalid_literals_are_text(subtests: pytest.Subtests) -> None:
    schemas = ToolSchemas({"f": {"properties": {"a": {"type": list(TYPE_NAMES)}}}})
    for text in ["", "x", "1 2", "[1", "{1: 2}", "{'a' 1}", "'a", "[,]", "nan", "[1] x"]:
        with subtests.test(text=text):
            assert schemas.call("f").typed("a", text) == text


def test_double_encoded_arguments_are_decoded() -> None:
    call = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert made(parse("hermes", [call])) == ("", [("f", {"a": 1})])


def test_empty_arguments_are_an_empty_object() -> None:
    for arguments in ('""', '" "', "null", "{}"):
        call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        assert made(parse("hermes", [call])) == ("", [("f", {})])


def test_bare_line_breaks_in_strings() -> None:
    code = 'a = "x\\"\n\tb\x00'
    quoted = code.replace("\\", "\\\\").replace('"', '\\"')
    call = f'<tool_call>\n{{"name": "f",\n"arguments": {{"code": "{quoted}"}}}}\n</tool_call>'
    assert made(parse("hermes", [call])) == ("", [("f", {"code": code})])
    for text in ('{"a": "\n', '{"a": "\n\\', '{"a": "\n" "b"}', "{\n"):
        with pytest.raises(Malformed):
            json_value(text)
    began = process_time()
    with pytest.raises(Malformed):
        json_value('{"\n' + '\\"' * 500_000)
    assert process_time() - began < 5


END_TAGS = [
    ("hermes", ["\n</tool_call>"]), ("qwen3_coder", ["\n</tool_call>"]),
    ("seed_oss", ["\n</seed:tool_call>"]),
    ("glm45", []), ("gemma4", ["<tool_call|>"]), ("phi4_mini_json", []),
    ("kimi_k2", ["<|tool_calls_section_end|>", "<|tool_call_end|>"]),
    ("deepseek_v3", ["<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "```"]),
    ("deepseek_v31", ["<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"]),
    ("minimax_m2", ["\n</minimax:tool_call>"]),
    ("deepseek_dsml", ["\n</｜DSML｜function_calls>"]),
]  # fmt: skip


def test_a_call_whose_end_tag_is_cut_off(subtests: pytest.Subtests) -> None:
    for (name, ends), cut in product(END_TAGS, (True, False)):
        with subtests.test(name=name, cut=cut):
            call = "One." + TOOL_ANSWERS[name].call
            for end in ends:
                for at in range(call.rindex(end), len(call)):
                    assert made(parse(name, call[:at], cut=cut)) == ("One.", [PARIS])
                call = call[: call.rindex(end)].rstrip()
            made_json = "One." + form_of(name)
            for at in range(made_json.rindex("}") + 1, len(made_json)):
                assert made(parse(name, made_json[:at], cut=cut)) == ("One.", [PARIS])


def form_of(name: str) -> str:
    """A call as a grammar produces it."""
    family = tool_family(name)
    assert family is not None
    return family.form.begin.replace("NAME", "get_weather") + '{"city": "Paris"}' + family.form.end


def test_a_value_ends_at_a_closing_tag_before_another_tag(subtests: pytest.Subtests) -> None:
    values = "x", "a</parameter> b", "a</parameter></parameter> c", "a</parameter>\n\nb"
    for newline, gap, value in product(("", "\n"), ("", "\n", "\n\n", " \n \n  "), values):
        with subtests.test(newline=newline, gap=gap, value=value):
            one = f"<parameter=a>{newline}{value}{newline}</parameter>{gap}"
            two = one + one.replace("=a", "=b")
            call = f"<tool_call>\n<function=f>\n{two}</function>\n</tool_call>"
            assert made(parse("qwen3_coder", [call])) == ("", [("f", {"a": value, "b": value})])
            assert made(parse("qwen3_coder", call)) == ("", [("f", {"a": value, "b": value})])


SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "code": {"type": "string"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/Place"},
        "mode": {"enum": ["1", "2"]},
        "as_count": {"$ref": "#/properties/count"},
        "odd": {"$ref": "#/$defs/a~1b~0c"},
        "spaced": {"$ref": "#/$defs/a%20b"},
        "second": {"$ref": "#/properties/maybe/anyOf/0"},
        "far": {"$ref": "#/properties/maybe/anyOf/7"},
        "both": {"type": "boolean", "$ref": "#/$defs/Tree"},
        "five": {"const": 5},
        "object": {"properties": {"x": {}}},
        "list": {"items": {}},
        "mixed": {"type": ["string", "integer", "array"]},
        "tree": {"$ref": "#/$defs/Tree"},
    },
    "$defs": {
        "Place": {"type": "object"},
        "a/b~c": {"type": "boolean"},
        "a b": {"type": "null"},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Trees"}, {"type": "integer"}]},
        "Trees": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "array"}]},
    },
}


TYPED = [
    ("count", "7", 7), ("count", " 7\n", 7), ("count", "seven", "seven"),
    ("code", "007", "007"), ("code", "true", "true"), ("maybe", "null", None),
    ("maybe", "3", 3), ("mode", "1", "1"),
    ("place", '{"x": 1}', {"x": 1}), ("place", "{'x': True}", {"x": True}), ("other", "1", "1"),
    ("as_count", "7", 7), ("odd", "true", True), ("spaced", "None", None), ("second", "7", 7),
    ("far", "7", "7"), ("tree", "[1]", [1]), ("tree", "1", 1), ("tree", "true", "true"),
    ("both", "true", True), ("both", "1", 1), ("five", "5", 5), ("object", '{"x": 1}', {"x": 1}),
    ("list", "[1]", [1]), ("mixed", "007", "007"), ("mixed", "1_000", "1_000"), ("mixed", "7", 7),
    ("mixed", "['a']", ["a"]), ("mixed", r"['\ud83d\ude00']", ["\U0001f600"]),
]  # fmt: skip


def test_values_are_typed_by_the_schema(subtests: pytest.Subtests) -> None:
    for name, text, value in TYPED:
        with subtests.test(name=name, text=text):
            call = ToolSchemas({"f": SCHEMA}).call("f")
            call.typed("both", "1")  # the values of other arguments do not change it
            assert call.typed(name, text) == value
            one = f"<function=f><parameter={name}>{text}</parameter></function>"
            whole = f"<tool_call>{one}</tool_call>"
            parts = parse("qwen3_coder", [whole], schemas=ToolSchemas({"f": SCHEMA}))
            if not text.endswith("\n"):
                assert made(parts) == ("", [("f", {name: value})])


def test_arguments_are_typed_by_all_schemas_of_the_tool(subtests: pytest.Subtests) -> None:
    """Use referenced and combined schemas; other arguments have the type of additional
    properties."""
    count = {"properties": {"count": {"type": "integer"}}}
    for schema, key in [
        ({"$ref": "#/$defs/A", "$defs": {"A": count}}, "count"),
        ({"type": "object", "allOf": [{"properties": {}}, count]}, "count"),
        ({"anyOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": count}}, "count"),
        ({"properties": {}, "additionalProperties": {"type": "integer"}}, "other"),
        ({"allOf": [{"additionalProperties": {"type": "integer"}}]}, "other"),
        ({"anyOf": [count, {"properties": {"count": {"type": "string"}}}]}, "count"),
        ({"allOf": [{"properties": {"count": {"minimum": 0}}}, count]}, "count"),
    ]:  # fmt: skip
        with subtests.test(schema=schema):
            schemas = ToolSchemas({"get_weather": schema})
            assert schemas.knows("get_weather", key)
            for name in ("qwen3_coder", "glm45", "minimax_m2", "step3"):
                call = TOOL_ANSWERS[name].call.replace("city", key).replace("Paris", "5")
                assert made(parse(name, call, schemas=schemas)) == ("", [("get_weather", {key: 5})])


def test_invalid_schemas_type_nothing(subtests: pytest.Subtests) -> None:
    for schema in [None, {}, {"properties": 1}, {"properties": {"a": {"$ref": 1}}}]:
        with subtests.test(schema=schema):
            assert ToolSchemas({"f": schema}).call("f").typed("a", "1") == "1"


def test_recursive_schemas_are_cheap() -> None:
    """Each of many arguments is a choice of choices of itself; resolved in place they would be 4
    million schemas."""
    a = {"anyOf": [{"anyOf": [{"$ref": "#/$defs/A"}] * 8}] * 8}
    own = {f"own{n}": a for n in range(1900)}
    referring = {f"a{n}": {"$ref": "#/$defs/A"} for n in range(1900)}
    schemas = ToolSchemas({"f": {"properties": own | referring, "$defs": {"A": a}}})
    started = process_time()
    for name in own | referring:
        assert schemas.call("f").typed(name, "1") == "1"
    assert process_time() - started < 0.25


def test_schemas_share_one_budget_and_keep_earlier_results() -> None:
    big = {f"b{n}": {"anyOf": [{"type": "object"}] * 32} for n in range(100)}
    schemas = ToolSchemas({"f": SCHEMA, "g": {"properties": big}})
    assert schemas.call("f").typed("count", "1") == 1
    assert schemas.call("g").typed("b0", "{}") == {}
    assert [schemas.call("g").typed(name, "{}") for name in big][-1] == "{}"
    assert schemas.call("f").typed("count", "1") == 1
    assert schemas.call("f").typed("place", "{}") == "{}"


def test_the_values_of_a_call_share_one_budget() -> None:
    schemas = ToolSchemas({"f": {"properties": {"a": {"type": "array"}}}})
    text = "[" + "'x'," * 1500 + "]"
    call = schemas.call("f")
    assert call.typed("a", text) == ["x"] * 1500
    assert call.typed("a", text) == text
    assert schemas.call("f").typed("a", text) == ["x"] * 1500


PIECES = st.sampled_from(
    [piece for a in TOOL_ANSWERS.values() for piece in (a.call, a.cut, a.call[:9], a.call[-9:])]
    + ["```", "\n", " ", "{", "}", '"', "\\", "[", "]", "<", "|", "functools", "to=", "<|end|>"]
)


@settings(max_examples=120)
@given(st.lists(st.text(max_size=8) | PIECES, max_size=12))
def test_no_character_is_lost_without_a_call(pieces: list[str]) -> None:
    text = "".join(pieces)
    for name in NAMES:
        parts = parse(name, pieces)
        given_back, calls = made(parts)
        assert made(parse(name, [text])) == (given_back, calls)
        if name == "gpt_oss":
            continue  # its tags are not text
        family = tool_family(name)
        assert family is not None
        if not calls and any(tag in text for tag in family.answer_tags):
            body = given_back.strip()
            tags = "|".join(
                map(re.escape, (*family.answer_tags, *([] if body else family.openers)))
            )
            around = rf"(?:\s|{tags})*"
            assert re.fullmatch(around + re.escape(body) + around, text)
        elif not calls:
            left_out = text.removeprefix(given_back)
            assert given_back + left_out == text
            assert left_out.strip() in ("", *([] if given_back.strip() else family.openers))
        else:
            remaining = iter(text)
            assert all(char in remaining for char in given_back)


def test_harmony_calls_separated_by_white_space() -> None:
    """Parse calls as a grammar lets a model write them: without <|call|>, which ends an answer."""
    call = TOOL_ANSWERS["gpt_oss"].call
    for space in ("", "\n \u3000"):
        text = call + space + call.replace("Paris", "Rome")
        for end, rest in (("", ""), ("<|call|>", ""), (final("gpt_oss", "Hi"), "Hi")):
            for pieces in ([text + end], text + end):
                assert made(parse("gpt_oss", pieces)) == (rest, [PARIS, ROME])


def test_harmony_messages() -> None:
    """Treat a message to a built-in tool during thinking as thought, and put two texts on two
    lines."""
    thought = "<|channel|>analysis to=python code<|message|>print(1)<|call|><|start|>assistant"
    first = "<|channel|>commentary<|message|>One.<|end|><|start|>assistant"
    parts = parse("gpt_oss", thought + first + final("gpt_oss", "Two."))
    assert (reasoning_of(parts), text_of(parts)) == ("print(1)", "One.\nTwo.")


@settings(max_examples=100)
@given(st.text(), st.lists(st.integers(0, 60), max_size=8))
def test_harmony_keeps_the_text_of_messages(text: str, cuts: list[int]) -> None:
    answer = f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant" + final(
        "gpt_oss", text
    )
    borders = [0, *sorted(cuts), len(answer)]
    pieces = [answer[a:b] for a, b in pairwise(borders)]
    parts = parse("gpt_oss", pieces)
    assert (reasoning_of(parts), text_of(parts)) == (text, text)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_answers_take_linear_time(name: str, subtests: pytest.Subtests) -> None:
    family = tool_family(name)
    assert family is not None
    opener = family.openers[0] if family.openers else ""
    for unit in ("OPENER", "OPENER{", 'OPENER{"', "```", " ", "[", '{"a":', "<", "\\"):
        with subtests.test(unit=unit):
            text = unit.replace("OPENER", opener) * 1500
            began = process_time()
            pieces = [text[at : at + 8] for at in range(0, len(text), 8)]
            content = parse(name, pieces)
            assert process_time() - began < 5  # quadratic time would take longer
            assert calls_of(content) == []


def test_marks_in_a_long_text_take_linear_time() -> None:
    """Pass the text in one piece; cover text that is parsed again because it is not a call."""
    for begin in ("", '```json\n{"name": "f", "arguments": {"a": "'):
        began = process_time()
        text = begin + "`a " * 100_000
        assert text_of(parse("hermes", [text])).strip() == text.strip()
        assert process_time() - began < 10  # quadratic time would take minutes


def test_a_hostile_header_takes_linear_time() -> None:
    began = process_time()
    for gap in (" " * 1000, " to=" * 250, "<|channel|> " * 80):
        header = "<|channel|>" + gap + "!"
        assert made(parse("gpt_oss", [header + "<|end|>"]))[1] == []
        assert made(parse("gpt_oss", [header]))[1] == []
    assert process_time() - began < 5  # trying every division would take hours


@pytest.mark.extended
def test_held_text_is_not_copied_for_each_piece() -> None:
    """Emit a call of an unknown tool as a whole, and fenced calls at the end of the answer."""
    value = "x" * 1_000_000
    calls = [
        ("hermes", TOOL_ANSWERS["hermes"].call), ("qwen3_coder", TOOL_ANSWERS["qwen3_coder"].call),
        ("json", f"```json\n{GENERIC_CALLS[0]}\n```"),
    ]  # fmt: skip
    for name, call in calls:
        schemas = TOOLS if "```" in call else ToolSchemas()
        text = call.replace("Paris", value)
        pieces = [text[at : at + 8] for at in range(0, len(text), 8)]
        began = process_time()
        parts = parse(name, pieces, schemas=schemas)
        assert process_time() - began < 4  # copies of 60 GB would take longer
        assert made(parts) == ("", [("get_weather", {"city": value})])


def test_the_memory_of_an_endless_call_is_bounded() -> None:
    parser = make("hermes")
    head = '<tool_call>{"name": "'
    text = text_of(parser.push(head))
    piece = "x" * (1 << 16)
    num_pieces = 2 * MAX_CALL_CHARS // len(piece)
    for _ in range(num_pieces):
        text += text_of(parser.push(piece))
    assert len(text) > MAX_CALL_CHARS
    text += text_of(parser.finish())
    assert text == head + piece * num_pieces


GENERIC_CALLS = [
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    '\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_call>',
    '<tool_call>{"name": "get_weather", "parameters": {"city": "Paris"}}',
]


def test_generic_calls_as_small_models_write_them(subtests: pytest.Subtests) -> None:
    for answer in GENERIC_CALLS:
        with subtests.test(answer=answer):
            assert made(parse("generic", answer))[1] == [PARIS]
