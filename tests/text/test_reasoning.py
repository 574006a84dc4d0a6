"""Parsers of reasoning, one for the tags of each family."""

from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text import AnswerFormat, ContentPart, calls_of, reasoning_of, text_of
from pdserve.text.parsing import ToolSchemas
from pdserve.text.parsing.reasoning_stream import MAX_SPACE
from pdserve.text.reasoning import reasoning_family, reasoning_family_of, reasoning_parser_names
from pdserve.text.tool_parsers import tool_family

NAMES = reasoning_parser_names()
MESSAGES = {"gpt_oss", "muse_glimmer", "solar"}  # a thought is a message before the answer's
TAGGED = sorted(set(NAMES) - MESSAGES)
TEMPLATES = {
    "think": "{{ content.split('</think>') }}",
    "seed_oss": "<seed:think>{{ reasoning }}</seed:think>",
    "mistral": "[THINK]{{ reasoning }}[/THINK]",
    "apriel": "Here are my reasoning steps: {{ reasoning }}[BEGIN FINAL RESPONSE]",
    "kimi_k3": "<|open|>think<|sep|>",
    "ernie45": "<think>{{ reasoning }}</think><response>{{ content }}</response>",
    "hunyuan_a13b": "<think>{{ reasoning }}</think><answer>{{ content }}</answer>",
    "hy3": "<think{}> and </think{}>",
    "solar": "assistant<|think|>{{ reasoning }}<|end|><|begin|>assistant<|content|>",
    "muse_glimmer": "assistant to=self<|message|>{{ reasoning }}<|eom|>",
    "minimax_m3": "<mm:think>{{ reasoning }}</mm:think>",
    "command_a": "<|START_THINKING|>{{ reasoning }}<|END_THINKING|>",
    "apertus": "<|inner_prefix|>{{ reasoning }}<|inner_suffix|>",
    "gemma4": "<|channel>thought\n<channel|>",
    "gpt_oss": "<|start|>assistant<|channel|>final<|message|>",
}


def tags(name: str) -> tuple[str, str]:
    family = reasoning_family(name)
    assert family is not None
    return family.begin, family.end


def parse(
    name: str,
    pieces: Iterable[str],
    *,
    opened: bool = False,
    inline: bool = False,
    tools: str = "",
    schemas: ToolSchemas | None = None,
) -> tuple[str, str]:
    """The thought and the answer of the given pieces."""
    calls = tool_family(tools)
    schemas = schemas or ToolSchemas()
    form = AnswerFormat(calls, reasoning_family(name), schemas, open=opened, inline=inline)
    parser = form.parser()
    assert parser is not None
    content: list[ContentPart] = [part for piece in pieces for part in parser.push(piece)]
    content += parser.finish()
    assert len(calls_of(content)) == (1 if tools else 0)
    return reasoning_of(content), text_of(content)


def test_every_family_is_in_the_table() -> None:
    assert set(TEMPLATES) == set(NAMES)
    assert reasoning_family("none") is None
    assert reasoning_family_of("{{ messages }}") == ""


