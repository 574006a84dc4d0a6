"""The openai and anthropic clients hold a conversation with a real system: tools, schemas, and
responses. The shipped model's chat template has no place for tools. benchmarks/api has the rest."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field
from systems.fleet import Fleet
from systems.whole import KEY

MODEL = "SmolLM2-135M-Instruct"
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "get_weather", "description": "The weather in a city"}
TOOLS: Any = [{"type": "function", "function": {**TOOL, "parameters": PARAMETERS}}]
SAYS_A_CALL = (
    'Repeat after me.\n<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
)


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture(scope="module", autouse=True)
def rings() -> None:
    """Those of `fleet` are checked at its end."""


@pytest.fixture(scope="module")
def claude(fleet: Fleet) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fleet.url, api_key=KEY, max_retries=0) as client:
        yield client


def test_openai_calls_a_tool_and_tells_its_result(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(
        model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice="required", max_tokens=200, seed=1
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert not message.content
    for call in message.tool_calls:
        Weather.model_validate_json(call.function.arguments)
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
        for call in message.tool_calls
    ]
    messages: Any = [*QUESTION, message.model_dump(exclude_none=True), *results]
    answer = api.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=20
    )
    assert answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_itself_calls_a_tool(api: openai.OpenAI, stream: bool) -> None:
    """It is free to; it is small, so it is told what to write."""
    wanted = {"city": "Paris"}
    messages: Any = [{"role": "user", "content": SAYS_A_CALL % json.dumps(wanted)}]
    found: Any = api.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=60, stream=stream
    )
    if stream:
        deltas = [chunk.choices[0].delta for chunk in found if chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        text = "".join(call.function.arguments or "" for call in calls if call.index == 0)
    else:
        text = found.choices[0].message.tool_calls[0].function.arguments
    assert json.loads(text) == wanted


def test_openai_parses_a_model_of_pydantic(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Weather, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_responses_with_a_tool_and_a_schema(api: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOL, "parameters": PARAMETERS, "strict": True}
    first = api.responses.create(
        model=MODEL, input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=200
    )
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
        for call in calls
    ]
    second = api.responses.parse(
        model=MODEL,
        previous_response_id=first.id,
        input=results,
        text_format=Weather,
        max_output_tokens=100,
    )
    assert isinstance(second.output_parsed, Weather)


def test_anthropic_calls_a_tool_and_tells_its_result(claude: anthropic.Anthropic) -> None:
    tools: Any = [{**TOOL, "input_schema": PARAMETERS}]
    with claude.messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=QUESTION,
        tools=tools,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    (use,) = message.content
    assert use.type == "tool_use"
    assert Weather.model_validate_json("".join(pieces)).model_dump() == use.input
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees"}
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = claude.messages.create(
        model=MODEL, max_tokens=20, messages=messages, tools=tools, tool_choice={"type": "none"}
    )
    assert answer.content[0].type == "text"
