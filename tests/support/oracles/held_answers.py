"""Asks a model for answers of every form, whole and streamed, and checks the gateway's result."""

import json
import re
from collections import Counter
from typing import Any

import httpx
import jsonschema

from oracles.sse import events

URL = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
PARAMETERS = {"get_weather": CITY, "get_time": {"type": "object", "properties": {}}}


def tools(*, strict: bool) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in PARAMETERS.items()
    ]


def requests(tag: str) -> dict[str, dict[str, Any]]:
    """Return the fields of a request by form. `tag`: the text of a token, which is ordinary text
    in a form without calls.
    """
    note = {"type": "object", "properties": {"note": {"enum": [tag, "none"]}, tag: {}},
            "required": ["note", tag], "additionalProperties": False}  # fmt: skip
    form = {
        "type": "json_schema",
        "json_schema": {"name": "note", "schema": note, "strict": True},
    }
    named = {"type": "function", "function": {"name": "get_weather"}}
    return {
        "required": {"tools": tools(strict=False), "tool_choice": "required"},
        "named": {"tools": tools(strict=False), "tool_choice": named},
        "strict": {"tools": tools(strict=True)},
        "beside": {"tools": tools(strict=False), "response_format": form},
        "schema": {"response_format": form},
        "regex": {"guided_regex": f"[a-c]{{2,4}}{re.escape(tag)}[0-9]{{1,3}}"},
        "choice": {"guided_choice": [f"{tag}yes", f"so {tag}", "no"]},
        "grammar": {"guided_grammar": f'start: "a"* "{tag}" /[0-9]/'},
    }


Answer = tuple[str, list[tuple[str, str]], str]  # text, calls (name, arguments), finish


def streamed(chunks: list[dict[str, Any]]) -> Answer:
    text, calls, finish = "", [], ""
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(calls):
                    calls.append(["", ""])
                calls[call["index"]][0] += call["function"].get("name") or ""
                calls[call["index"]][1] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return text, [(name, arguments) for name, arguments in calls], finish


def whole(reply: httpx.Response) -> Answer:
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    message = choice["message"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    return message["content"] or "", calls, choice["finish_reason"]


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Return the same answer whole and streamed."""
    one = whole(await client.post(URL, json=body))
    stream = await client.post(URL, json={**body, "stream": True})
    assert streamed(events(stream.text)) == one
    return one


async def check(client: httpx.AsyncClient, form: str, tag: str, seed: int) -> Counter[str]:
    """Request one answer and return what happened in it. Raises AssertionError if it does not have
    the requested form.
    """
    fields = requests(tag)[form]
    text, calls, finish = await answer(client, {**BODY, "seed": seed, **fields})
    for name, arguments in calls:
        # In a form, functions that are not strict have any arguments.
        jsonschema.validate(json.loads(arguments), {} if form == "beside" else PARAMETERS[name])
    # For a client that names a function, its call is the answer.
    assert finish == ("tool_calls" if calls and form != "named" else "stop")
    seen = Counter({"calls": len(calls), "texts": bool(text), "tags": tag in text})
    match form:
        case "required" | "named":
            assert calls
            assert not text
            assert form == "required" or [name for name, _ in calls] == ["get_weather"]
        case "strict":
            assert not any(name in text for name in PARAMETERS), text  # of an unparsed call
        case "beside" | "schema":
            if not calls:
                schema = fields["response_format"]["json_schema"]["schema"]
                jsonschema.validate(json.loads(text), schema)
        case "regex":
            assert re.fullmatch(fields["guided_regex"], text), text
        case "choice":
            assert text in fields["guided_choice"]
        case "grammar":
            assert re.fullmatch(f"a*{re.escape(tag)}[0-9]", text), text
    return seen