def test_family(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            family = reasoning_family(name)
            assert family is not None
            assert family.name == name
            assert reasoning_family_of(TEMPLATES[name]) == name


def test_thought_and_answer(subtests: pytest.Subtests) -> None:
    for name, opened in product(TAGGED, (False, True)):
        with subtests.test(name=name, opened=opened):
            begin, end = tags(name)
            answer = ("" if opened else begin) + f"\nI think,\n so.\n{end}\n\nHello,\n you. "
            expected = ("I think,\n so.", "Hello,\n you. ")
            assert parse(name, [answer], opened=opened) == expected
            assert parse(name, answer, opened=opened) == expected
            for at in range(len(answer)):
                assert parse(name, [answer[:at], answer[at:]], opened=opened) == expected


def test_an_opening_tag_may_repeat_the_end_of_the_prompt(subtests: pytest.Subtests) -> None:
    for name in TAGGED:
        with subtests.test(name):
            begin, end = tags(name)
            assert parse(name, f"{begin}\nso{end}Hi", opened=True) == ("so", "Hi")


def test_an_unclosed_thought_extends_to_the_end(subtests: pytest.Subtests) -> None:
    for name in TAGGED:
        with subtests.test(name):
            begin, end = tags(name)
            for cut in ("", end[:3]):
                thought = "I think" + cut
                assert parse(name, begin + thought) == (thought, "")
                assert parse(name, thought, opened=True) == (thought, "")


def test_a_model_that_never_thinks_answers(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            assert parse(name, "Hello!\n") == ("", "Hello!\n")
            assert parse(name, "") == ("", "")
            assert parse(name, " ") == ("", " ")
            assert parse(name, "<th") == ("", "<th")


def test_a_thought_after_spaces_does_not_depend_on_the_cut(subtests: pytest.Subtests) -> None:
    counts = MAX_SPACE - 2, MAX_SPACE, MAX_SPACE + 1, 3 * MAX_SPACE
    for name, num_spaces in product(TAGGED, counts):
        with subtests.test(name=name, num_spaces=num_spaces):
            begin, end = tags(name)
            text = " " * num_spaces + f"{begin}so{end}Hi"
            expected = ("so", "Hi") if num_spaces <= MAX_SPACE else ("", text)
            assert parse(name, [text]) == expected
            assert parse(name, text) == expected


def test_a_quoted_tag_in_an_answer_is_text(subtests: pytest.Subtests) -> None:
    for name in TAGGED:
        with subtests.test(name):
            begin, end = tags(name)
            answer = f"Write {begin} and {end}."
            assert parse(name, answer) == ("", answer)
            assert parse(name, f"{begin}x{end}{answer}") == ("x", answer)


def test_an_answer_may_begin_with_a_stray_closing_tag(subtests: pytest.Subtests) -> None:
    for name in TAGGED:
        with subtests.test(name):
            _, end = tags(name)
            for pieces in ([f"{end}\nHi"], f"{end}\nHi"):
                assert parse(name, pieces) == ("", "Hi")
            assert parse(name, end[:-1]) == ("", end[:-1])


def test_an_empty_thought_is_dropped(subtests: pytest.Subtests) -> None:
    for name in TAGGED:
        with subtests.test(name):
            begin, end = tags(name)
            assert parse(name, f"{begin}\n\n{end}\n\nHi") == ("", "Hi")
            assert parse(name, f"\n{end}\nHi", opened=True) == ("", "Hi")


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
KNOWN = ToolSchemas({"f": None})


def test_a_call_in_a_thought_is_text(subtests: pytest.Subtests) -> None:
    for name, schemas in product(TAGGED, (ToolSchemas(), KNOWN)):
        with subtests.test(name):
            begin, end = tags(name)
            answer = f"{begin}I could {CALL} or so{end}{CALL}"
            for pieces in ([answer], answer):
                found = parse(name, pieces, tools="hermes", schemas=schemas)
                assert found == (f"I could {CALL} or so", "")


def test_a_complete_call_ends_an_unclosed_thought(subtests: pytest.Subtests) -> None:
    for name, behind in product(TAGGED, ("", "\n")):
        with subtests.test(name=name, behind=behind):
            begin, _ = tags(name)
            answer = f"{begin}I will.\n{CALL}{behind}"
            for pieces in ([answer], answer):
                found = parse(name, pieces, tools="hermes", schemas=KNOWN)
                assert found == ("I will.", "")


EXAMPLES = [  # thought, number of calls, whether cut
    (f"The format is {CALL}, but first I must think about", 0, True),
    (f"The format is {CALL}. So.", 0, False),
    (f"The format is {CALL}. So:\n{CALL}", 1, False),
    (f"So:\n{CALL}\n{CALL}", 2, True),
    (f"So:\n{CALL}\n{CALL[:-15]}", 2, True),
    (f"So:\n{CALL[:-15]}", 0, True),
    (f"So:\n{CALL}" + "`a" * 100_000, 0, True),
]


def test_calls_end_an_open_thought_only_if_nothing_follows(subtests: pytest.Subtests) -> None:
    for name, (thought, num_calls, cut) in product(TAGGED, EXAMPLES):
        with subtests.test(name=name, thought=thought[:100]):
            begin, _ = tags(name)
            small = [thought] if len(thought) > 1000 else list(thought)
            for pieces in ([thought], small):
                form = AnswerFormat(tool_family("hermes"), reasoning_family(name), KNOWN)
                parser = form.parser()
                assert parser is not None
                content = [part for piece in (begin, *pieces) for part in parser.push(piece)]
                content += parser.finish(cut=cut)
                assert len(calls_of(content)) == num_calls
                assert text_of(content) == ""
                first = thought.rindex(":\n") + 1 if num_calls else len(thought)
                assert reasoning_of(content).rstrip() == thought[:first].rstrip()


def test_text_other_than_a_complete_call_ends_no_thought(subtests: pytest.Subtests) -> None:
    other = CALL.replace('"f"', '"g"')
    fenced = f"```\n{CALL}\n```"
    for name, text in product(TAGGED, (other, CALL[:-20], "<tool_call>", fenced, f"so {other} so")):
        with subtests.test(name=name, text=text):
            begin, _ = tags(name)
            for pieces in ([begin + text], begin + text):
                form = AnswerFormat(tool_family("hermes"), reasoning_family(name), KNOWN)
                parser = form.parser()
                assert parser is not None
                content = [part for piece in pieces for part in parser.push(piece)]
                content += parser.finish()
                assert (reasoning_of(content), text_of(content)) == (text, "")
                assert not calls_of(content)


def test_thoughts_as_text_keep_their_tags(subtests: pytest.Subtests) -> None:
    for name in TAGGED:
        with subtests.test(name):
            begin, end = tags(name)
            expected = f"{begin}\nso\n{end}\n\nHi"
            assert parse(name, f"{begin}so{end}Hi", inline=True) == ("", expected)
            assert parse(name, "Hi", inline=True) == ("", "Hi")


HARMONY = (
    "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I look.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
)


@pytest.mark.parametrize("end", ["", "<|return|>", "<|end|>"])
def test_harmony(end: str) -> None:
    for pieces in ([HARMONY + end], HARMONY + end):
        assert parse("gpt_oss", pieces) == ("So.", "I look.\nHi")
    assert parse("gpt_oss", HARMONY, inline=True)[1] == "<think>\nSo.\n</think>\n\nI look.\nHi"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("gpt_oss", "<|channel|>commentary to=assistant<|channel|>analysis<|message|>So.<|end|>"
         "<|start|>assistant<|channel|>final<|message|>Hi"),
        ("solar", "<|think|>So.<|end|><|begin|>assistant<|content|>Hi<|end|>"),
        ("muse_glimmer",
         " to=self<|message|>So.<|eom|><|start|>assistant to=user<|message|>Hi<|eot|>"),
    ],
)  # fmt: skip
def test_thoughts_that_are_messages(name: str, answer: str) -> None:
    for pieces in ([answer], answer):
        assert parse(name, pieces) == ("So.", "Hi")


