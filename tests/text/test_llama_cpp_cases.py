"""The chat test cases of llama.cpp, with the prompts of the gateway: results are equal, parsed
whole and character by character, except for those in a table of reasons."""

import json
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import pytest
from oracles.llama_cpp_chat import ChatCase, Message, chat_cases
from oracles.llama_cpp_templates import llama_cpp_chat_test, llama_cpp_templates

from pdserve.text import (
    AnswerFormat,
    TemplateInput,
    TextError,
    ToolUse,
    calls_of,
    reasoning_of,
    text_of,
)
from pdserve.text.answer_format import answer_format
from pdserve.text.messages import final_text
from pdserve.text.reasoning import reasoning_family, reasoning_family_of
from pdserve.text.templates import ChatTemplate
from pdserve.text.tokenizer.tokenizer import Tokenizer
from pdserve.text.tool_parsers import tool_family, tool_family_of

INLINE = "COMMON_REASONING_FORMAT_NONE"  # the default of llama.cpp
IN_THOUGHT = "COMMON_CHAT_CONTINUATION_REASONING"
END = "\0"  # marks the end of an input in the table
FINAL = "<|start|>assistant<|channel|>final<|message|>"

STARTED = "the arguments of a call that is cut begin with their first value"
TURN_END = "a token that ends the turn is no part of an answer's text"
BEHIND = "behind a thought, tags of thoughts are text"
OTHERS = "what a message says to a recipient that is no tool is not swallowed"
FENCED = "a structure is written without a fence"
INLINE_TAGS = "thoughts in the text stand in <think>"

# Reasons, by template and part of the input, for results that differ.
DIFFERENT = {
    ("Qwen3.5-4B", "<think>\n\n</think>\n\n<tool_call>"): "a tag that comes again is left out",
    ("Apriel-1.6-15b-Thinker-fixed", "I'm\nthinking"): "the prompt's words are not the thought's",
    ("mistralai-Ministral-3-14B-Reasoning-2512", "[/THINK]```json"): FENCED,
    ("meta-llama-Llama-3.1-8B-Instruct", '```json\n"42"'): FENCED,
    ("google-gemma-4-31B-it", "What's up?<|channel>"): BEHIND,
    ("google-gemma-4-31B-it", "<|channel><|channel>"): BEHIND,
    ("inclusionai-ling-3.0-flash", "<|role_end|>"): TURN_END,
    (
        "inclusionai-ling-3.0-flash",
        "\nThe time has been",
    ): "a call in a thought is an example",
    ("CohereForAI-c4ai-command-r-plus-tool_use", "<|END_OF_TURN_TOKEN|>"): TURN_END,
    ("Kimi-K2-Thinking", f'{{"arg1": {END}'): STARTED,
    ("LFM2-8B-A1B", f"(arg1={END}"): STARTED,
    ("LFM2.5-Instruct", f"(arg1={END}"): STARTED,
    ("LFM2.5-8B-A1B", f"(arg1={END}"): STARTED,
    ("Reka-Edge", f'{{"arg1":{END}'): STARTED,
    ("Reka-Edge", f'{{"arg{END}'): STARTED,
    ("MiniMax-M3", "<label>]<]minimax[>[<text>"): "what is written as an object is one",
    ("meetkai-functionary-medium-v3.2", "all\n"): "without tools nothing reads the recipient",
    ("openai-gpt-oss-120b", "to=container.exec"): OTHERS,
    ("openai-gpt-oss-120b", "to=python"): OTHERS,
    ("openai-gpt-oss-120b", f"<|end|>{FINAL}Hello, world!\nWhat's up?{END}{INLINE}"): INLINE_TAGS,
}


def different(case: ChatCase) -> set[tuple[str, str]]:
    """The rows of the table that explain a difference of the case."""
    text = case.input + END + (INLINE if is_inline(case) else "")
    return {row for row in DIFFERENT if row[0] == name_of(case) and row[1] in text}


def name_of(case: ChatCase) -> str:
    return PurePosixPath(case.template).stem


