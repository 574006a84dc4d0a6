"""One request and its answer, without the parts that differ between calls: ids, and creation times.

The events of a stream are joined, since the number of tokens per event depends on timing.
"""

import json
from collections.abc import Sequence
from typing import Any

import httpx

OWN = ("id", "item_id", "call_id", "request_id", "created", "created_at", "completed_at")
Event = dict[str, Any]


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """Send a request and return [status, answer]."""
    answer = client.post(path, json=body)
    if not body.get("stream") or answer.status_code != 200:
        return [answer.status_code, plain(answer.json())]
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert data.pop() == "[DONE]"
        return [answer.status_code, joined_chunks([plain(json.loads(event)) for event in data])]
    return [answer.status_code, joined_events([plain(json.loads(event)) for event in data])]


def plain(value: Any) -> Any:
    """The answer without ids and times at any depth."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items() if name not in OWN}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def joined_chunks(chunks: Sequence[Event]) -> Event:
    """The joined chunks of OpenAI completions, by choice: texts and lists are concatenated, other
    fields kept once. Only the last chunk's `usage` counts."""
    choices: dict[int, Event] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            _add(choices.setdefault(choice["index"], {}), choice)
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    prompts = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    whole = {"choices": [choices[i] for i in sorted(choices)], "usage": usages[-1:]}
    return {**whole, "prompt_token_ids": prompts}


def joined_events(events: Sequence[Event]) -> list[Event]:
    """The joined typed events: consecutive events that differ only in their number and in the text
    they add become one."""
    joined: list[Event] = []
    for event in events:
        event = {name: value for name, value in event.items() if name != "sequence_number"}
        if "delta" in event and joined and _head(event) == _head(joined[-1]):
            for name in event.keys() & {"delta", "logprobs"}:
                joined[-1][name] = _longer(joined[-1][name], event[name])
        else:
            joined.append(event)
    return joined


def _head(event: Event) -> Event:
    return {name: value for name, value in event.items() if name not in ("delta", "logprobs")}


def _longer(one: Any, more: Any) -> Any:
    if not isinstance(one, dict):
        return one + more
    return {name: more[name] if name == "type" else one[name] + more[name] for name in one}


def _add(whole: Event, part: Event) -> None:
    for name, value in part.items():
        before = whole.get(name)
        if isinstance(value, dict):
            whole[name] = before or {}
            _add(whole[name], value)
        elif name == "tool_calls":
            calls = whole.setdefault(name, {})
            for call in value:
                _add(calls.setdefault(call.pop("index"), {}), call)
        elif isinstance(value, str | list) and isinstance(before, str | list):
            whole[name] = before + value
        elif value is not None or name not in whole:
            whole[name] = value
