"""litellm: streaming, tools and a JSON schema through its OpenAI provider."""

import json

import litellm
from conversation import BASE_URL, CITY, KEY, MODEL, QUESTION, WEATHER, checked, is_weather

COMMON = {"model": f"openai/{MODEL}", "api_base": f"{BASE_URL}/v1", "api_key": KEY}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]


def streaming() -> bool:
    stream = litellm.completion(
        messages=[{"role": "user", "content": "Name three rivers."}],
        max_tokens=30,
        stream=True,
        **COMMON,
    )
    return len("".join(chunk.choices[0].delta.content or "" for chunk in stream)) > 0


def tools() -> bool:
    messages = [{"role": "user", "content": QUESTION}]
    asked = litellm.completion(
        messages=messages, tools=TOOLS, tool_choice="required", max_tokens=400, **COMMON
    )
    message = asked.choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    messages += [message.model_dump(exclude_none=True), result]
    answer = litellm.completion(messages=messages, tools=TOOLS, max_tokens=30, **COMMON)
    return is_weather(json.loads(call.function.arguments)) and bool(answer.choices[0].message)


def schema() -> bool:
    answer = litellm.completion(
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": CITY, "strict": True},
        },
        max_tokens=400,
        **COMMON,
    )
    return set(json.loads(answer.choices[0].message.content)) == {"name", "inhabitants"}


checked(streaming, tools, schema)