def test_several_messages_to_itself_are_one_thought() -> None:
    start = "<|eom|><|start|>assistant"
    thoughts = f"to=self<|message|>So.{start} to=self<|message|>More.{start}"
    answer = f"{thoughts} to=user<|message|>Hi"
    for pieces in ([answer], answer):
        assert parse("muse_glimmer", pieces) == ("So.\nMore.", "Hi")
    assert parse("muse_glimmer", thoughts) == ("So.\nMore.", "")


def test_the_first_tag_of_an_answer_ends_an_unclosed_thought() -> None:
    answer = "So.<|open|>response<|sep|>Hi<|close|>response<|sep|>"
    for pieces in ([answer], answer):
        assert parse("kimi_k3", pieces, opened=True) == ("So.", "Hi")


def test_a_call_is_text_without_tools() -> None:
    assert parse("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{}") == ("", "{}")


def test_malformed_harmony_is_an_answer() -> None:
    assert parse("gpt_oss", '{"a": "<|end|>"}') == ("", '{"a": "<|end|>"}')


def test_text_of_a_broken_header_is_kept() -> None:
    broken = '<|channel|>final {"a": 1}'
    assert parse("gpt_oss", broken) == ("", 'final {"a": 1}')
    assert parse("gpt_oss", "<|channel|>" + "x" * 3000)[1].endswith("x" * 3000)


PIECES = ["<think>", "</think>", "<", "think", "\n", " ", "[THINK]", "[/THINK]", "<channel|>"]


@settings(max_examples=300)
@given(st.lists(st.text(max_size=6) | st.sampled_from(PIECES), max_size=10), st.booleans())
def test_only_tags_and_spaces_are_lost(pieces: list[str], opened: bool) -> None:
    text = "".join(pieces)
    for name in TAGGED:
        thought, answer = parse(name, pieces, opened=opened)
        assert (thought, answer) == parse(name, [text], opened=opened)
        begin, end = tags(name)
        kept = "".join((thought + answer).split())
        whole = "".join(text.split())
        tag = "".join(begin.split())
        texts = {
            whole,
            whole.replace(end, "", 1),
            whole.replace(tag, "", 1),
            whole.replace(tag, "", 1).replace(end, "", 1),
        }
        family = reasoning_family(name)
        assert family is not None
        if end in family.answer_tags:
            kept, texts = kept.replace(end, ""), {one.replace(end, "") for one in texts}
        assert kept in texts
