"""openai: helpers for typed answers and event streams, and the async client."""

import asyncio
import json
from typing import Literal

import openai
from conversation import BASE_URL, KEY, MODEL, QUESTION, WEATHER, checked, is_weather
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER}
TOOLS = [{"type": "function", "function": {**TOOL, "strict": True}}]


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


def chat_parse() -> bool:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, max_tokens=400
    )
    return isinstance(answer.choices[0].message.parsed, Weather)


def chat_parse_tool() -> bool:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        max_tokens=400,
    )
    (call, *_) = answer.choices[0].message.tool_calls
    return isinstance(call.function.parsed_arguments, Weather)


def chat_stream() -> bool:
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Say hello."}],
        max_tokens=200,
        temperature=0,
        stream_options={"include_usage": True},
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    return (
        bool(text)
        and final.choices[0].message.content == text
        and final.usage.completion_tokens > 0
    )


def chat_stream_schema() -> bool:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Weather, max_tokens=400
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    return "content.done" in kinds and isinstance(final.choices[0].message.parsed, Weather)


def chat_stream_tool() -> bool:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=400
    ) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    return done[0].name == "get_weather" and is_weather(call.function.parsed_arguments)


def responses_parse() -> bool:
    answer = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=400
    )
    return isinstance(answer.output_parsed, Weather)


def responses_stream() -> bool:
    with client.responses.stream(
        model=MODEL, input="Say hello.", max_output_tokens=200, temperature=0
    ) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    return bool(text) and final.output_text == text


def responses_stream_tool() -> bool:
    with client.responses.stream(
        model=MODEL,
        input=QUESTION,
        tools=[{"type": "function", "strict": True, **TOOL}],
        tool_choice="required",
        max_output_tokens=400,
    ) as stream:
        pieces = [e for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    (call, *_) = [item for item in final.output if item.type == "function_call"]
    whole = "".join(piece.delta for piece in pieces if piece.item_id == call.id)
    return whole == call.arguments and is_weather(json.loads(call.arguments))


def responses_stream_schema() -> bool:
    with client.responses.stream(
        model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=400
    ) as stream:
        final = stream.until_done().get_final_response()
    return isinstance(final.output_parsed, Weather)


def asynchronous() -> bool:
    """Send two chats and a response at once, one of them streamed."""

    async def run() -> bool:
        async with AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY) as api:

            async def streamed() -> str:
                stream = await api.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=30, stream=True
                )
                pieces = [c.choices[0].delta.content or "" async for c in stream if c.choices]
                return "".join(pieces)

            text, parsed, response = await asyncio.gather(
                streamed(),
                api.chat.completions.parse(
                    model=MODEL, messages=MESSAGES, response_format=Weather, max_tokens=400
                ),
                api.responses.create(model=MODEL, input=QUESTION, max_output_tokens=30),
            )
            typed = parsed.choices[0].message.parsed
            return bool(text and response.output_text) and isinstance(typed, Weather)

    return asyncio.run(run())


def embeddings_are_refused() -> bool:
    """A generating model refuses embeddings with an error that says so, raised as the library's
    bad-request error."""
    try:
        client.embeddings.create(model=MODEL, input="hello")
    except openai.BadRequestError as error:
        return error.param == "model" and "Embeddings" in str(error)
    return False


def models() -> bool:
    (model,) = client.models.list().data
    return model.id == MODEL and model.model_extra["capabilities"]["tools"]


checked(
    *(chat_parse, chat_parse_tool, chat_stream, chat_stream_schema, chat_stream_tool),
    *(responses_parse, responses_stream, responses_stream_tool, responses_stream_schema),
    *(asynchronous, embeddings_are_refused, models),
)
