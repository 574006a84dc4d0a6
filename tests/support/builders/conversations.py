"""Sixty conversations as clients send them, covering the differences of templates, agents and
models.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

Message = dict[str, Any]
MALFORMED = ('{"a": WORD', "null", '["WORD"]', '{"a": NaN, "b": "WORD"}', "{'a': 'WORD'}", "WORD")
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Its name"}},
        "required": ["city"],
    },
}
LOOK_UP = {**WEATHER, "name": "look_up"}  # which is not called
BARE: dict[str, dict[str, Any]] = {
    "whole": WEATHER,
    "no description": {"name": "get_weather", "parameters": WEATHER["parameters"]},
    "no parameters": {"name": "get_weather", "description": "The weather"},
    "name alone": {"name": "get_weather"},
    "no properties": {**WEATHER, "parameters": {"type": "object"}},
    "empty schema": {**WEATHER, "parameters": {}},
    "bare property": {**WEATHER, "parameters": {"type": "object", "properties": {"city": {}}}},
}


@dataclass(frozen=True)
class Conversation:
    name: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    words: tuple[str, ...]  # shown by a prompt that omits nothing


class _Writer:
    """Writes the messages of a conversation, each with words that are in no other message."""

    def __init__(self) -> None:
        self._numbers = count(101)
        self.words: list[str] = []

    def word(self) -> str:
        self.words.append(f"w{next(self._numbers)}")
        return self.words[-1]

    def turn(self, role: str, **more: Any) -> Message:
        return {"role": role, "content": f"says {self.word()}", **more}

    def parts(self, role: str, number: int) -> Message:
        parts = [{"type": "text", "text": f"part {self.word()}"} for _ in range(number)]
        return {"role": role, "content": parts}

    def calls(self, number: int = 1, malformed: str = "", **more: Any) -> list[Message]:
        """Add a turn with calls and their results."""
        ids = [f"call{next(self._numbers)}00" for _ in range(number)]
        made, results = [], []
        for call_id in ids:
            arguments = malformed or '{"city": "WORD"}'
            if "WORD" in arguments:
                arguments = arguments.replace("WORD", self.word())
            function = {"name": "get_weather", "arguments": arguments}
            made.append({"id": call_id, "type": "function", "function": function})
            content = f"result {self.word()}"
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
        return [{"role": "assistant", "tool_calls": made, **more}, *results]


def _with_parts(message: Message) -> Message:
    if message["role"] != "tool":
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def conversations() -> Iterator[Conversation]:
    """Return sixty conversations."""
    weather = (WEATHER,)

    def built(name: str, make: Any, tools: Any = None) -> Conversation:
        writer = _Writer()
        messages = tuple(make(writer))
        functions = None
        if tools is not None:
            functions = tuple({"type": "function", "function": tool} for tool in (*tools, LOOK_UP))
            writer.words.append(LOOK_UP["name"])
        return Conversation(name, messages, functions, tuple(writer.words))

    u, a = "user", "assistant"
    plain = {
        "one turn": [u],
        "three turns": [u, a, u],
        "system": ["system", u],
        "system, three turns": ["system", u, a, u],
        "two systems": ["system", "system", u],
        "three systems": ["system", "system", "system", u, a, u],
        "developer": ["developer", u],
        "developer, three turns": ["developer", u, a, u],
        "system, developer": ["system", "developer", u],
        "developer, system": ["developer", "system", u],
        "system later": ["system", u, a, "system", u],
        "system later alone": [u, a, "system", u],
        "system last": ["system", u, "system"],
        "system after the assistant": ["system", u, a, "system"],
        "systems later": ["system", u, a, "system", "system", u],
        "developer later": ["system", u, a, "developer", u],
    }
    for name, roles in plain.items():
        yield built(name, lambda w, roles=roles: [w.turn(role) for role in roles])
    for name, tool in BARE.items():
        yield built(f"tool: {name}", lambda w: [w.turn(u)], (tool,))
        yield built(f"called tool: {name}", lambda w: [w.turn(u), *w.calls(content="")], (tool,))
    contents: dict[str, Mapping[str, Any]] = {
        "null": {"content": None},
        "absent": {},
        "empty": {"content": ""},
    }
    for name, content in contents.items():
        for number in (1, 2):
            yield built(
                f"{number} calls, content {name}",
                lambda w, n=number, c=content: [w.turn(u), *w.calls(n, **c)],
                weather,
            )
        yield built(
            f"two steps, content {name}",
            lambda w, c=content: [w.turn("system"), w.turn(u), *w.calls(**c), *w.calls(**c)],
            weather,
        )
    for thought in ("reasoning_content", "reasoning"):
        yield built(
            f"thought of an answer: {thought}",
            lambda w, t=thought: [w.turn(u), w.turn(a, **{t: "thinks"}), w.turn(u)],
        )
        yield built(
            f"thought of a call: {thought}",
            lambda w, t=thought: [w.turn(u), *w.calls(content=None, **{t: "thinks"})],
            weather,
        )
    yield built(
        "said, thought and called",
        lambda w: [w.turn(u), *w.calls(content=f"so {w.word()}", reasoning_content="thinks")],
        weather,
    )
    yield built("said and called", lambda w: [w.turn(u), *w.calls(content=w.word())], weather)
    for arguments in MALFORMED:
        yield built(
            f"arguments {arguments}",
            lambda w, m=arguments: [w.turn(u), *w.calls(malformed=m, content=None)],
            weather,
        )
    yield built("one part", lambda w: [w.parts(u, 1)])
    yield built("two parts", lambda w: [w.parts(u, 2), w.turn(a), w.turn(u)])
    yield built("parts of a system", lambda w: [w.parts("system", 2), w.parts(u, 1)])
    yield built("parts of all", lambda w: [w.parts(u, 1), w.parts(a, 1), w.parts(u, 1)])
    yield built(
        "parts of a result",
        lambda w: [w.turn(u), *map(_with_parts, w.calls(content=None))],
        weather,
    )
    yield built(
        "system after a result",
        lambda w: [w.turn("system"), w.turn(u), *w.calls(content=None), w.turn("system")],
        weather,
    )
    yield built(
        "an answer after results",
        lambda w: [w.turn(u), *w.calls(content=None), w.turn(a), w.turn(u)],
        weather,
    )
    yield built("tools, no calls", lambda w: [w.turn("system"), w.turn(u)], weather)
    yield built("calls without tools", lambda w: [w.turn(u), *w.calls(content=None)])
