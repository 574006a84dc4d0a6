"""Rewrites a conversation on which a chat template fails to equivalent ones that the template may
accept; pure."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from pdserve.text.templates.turns import (
    SYSTEM_ROLES,
    Message,
    joined,
    num_leading_systems,
    text_of,
    with_known_systems,
)

Tools = Sequence[Mapping[str, Any]]


class Conversation(NamedTuple):
    messages: Sequence[Message]  # normalized
    tools: Tools | None


def alternatives(first: Conversation) -> list[list[Conversation]]:
    """Return rewritten forms of a conversation that say the same, to try if a template fails on
    `first`. They are grouped by the number of changes to it, fewest first; at most 23 in total."""
    groups: list[list[Conversation]] = []
    conversations = [first]
    changes = [change for change in _CHANGES if change(first) != first]
    for count in range(1, len(changes) + 1):
        group = []
        for chosen in combinations(changes, count):
            if sum(change in _ORDERS for change in chosen) > 1:
                continue
            if {_complete_tools, _dicts_of_any}.issubset(chosen):
                continue
            conversation = first
            for change in chosen:
                conversation = change(conversation)
            if conversation not in conversations:
                conversations.append(conversation)
                group.append(conversation)
        if group:
            groups.append(group)
    return groups


def _system_first(conversation: Conversation) -> Conversation:
    """Rewrite for templates that allow only one system turn, at the beginning: join the leading
    system turns into one, and make later ones user turns."""
    return conversation._replace(
        messages=with_known_systems(conversation.messages, ("first",), developer=True)
    )


def _systems_joined(conversation: Conversation) -> Conversation:
    """Rewrite like `_system_first`, for templates in which roles must alternate: a later system
    turn is joined with the adjacent user turn or the tool result before it, instead of becoming a
    turn."""
    num_leading = num_leading_systems(conversation.messages)
    turns = [joined(conversation.messages[:num_leading])] if num_leading else []
    after_system = False
    for message in conversation.messages[num_leading:]:
        is_system = message["role"] in SYSTEM_ROLES
        turn = {**message, "role": "user"} if is_system else dict(message)
        last = turns[-1]["role"] if turns else ""
        if (is_system and last in ("user", "tool")) or (
            after_system and last == turn["role"] == "user"
        ):
            turns[-1] = joined([turns[-1], turn])
        else:
            turns.append(turn)
        after_system = is_system
    return conversation._replace(messages=turns)


def _alternating(conversation: Conversation) -> Conversation:
    """Rewrite like `_systems_joined`, for templates that require strictly alternating roles.

    Such templates refuse two adjacent turns of one role, a user turn next to a tool result, an
    empty assistant turn, an assistant turn before the first user turn, and a conversation of system
    turns only. A user turn after a tool result is joined to the result, because these templates
    refuse any turn between the result and the next answer.
    """
    *earlier, last = _systems_joined(conversation).messages
    if last["role"] in SYSTEM_ROLES:
        last = {**last, "role": "user"}
    nonempty = [m for m in earlier if m["role"] != "assistant" or "tool_calls" in m or text_of(m)]
    groups: list[list[Message]] = []  # each is one turn
    postponed: list[Message] = []  # user turns that must come after the results of earlier calls
    for message in [*nonempty, last]:
        if message["role"] == "user" and groups and "tool_calls" in groups[-1][0]:
            postponed.append(message)
            continue
        if message["role"] != "tool":
            _group(groups, postponed)
            postponed = []
        _group(groups, [message])
    _group(groups, postponed)
    turns = [joined(group) if group[1:] else dict(group[0]) for group in groups]
    return conversation._replace(messages=turns)


def _group(groups: list[list[Message]], messages: Sequence[Message]) -> None:
    """Append messages to groups, each of which becomes one turn: a message joins the last group if
    alternating roles require it, else it starts a new group. An empty user turn is added before an
    assistant turn that would come first."""
    for message in messages:
        role, previous = message["role"], groups[-1][0] if groups else {"role": "system"}
        joinable_roles = {"user": ("user", "tool"), "assistant": ("assistant",)}.get(role, ())
        if previous["role"] in joinable_roles and "tool_calls" not in {**previous, **message}:
            groups[-1].append(message)
            continue
        if role == "assistant" and previous["role"] in SYSTEM_ROLES:
            groups.append([{"role": "user", "content": ""}])
        groups.append([message])


def _one_thought(conversation: Conversation) -> Conversation:
    """Move the text of an assistant message with tool calls and reasoning into its reasoning, for
    templates that refuse such a message with a text."""
    messages = []
    for message in conversation.messages:
        text = text_of(message)
        if text and "tool_calls" in message and "reasoning_content" in message:
            thought = f"{message['reasoning_content']}\n\n{text}"
            message = {**message, "reasoning_content": thought, "content": ""}
        messages.append(message)
    return conversation._replace(messages=messages)


def _complete_tools(conversation: Conversation) -> Conversation:
    """Rewrite the tools' schemas so that every field that is optional in JSON Schema is present,
    for templates that read it without checking."""
    if conversation.tools is None:
        return conversation
    return conversation._replace(tools=[_complete_tool(tool) for tool in conversation.tools])


def _dicts_of_any(conversation: Conversation) -> Conversation:
    """Rewrite like `_complete_tools`, and give every object schema `additionalProperties`, for
    templates that always read that keyword. Its type is null, which such templates write as
    "Any"."""
    if conversation.tools is None:
        return conversation
    tools = []
    for tool in map(_complete_tool, conversation.tools):
        function = tool["function"]
        schema = function["parameters"]
        parameters = {**schema, "properties": _with_dicts_of_any(schema)["properties"]}
        tools.append({**tool, "function": {**function, "parameters": parameters}})
    return conversation._replace(tools=tools)


def _with_dicts_of_any(schema: Message) -> dict[str, Any]:
    result = dict(schema)
    for key in _INNER:
        if isinstance(result.get(key), Mapping):
            result[key] = _with_dicts_of_any(result[key])
    if isinstance(properties := result.get("properties"), Mapping):
        result["properties"] = {
            name: _with_dicts_of_any(value) if isinstance(value, Mapping) else value
            for name, value in properties.items()
        }
    if result.get("type") == "object":
        result.setdefault("additionalProperties", {"type": None})
    return result


def _complete_tool(tool: Message) -> dict[str, Any]:
    function = dict(tool["function"])
    function["description"] = function.get("description") or ""
    function["parameters"] = _complete_schema(function.get("parameters") or {})
    return {**tool, "function": function}


def _complete_schema(schema: Message) -> dict[str, Any]:
    """Return a tool's parameter schema with `type`, `required`, `properties` and complete
    properties."""
    return {"type": "object", "required": [], "properties": {}, **_complete_value(schema)}


def _complete_value(schema: Message) -> dict[str, Any]:
    """Return a copy of a schema without null keywords, with one type instead of a list of types,
    and with one schema for all list items."""
    result = {
        key: value for key, value in schema.items() if value is not None or key in _MAY_BE_NULL
    }
    types = result.get("type")
    if isinstance(types, list):
        non_null = [item for item in types if item != "null"]
        result["type"] = non_null[0] if non_null else "string"
    if isinstance(result.get("items"), list):
        result["items"] = {"anyOf": result["items"]}
    for key in _INNER:
        if isinstance(result.get(key), Mapping):
            result[key] = _complete_value(result[key])
    if isinstance(properties := result.get("properties"), Mapping):
        result["properties"] = {name: _complete_property(item) for name, item in properties.items()}
    return result


def _complete_property(schema: Any) -> dict[str, Any]:
    result = _complete_value(schema) if isinstance(schema, Mapping) else {}
    defaults: dict[str, Any] = {"description": ""}
    if not _has_type(result):
        defaults["type"] = "string"
    return {**defaults, **result}


def _has_type(schema: Message) -> bool:
    return any(key in schema for key in ("type", "anyOf", "oneOf", "allOf", "$ref", "enum"))


_MAY_BE_NULL = ("default", "const")
_INNER = ("items", "additionalProperties")  # keywords whose value is a schema
_ORDERS = (_system_first, _systems_joined, _alternating)  # at most one is applied
_CHANGES: tuple[Callable[[Conversation], Conversation], ...] = (
    _complete_tools,
    _dicts_of_any,
    _one_thought,
    *_ORDERS,
)
