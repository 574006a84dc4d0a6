"""Chats of the Python API: tools and their calls, reasoning, several conversations, messages."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_models import write_tiny
from fakes.tool_model import TEMPLATE, THINKING

from pdserve import LLM, InvalidRequest, Message, SamplingParams, StructuredOutputsParams

OPTIONS: dict[str, Any] = {"kv_tokens": 2048, "chunk_size": 64, "max_running": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
HI = [Message(role="user", content="hi")]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Bern"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
CALL = SamplingParams(max_tokens=200, seed=3, temperature=0.5)


def model(folder: Path, template: str) -> str:
    write_tiny(folder, "llama")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(model(tmp_path_factory.mktemp("chat"), TEMPLATE), **OPTIONS) as made:
        yield made


def test_a_file_replaces_the_template(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("[{{ messages[0].content }}]")
    with LLM(model(tmp_path / "model", TEMPLATE), chat_template=file, **OPTIONS) as llm:
        assert llm.apply_chat_template(HI) == f"[{HI[0]['content']}]"
    file.write_text("{% if %}")
    with pytest.raises(ValueError, match=r"chat_template: .*template\.jinja"):
        LLM("", chat_template=file)


def test_calls_are_parsed_and_returned_as_messages(llm: LLM) -> None:
    found = llm.chat(
        HI, CALL, tools=[WEATHER, CLOCK], tool_choice={"function": {"name": "get_weather"}}
    )
    (call,) = found.tool_calls
    assert call.name == "get_weather"
    assert call.parsed()["city"] in ("Oslo", "Bern")
    assert (found.text, found.outputs[0].finish_reason) == ("", "tool_calls")
    assert found.prompt is not None
    assert "tools: get_weather get_time" in found.prompt
    assert found.message["tool_calls"][0]["id"] == call.id
    result = Message(role="tool", tool_call_id=call.id, content="rain")
    prompt = llm.apply_chat_template([*HI, found.message, result], tools=[WEATHER])
    assert "get_weather" in prompt.split("<tool_call>")[1]
    assert "rain" in prompt


def test_a_streamed_call_comes_whole(llm: LLM) -> None:
    whole = llm.chat(HI, CALL, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    deltas = list(
        llm.chat_stream(
            HI, CALL, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
        )
    )
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == [
        (call.name, call.arguments) for call in whole.tool_calls
    ]
    assert deltas[-1].finish_reason == whole.outputs[0].finish_reason == "tool_calls"
    ids = [token for delta in deltas for token in delta.token_ids]
    assert tuple(ids) == whole.outputs[0].token_ids


def test_tools_without_calls_are_in_the_prompt_and_leave_the_answer_to_a_structure(
    llm: LLM,
) -> None:
    bound = replace(
        GREEDY, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="ab")
    )
    assert llm.chat(HI, bound, tools=[WEATHER], tool_choice="none").text == "ab"
    with pytest.raises(InvalidRequest, match="the form that tool_choice requires") as refused:
        llm.chat(HI, bound, tools=[WEATHER], tool_choice="required")
    assert refused.value.param == "structured_outputs.regex"


def test_an_answer_with_tools_has_its_structure_or_calls(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="[a-z]{2}")
    bound = replace(CALL, n=8, temperature=2.0, structured_outputs=form)
    found = llm.chat(HI, bound, tools=[WEATHER]).outputs
    called = [bool(one.tool_calls) for one in found]
    assert any(called)
    assert not all(called)
    for one in found:
        if one.tool_calls:
            assert (one.text, one.finish_reason) == ("", "tool_calls")
        else:
            assert re.fullmatch("[a-z]{2}", one.text)


def test_invalid_tools_are_named(llm: LLM) -> None:
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        ("tools[0]", "must have the form", {"tools": [{"name": "f"}]}),
        ("tools[0].function.name", "letters, digits", {"tools": [{"function": {"name": "a b"}}]}),
        ("tools[1].function.name", "two tools", {"tools": [CLOCK, CLOCK]}),
        ("tool_choice", "needs tools", {"tool_choice": "required"}),
        ("tool_choice", "must be none, auto", {"tools": [CLOCK], "tool_choice": "always"}),
        (
            "tool_choice.function.name",
            "no tool has the name 'f'",
            {"tools": [CLOCK], "tool_choice": {"function": {"name": "f"}}},
        ),
    ]
    for param, text, options in wrong:
        with pytest.raises(InvalidRequest, match=text) as refused:
            llm.chat(HI, GREEDY, **options)
        assert refused.value.param == param


def test_reasoning_is_separate_from_the_answer(tmp_path: Path) -> None:
    """The template opens the reasoning; a budget ends it after four tokens."""
    path = model(tmp_path, THINKING.rstrip() + "<think>\n")
    params = replace(GREEDY, max_tokens=30, thinking_token_budget=4)
    with LLM(path, **OPTIONS) as llm:
        found = llm.chat(HI, params)
        assert found.reasoning
        assert found.text
        assert "</think>" not in found.reasoning + found.text
        assert found.message["reasoning_content"] == found.reasoning
        deltas = list(llm.chat_stream(HI, params))
        assert "".join(delta.reasoning for delta in deltas) == found.reasoning
        assert "".join(delta.text for delta in deltas) == found.text
        prompt = llm.apply_chat_template([*HI, found.message, *HI])
        assert "thought: " in prompt
        # A structure constrains what follows the reasoning.
        bound = replace(
            params, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="ab")
        )
        assert llm.chat(HI, bound).text == "ab"
    with LLM(path, reasoning_parser="none", **OPTIONS) as llm:
        assert llm.chat(HI, replace(params, thinking_token_budget=None)).reasoning == ""
        with pytest.raises(InvalidRequest, match="reasoning of this model is not parsed"):
            llm.chat(HI, params)


def test_several_conversations_are_one_batch(llm: LLM) -> None:
    requests = [[Message(role="user", content=f"number {n}")] for n in range(5)]
    together = llm.chat(requests, GREEDY)
    assert [one.text for one in together] == [llm.chat(one, GREEDY).text for one in requests]
    each = llm.chat(requests[:2], [GREEDY, replace(GREEDY, max_tokens=3)])
    assert [len(one.outputs[0].token_ids) for one in each] == [12, 3]


def test_the_last_message_is_continued(llm: LLM) -> None:
    begun = [*HI, Message(role="assistant", content="The answer is")]
    found = llm.chat(begun, GREEDY, continue_final_message=True)
    assert found.prompt is not None
    assert found.prompt.endswith("The answer is")
    with pytest.raises(InvalidRequest, match="requires a last assistant message"):
        llm.chat(HI, GREEDY, continue_final_message=True)


def test_a_client_s_special_tokens_are_text(llm: LLM) -> None:
    (special,) = (t for t in llm.tokenizer.special.texts if "im_end" in t)
    said = llm.chat([Message(role="user", content=special)], GREEDY).prompt_token_ids
    assert said.count(llm.tokenizer.special.texts[special]) == 1  # the turn's own
