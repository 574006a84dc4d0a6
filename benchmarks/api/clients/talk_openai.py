"""openai: chat with streaming, tools and a JSON schema, then the same with responses."""

import json

from conversation import BASE_URL, CITY, KEY, MODEL, QUESTION, WEATHER, checked, is_weather
from openai import OpenAI

client = OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY)
TOOL = {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER}
TOOLS = [{"type": "function", "function": TOOL}]


def streaming() -> bool:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name three rivers."}],
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return bool(text) and chunks[-1].usage.completion_tokens > 0 and len(chunks) > 5


def tools() -> bool:
    messages = [{"role": "user", "content": QUESTION}]
    asked = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="required", max_tokens=400
    )
    message = asked.choices[0].message
    (call, *_) = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=30
    )
    return (
        asked.choices[0].finish_reason == "tool_calls"
        and is_weather(json.loads(call.function.arguments))
        and bool(answer.choices[0].message.content)
    )


def tools_streamed() -> bool:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=400,
        stream=True,
    )
    name, arguments = "", ""
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    return name == "get_weather" and is_weather(json.loads(arguments))


def schema() -> bool:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": CITY, "strict": True},
        },
        max_tokens=400,
    )
    return set(json.loads(answer.choices[0].message.content)) == {"name", "inhabitants"}


def responses() -> bool:
    tool = {"type": "function", "strict": True, **TOOL}
    first = client.responses.create(
        model=MODEL, input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=400
    )
    (call, *_) = [item for item in first.output if item.type == "function_call"]
    second = client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}],
        max_output_tokens=30,
    )
    return is_weather(json.loads(call.arguments)) and bool(second.output_text)


def responses_streamed() -> bool:
    events = list(
        client.responses.create(
            model=MODEL, input="Name three rivers.", max_output_tokens=30, stream=True
        )
    )
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    done = events[-1].type in ("response.completed", "response.incomplete")
    return bool(text) and done and events[-1].response.output_text == text


def responses_schema() -> bool:
    answer = client.responses.create(
        model=MODEL,
        input="Describe Paris as JSON.",
        text={"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}},
        max_output_tokens=400,
    )
    return set(json.loads(answer.output_text)) == {"name", "inhabitants"}


checked(streaming, tools, tools_streamed, schema, responses, responses_streamed, responses_schema)
