"""Messages and tools in the forms that a chat template can render; pure."""

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from pdserve.gateway.text.messages import CallArguments, content_text
from pdserve.gateway.text.templates.capabilities import Capabilities

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
_RULES = ("system", "developer")


class Conversation(NamedTuple):
    messages: Sequence[Message]  # normalized
    tools: Tools | None


def shaped(message: Message, can: Capabilities) -> dict[str, Any]:
    """A message with its content, calls and thought in the form that the template takes."""
    made = dict(message)
    if message["role"] == "tool":
        made["role"] = can.results
    if "content" not in made:
        if can.no_content != "absent" or message["role"] != "assistant":
            made["content"] = None if can.no_content == "null" and "tool_calls" in made else ""
    else:
        made["content"] = _content(made["content"], message["role"], can)
    if "tool_calls" in made:
        made["tool_calls"] = [_call(call, can) for call in made["tool_calls"]]
    if "reasoning_content" in made:
        made |= dict.fromkeys(can.reasoning, made["reasoning_content"])
    return made


def with_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with contents that are one text each, for text to be added to them."""
    return [
        {**message, "content": text_of(message)} if "content" in message else dict(message)
        for message in messages
    ]


def text_of(message: Message) -> str:
    return content_text(message.get("content") or "", "")


def alternatives(first: Conversation) -> list[list[Conversation]]:
    """Conversations with the same content for a template that refuses the first one, grouped by how
    much they change, least first; 11 at most."""
    groups: list[list[Conversation]] = []
    made = [first]
    changes = [change for change in _CHANGES if change(first) != first]
    for count in range(1, len(changes) + 1):
        group = []
        for chosen in combinations(changes, count):
            if _system_first in chosen and _rules_joined in chosen:
                continue
            conversation = first
            for change in chosen:
                conversation = change(conversation)
            if conversation not in made:
                made.append(conversation)
                group.append(conversation)
        if group:
            groups.append(group)
    return groups


def with_known_systems(
    messages: Sequence[Message], places: Container[str], *, developer: bool
) -> list[dict[str, Any]]:
    """The messages with rules in the places that the template shows (Capabilities.systems):
    elsewhere the leading ones become one, and later ones turns of the user. `developer`: the
    template knows that role."""
    num_leading = _num_leading(messages)
    turns = [dict(message) for message in messages]
    if not developer or len({turn["role"] for turn in turns[:num_leading]}) > 1:
        for turn in turns:
            if turn["role"] == "developer":
                turn["role"] = "system"
    later = [i for i in range(num_leading, len(turns)) if turns[i]["role"] in _RULES]
    for index in later:
        place = "last" if index == len(turns) - 1 else "middle"
        if messages[index - 1]["role"] == "tool":
            place = "result"
        if num_leading == 0 and later == [index] and "alone" in places:
            continue
        if place not in places:
            turns[index]["role"] = "user"
    if num_leading > 1 and "several" not in places:
        turns[:num_leading] = [_joined(turns[:num_leading])]
    return turns


def _num_leading(messages: Sequence[Message]) -> int:
    """Rules at the beginning."""
    others = (i for i, message in enumerate(messages) if message["role"] not in _RULES)
    return next(others, len(messages))


def _content(content: Any, role: str, can: Capabilities) -> Any:
    if isinstance(content, str):
        if role in can.text_roles:
            return content
        return [{"type": "text", "text": content}]
    return content if role in can.list_roles else content_text(content, "")


def _call(call: Message, can: Capabilities) -> dict[str, Any]:
    arguments: CallArguments = call["function"]["arguments"]
    value: Any = arguments.text if can.text_arguments else arguments.value
    if arguments.value is None:
        empty = "{}" if can.text_arguments else {}
        value = arguments.text if can.malformed_arguments else empty
    return {**call, "function": {**call["function"], "arguments": value}}


def _joined(turns: Sequence[Message]) -> dict[str, Any]:
    """Turns as one, of the first one's role."""
    return {**turns[0], "content": "\n\n".join(filter(None, map(text_of, turns)))}


def _system_first(given: Conversation) -> Conversation:
    """One system turn, the first; turns of the user for later ones."""
    return given._replace(messages=with_known_systems(given.messages, (), developer=True))


def _rules_joined(given: Conversation) -> Conversation:
    """As `_system_first`, for templates in which roles alternate: a later rule is part of the turn
    of the user beside it, or of the result before it."""
    num_leading = _num_leading(given.messages)
    turns = [_joined(given.messages[:num_leading])] if num_leading else []
    after_rule = False
    for message in given.messages[num_leading:]:
        is_rule = message["role"] in _RULES
        turn = {**message, "role": "user"} if is_rule else dict(message)
        last = turns[-1]["role"] if turns else ""
        if (is_rule and last in ("user", "tool")) or (
            after_rule and last == turn["role"] == "user"
        ):
            turns[-1] = _joined([turns[-1], turn])
        else:
            turns.append(turn)
        after_rule = is_rule
    return given._replace(messages=turns)


def _one_thought(given: Conversation) -> Conversation:
    """What is said beside calls as part of the thought, where there is one."""
    messages = []
    for message in given.messages:
        said = text_of(message)
        if said and "tool_calls" in message and "reasoning_content" in message:
            thought = f"{message['reasoning_content']}\n\n{said}"
            message = {**message, "reasoning_content": thought, "content": ""}
        messages.append(message)
    return given._replace(messages=messages)


def _whole_tools(given: Conversation) -> Conversation:
    """Tools with every field that their schemas may leave out."""
    if given.tools is None:
        return given
    return given._replace(tools=[_whole_tool(tool) for tool in given.tools])


def _whole_tool(tool: Message) -> dict[str, Any]:
    function = dict(tool["function"])
    function["description"] = function.get("description") or ""
    function["parameters"] = _whole_schema(function.get("parameters") or {})
    return {**tool, "function": function}


def _whole_schema(schema: Message) -> dict[str, Any]:
    """Of an object."""
    properties = schema.get("properties")
    whole = {
        name: {"description": "", **({} if _has_type(held) else {"type": "string"}), **held}
        if isinstance(held, Mapping)
        else {"type": "string", "description": ""}
        for name, held in (properties if isinstance(properties, Mapping) else {}).items()
    }
    return {"type": "object", "required": [], **schema, "properties": whole}


def _has_type(schema: Message) -> bool:
    return any(key in schema for key in ("type", "anyOf", "oneOf", "allOf", "$ref", "enum"))


_CHANGES: tuple[Callable[[Conversation], Conversation], ...] = (
    _whole_tools,
    _one_thought,
    _system_first,
    _rules_joined,
)
