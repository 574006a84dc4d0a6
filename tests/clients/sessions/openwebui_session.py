"""Open WebUI's requests: the list of models, a streamed chat with native tools, its background
tasks (title, tags), and Ollama's lists.
"""

import json
import urllib.request
from urllib.error import HTTPError

from session import (
    BASE_URL,
    CHAT_TOOLS,
    IDLE_S,
    KEY,
    MODEL,
    converse,
    run_tool,
)

HEADERS = {
    "Authorization": f"Bearer {KEY}",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "A%20person",
    "X-OpenWebUI-User-Id": "b4e31a3c-6f0b-4f55-9f0c-3f1f6f3f8f11",
    "X-OpenWebUI-User-Email": "person@example.com",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "0f9b6cc5-7d0e-4ce9-9cf7-0f8c0b1d5a77",
}


class TooLong(Exception):
    """The error that Open WebUI shows for an overflow."""


def ask(path: str, body: dict | None = None) -> object:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{BASE_URL}{path}", data, HEADERS)
    try:
        return urllib.request.urlopen(request, timeout=IDLE_S)
    except HTTPError as error:
        message = json.load(error)["error"]["message"]
        if "maximum context length" not in message:
            raise
        raise TooLong(message) from None


def answer(messages: list) -> dict:
    """Return the message that a stream adds up to, as Open WebUI stores it."""
    body = {
        "model": MODEL,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "tools": CHAT_TOOLS,
    }
    message: dict = {"role": "assistant", "content": "", "reasoning": "", "tool_calls": {}}
    with ask("/v1/chat/completions", body) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                message["reasoning"] += delta.get("reasoning_content") or ""
                for piece in delta.get("tool_calls") or []:
                    empty = {"function": {"name": "", "arguments": ""}}
                    call = message["tool_calls"].setdefault(piece["index"], empty)
                    call |= {key: piece[key] for key in ("id", "type", "index") if key in piece}
                    for key, value in piece["function"].items():
                        call["function"][key] += value or ""
    return message


thoughts = ""


def turn(messages: list, text: str) -> str:
    global thoughts
    messages.append({"role": "user", "content": text})
    while True:
        message = answer(messages)
        thoughts += message["reasoning"]
        calls = list(message["tool_calls"].values())
        # Reasoning goes back as text in tags, and a message with calls has empty content.
        shown = f"<think>{message['reasoning']}</think>\n{message['content']}"
        kept = {"role": "assistant", "content": "" if calls else shown}
        messages.append(kept | ({"tool_calls": calls} if calls else {}))
        if not calls:
            return message["content"]
        for call in calls:
            result = run_tool(call["function"]["name"], json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


assert [model["id"] for model in json.load(ask("/v1/models"))["data"]] == [MODEL]
messages: list = [{"role": "system", "content": "You are brief."}]
converse(turn, messages, TooLong, lambda: thoughts)
title = {
    "model": MODEL,
    "messages": [{"role": "user", "content": '### Task: a title. [[say {"title": "Boats"}]]'}],
    "stream": False,
    "max_completion_tokens": 1000,
}
choice = json.load(ask("/v1/chat/completions", title))["choices"][0]
assert json.loads(choice["message"]["content"]) == {"title": "Boats"}, choice
assert json.load(ask("/api/version"))["version"]
names = [model["model"] for model in json.load(ask("/api/tags"))["models"]]
assert MODEL in [name.removesuffix(":latest") for name in names], names
chat = {"model": MODEL, "messages": messages[:2], "stream": True, "options": {"temperature": 0.7}}
lines = [json.loads(line) for line in ask("/api/chat", chat | {"tools": CHAT_TOOLS})]
assert lines[-1]["done"], lines[-1]
calls = [call for line in lines for call in line["message"].get("tool_calls") or []]
assert calls[0]["function"]["arguments"] == {"folder": "."}, calls
