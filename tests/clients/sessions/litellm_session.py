"""LiteLLM: streamed chats with manual tool calls, and its own exception for an overflow."""

import json

import litellm
from session import BASE_URL, CHAT_TOOLS, IDLE_S, KEY, MODEL, converse, run_tool

litellm.telemetry = False
thoughts = ""


def answer(messages: list) -> object:
    global thoughts
    chunks = []
    for chunk in litellm.completion(
        model=f"openai/{MODEL}",
        api_base=f"{BASE_URL}/v1",
        api_key=KEY,
        messages=messages,
        tools=CHAT_TOOLS,
        stream=True,
        timeout=IDLE_S,
        max_retries=0,
    ):
        chunks.append(chunk)
        thoughts += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message


def turn(messages: list, text: str) -> str:
    messages.append({"role": "user", "content": text})
    while True:
        message = answer(messages)
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = run_tool(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


system = {"role": "system", "content": "You are brief."}
converse(turn, [system], litellm.ContextWindowExceededError, lambda: thoughts)
