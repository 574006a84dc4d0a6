"""Conversations as clients of three APIs send them, and answers as the clients send them back.

Each API is written as its documentation specifies it; the gateway's code is not used.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from builders.conversations import Conversation, Message

RULES = ("system", "developer")
ANY_OBJECT = {"type": "object"}
THOUGHTS = ("reasoning_content", "reasoning")


class Call(NamedTuple):
    id: str
    name: str
    arguments: dict[str, Any]


class Api(ABC):
    """The form of a conversation in one API."""

    name: str
    path: str

    @abstractmethod
    def body(self, given: Conversation) -> dict[str, Any]:
        """Return the request for the next turn of a conversation."""

    def same(self, given: Conversation) -> Conversation:
        """Return the chat that the body means, without what this API cannot express."""
        return given

    @abstractmethod
    def tools(self, functions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]: ...

    @abstractmethod
    def request(self, turns: Sequence[Any], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a request with turns made by `user`, `history` and `result`."""

    def user(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    @abstractmethod
    def history(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Return an answer as a turn of the continued conversation."""

    @abstractmethod
    def result(self, call: Call, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def calls(self, answer: dict[str, Any]) -> list[Call]: ...

    @abstractmethod
    def text(self, answer: dict[str, Any]) -> str: ...


class ChatApi(Api):
    name = "chat"
    path = "/v1/chat/completions"

    def body(self, given: Conversation) -> dict[str, Any]:
        return _with_tools({"messages": list(given.messages)}, given.tools)

    def tools(self, functions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"type": "function", "function": function} for function in functions]

    def request(self, turns: Sequence[Any], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return _with_tools({"messages": turns}, tools)

    def history(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        return [answer["choices"][0]["message"]]

    def result(self, call: Call, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call.id, "content": text}

    def calls(self, answer: dict[str, Any]) -> list[Call]:
        made = answer["choices"][0]["message"].get("tool_calls", ())
        functions = [(call["id"], call["function"]) for call in made]
        return [Call(name, f["name"], json.loads(f["arguments"])) for name, f in functions]

    def text(self, answer: dict[str, Any]) -> str:
        return answer["choices"][0]["message"]["content"] or ""


class ResponsesApi(Api):
    """The Responses API. The first rule becomes the request's instructions if it is a text; those
    after it belong to the same message. A text and a list of one part mean the same.
    """

    name = "responses"
    path = "/v1/responses"

    def body(self, given: Conversation) -> dict[str, Any]:
        messages = list(given.messages)
        body: dict[str, Any] = {}
        if messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
            body["instructions"] = messages.pop(0)["content"]
        items = [item for message in messages for item in self._items(message)]
        functions = given.tools and self.tools([tool["function"] for tool in given.tools])
        return _with_tools({**body, "input": items, "store": False}, functions)

    def _items(self, message: Message) -> list[dict[str, Any]]:
        role = message["role"]
        if role == "tool":
            output = _parts(message["content"], "input_text")
            name = message["tool_call_id"]
            return [{"type": "function_call_output", "call_id": name, "output": output}]
        items: list[dict[str, Any]] = []
        if thought := _thought(message):
            content = [{"type": "reasoning_text", "text": thought}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        if content := message.get("content"):
            kind = "output_text" if role == "assistant" else "input_text"
            items.append({"type": "message", "role": role, "content": _parts(content, kind)})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
        return items

    def same(self, given: Conversation) -> Conversation:
        messages = [_without_empty(message) for message in given.messages]
        num_rules = next(i for i, m in enumerate(messages) if m["role"] not in RULES)
        if num_rules > 1:
            parts = [part for m in messages[:num_rules] for part in _as_parts(m["content"])]
            messages[:num_rules] = [{**messages[0], "content": parts}]
        return replace(given, messages=tuple(map(_with_text, messages)))

    def tools(self, functions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"type": "function", **function} for function in functions]

    def request(self, turns: Sequence[Any], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return _with_tools({"input": turns, "store": False}, tools)

    def history(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        return list(answer["output"])

    def result(self, call: Call, text: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call.id, "output": text}

    def calls(self, answer: dict[str, Any]) -> list[Call]:
        return [
            Call(item["call_id"], item["name"], json.loads(item["arguments"]))
            for item in answer["output"]
            if item["type"] == "function_call"
        ]

    def text(self, answer: dict[str, Any]) -> str:
        messages = [item for item in answer["output"] if item["type"] == "message"]
        return "".join(part["text"] for item in messages for part in item["content"])


class MessagesApi(Api):
    """The Messages API. It has no developer role, and a tool has a schema."""

    name = "messages"
    path = "/v1/messages"

    def body(self, given: Conversation) -> dict[str, Any]:
        messages = list(given.messages)
        body: dict[str, Any] = {}
        if messages[0]["role"] in RULES:
            body["system"] = messages.pop(0)["content"]
        turns: list[dict[str, Any]] = []
        for message in messages:
            turn = self._turn(message)
            results = message["role"] == "tool" and turns[-1]["role"] == "user"
            if results:
                turns[-1]["content"] += turn["content"]
            else:
                turns.append(turn)
        functions = given.tools and self.tools([tool["function"] for tool in given.tools])
        return _with_tools({**body, "messages": turns, "max_tokens": 64}, functions)

    def _turn(self, message: Message) -> dict[str, Any]:
        role, content = message["role"], message.get("content")
        if role == "tool":
            name = message["tool_call_id"]
            result = {"type": "tool_result", "tool_use_id": name, "content": content}
            return {"role": "user", "content": [result]}
        if role in RULES:
            return {"role": "system", "content": content}
        blocks: list[dict[str, Any]] = []
        if thought := _thought(message):
            blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            used = {"id": call["id"], "name": function["name"]}
            blocks.append({"type": "tool_use", **used, "input": _object(function["arguments"])})
        if not blocks:
            return {"role": role, "content": content}
        at = bool(thought)
        return {"role": role, "content": [*blocks[:at], *_as_parts(content or ()), *blocks[at:]]}

    def same(self, given: Conversation) -> Conversation:
        messages = [
            {**_without_empty(m), "role": "system" if m["role"] in RULES else m["role"]}
            for m in given.messages
        ]
        tools = given.tools and tuple(
            {**tool, "function": {"parameters": ANY_OBJECT, **tool["function"]}}
            for tool in given.tools
        )
        return replace(given, messages=tuple(messages), tools=tools)

    def tools(self, functions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {
                **{key: value for key, value in function.items() if key != "parameters"},
                "input_schema": function.get("parameters", ANY_OBJECT),
            }
            for function in functions
        ]

    def request(self, turns: Sequence[Any], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return _with_tools({"messages": turns, "max_tokens": 512}, tools)

    def history(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": answer["content"]}]

    def result(self, call: Call, text: str) -> dict[str, Any]:
        result = {"type": "tool_result", "tool_use_id": call.id, "content": text}
        return {"role": "user", "content": [result]}

    def calls(self, answer: dict[str, Any]) -> list[Call]:
        return [
            Call(block["id"], block["name"], block["input"])
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]

    def text(self, answer: dict[str, Any]) -> str:
        return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


CHAT, RESPONSES, MESSAGES = APIS = (ChatApi(), ResponsesApi(), MessagesApi())


def _with_tools(body: dict[str, Any], tools: Iterable[dict[str, Any]] | None) -> dict[str, Any]:
    return {"model": "tiny", **body, **({"tools": list(tools)} if tools else {})}


def _thought(message: Message) -> str:
    return next((message[name] for name in THOUGHTS if name in message), "")


def _parts(content: Any, kind: str) -> Any:
    """Return parts with another type; a text unchanged."""
    return content if isinstance(content, str) else [{**part, "type": kind} for part in content]


def _as_parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _with_text(message: Message) -> Message:
    """Replace a list of one part by its text."""
    match message.get("content"):
        case [{"text": text}]:
            return {**message, "content": text}
    return message


def _without_empty(message: Message) -> Message:
    """Remove an empty text beside calls."""
    if "tool_calls" not in message or message.get("content"):
        return message
    return {key: value for key, value in message.items() if key != "content"}


def _object(arguments: str) -> Any:
    """Return the arguments of a call as an object; a text that is not a JSON object unchanged."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) and "NaN" not in arguments else arguments
