"""anthropic: messages with streaming and tools; a schema is passed as the input of a tool."""

import asyncio
import json

from anthropic import Anthropic, AsyncAnthropic
from conversation import BASE_URL, CITY, KEY, MODEL, QUESTION, WEATHER, checked, is_weather

client = Anthropic(base_url=BASE_URL, api_key=KEY)
TOOLS = [{"name": "get_weather", "description": "The weather in a city", "input_schema": WEATHER}]


def streaming() -> bool:
    with client.messages.stream(
        model=MODEL,
        max_tokens=30,
        system="Be brief.",
        messages=[{"role": "user", "content": "Name three rivers."}],
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    return bool(text) and final.content[0].text == text and final.usage.output_tokens > 0


def counting() -> bool:
    counted = client.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}]
    )
    return counted.input_tokens > 5


def tools() -> bool:
    messages = [{"role": "user", "content": QUESTION}]
    first = client.messages.create(
        model=MODEL, max_tokens=400, messages=messages, tools=TOOLS, tool_choice={"type": "any"}
    )
    (use, *_) = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees"}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(
        model=MODEL, max_tokens=30, messages=messages, tools=TOOLS, tool_choice={"type": "none"}
    )
    return (
        first.stop_reason == "tool_use" and is_weather(use.input) and bool(second.content[0].text)
    )


def tools_streamed() -> bool:
    with client.messages.stream(
        model=MODEL,
        max_tokens=400,
        messages=[{"role": "user", "content": QUESTION}],
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as stream:
        events = list(stream)
        final = stream.get_final_message()
    pieces = [event for event in events if event.type == "input_json"]
    text = "".join(piece.partial_json for piece in pieces)
    use = final.content[-1]
    return (
        is_weather(use.input)
        and json.loads(text) == use.input == pieces[-1].snapshot
        and events[-1].type == "message_stop"
        and final.stop_reason == "tool_use"
    )


def asynchronous() -> bool:
    """Send two messages at once, one of them streamed."""

    async def run() -> bool:
        async with AsyncAnthropic(base_url=BASE_URL, api_key=KEY) as api:
            common = {
                "model": MODEL,
                "max_tokens": 30,
                "messages": [{"role": "user", "content": QUESTION}],
            }

            async def streamed() -> str:
                async with api.messages.stream(**common) as stream:
                    return "".join([piece async for piece in stream.text_stream])

            text, message = await asyncio.gather(streamed(), api.messages.create(**common))
            return bool(text) and bool(message.content[0].text)

    return asyncio.run(run())


def schema() -> bool:
    tool = {"name": "describe", "description": "Describes a city", "input_schema": CITY}
    answer = client.messages.create(
        model=MODEL,
        max_tokens=400,
        messages=[{"role": "user", "content": "Describe Paris."}],
        tools=[tool],
        tool_choice={"type": "tool", "name": "describe"},
    )
    return set(answer.content[-1].input) == {"name", "inhabitants"}


checked(streaming, counting, tools, tools_streamed, asynchronous, schema)