def is_inline(case: ChatCase) -> bool:
    return bool(case.options.get("reasoning_format", INLINE) == INLINE)


def prefilled(case: ChatCase) -> dict[str, Any]:
    """The partial message that the answer continues."""
    message = case.options["messages"][-1]
    return {
        "role": "assistant", "content": message.content, "reasoning_content": message.reasoning,
    }  # fmt: skip


def format_of(case: ChatCase, template: ChatTemplate, source: str) -> AnswerFormat:
    continues = "continue_final_message" in case.options
    conversation = TemplateInput(
        [{"role": "user", "content": "Hey there!"}, *([prefilled(case)] if continues else [])],
        add_generation_prompt=not continues,
        continue_final_message=continues,
        variables={"enable_thinking": case.options.get("enable_thinking", True)},
        tools=[tool.as_template() for tool in case.tools] or None,
    )
    prompt = ""
    with suppress(TextError):  # some need tools, or variables of a client
        prompt = final_text(conversation) if continues else template.render(conversation).text
    return answer_format(
        (tool_family(tool_family_of(source)), reasoning_family(reasoning_family_of(source))),
        ToolUse(case.tools),
        prompt,
        continues=continues,
        inline=is_inline(case),
        structured="json_schema" in case.options,
    )


def parsed(form: AnswerFormat, pieces: Iterable[str], *, cut: bool) -> Message:
    parser = form.parser()
    if parser is None:
        return Message("".join(pieces))
    content = [part for piece in pieces for part in parser.push(piece)] + parser.finish(cut=cut)
    calls = tuple((call.name, call.arguments) for call in calls_of(content))
    return Message(text_of(content), reasoning_of(content), calls)


def comparable(message: Message, form: AnswerFormat) -> tuple[str, str, list[tuple[str, Any]]]:
    """The message without white space around its parts, and without the tags of thoughts in the
    text."""
    calls = [(name, arguments_of(arguments)) for name, arguments in message.calls]
    text = message.content
    if form.inline and form.reasoning is not None:
        for tag in (form.reasoning.begin, form.reasoning.end):
            text = text.replace(tag, "")
        text = "".join(text.split())
    return text.strip(), message.reasoning.strip(), calls


def arguments_of(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text


def expected_of(case: ChatCase) -> Message:
    """The expected message without the beginning in the prompt."""
    if "continue_final_message" not in case.options:
        return case.expected
    begun = prefilled(case)
    content = case.expected.content.removeprefix(begun["content"])
    return Message(content, case.expected.reasoning.removeprefix(begun["reasoning_content"]))


@cache
def cases() -> list[ChatCase]:
    """The cases except those that continue a thought, which the gateway does not support."""
    everything = chat_cases(llama_cpp_chat_test())
    return [c for c in everything if c.options.get("continue_final_message") != IN_THOUGHT]


@pytest.mark.extended
def test_there_are_hundreds_of_cases() -> None:
    assert len(cases()) > 400
    assert len({case.template for case in cases()}) > 50
    assert sum(len(case.expected.calls) for case in cases()) > 200


@pytest.mark.extended
def test_cases(tokenizer: Tokenizer, subtests: pytest.Subtests) -> None:
    sources = llama_cpp_templates()
    templates = {name: ChatTemplate(source, tokenizer) for name, source in sources.items()}
    num_different = 0
    for case in cases():
        name = name_of(case)
        with subtests.test(template=name, input=case.input):
            form = format_of(case, templates[name], sources[name])
            cut = "is_partial" in case.options
            whole = parsed(form, [case.input], cut=cut)
            assert parsed(form, case.input, cut=cut) == whole
            result, expected = (comparable(m, form) for m in (whole, expected_of(case)))
            if different(case):
                num_different += 1
                assert result != expected, "the result is equal now; remove its row"
            else:
                assert result == expected
    assert len(DIFFERENT) <= num_different < 30
    assert {row for case in cases() for row in different(case)} == DIFFERENT.keys()
