"""Messages and tools in the forms that a chat template can render; pure."""

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import chain, combinations
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
        thought = made["reasoning_content"]
        made |= dict.fromkeys(can.reasoning, thought)
        if can.thinking_parts and thought:
            made["content"] = _thought_first(thought, made.get("content"))
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
    much they change, least first; 15 at most."""
    groups: list[list[Conversation]] = []
    made = [first]
    changes = [change for change in _CHANGES if change(first) != first]
    for count in range(1, len(changes) + 1):
        group = []
        for chosen in combinations(changes, count):
            if sum(change in _ORDERS for change in chosen) > 1:
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


def with_single_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with one call a turn, each before its results. A result that names no call
    belongs to the first call without one."""
    turns: list[list[dict[str, Any]]] = []  # each with the results that belong to it
    of_calls: list[list[dict[str, Any]]] = []  # those of the last message with calls
    for message in messages:
        if message["role"] == "tool" and of_calls:
            _turn_of(message, of_calls).append(dict(message))
            continue
        calls = message.get("tool_calls", ())
        of_calls = [[{"role": message["role"], "tool_calls": [call]}] for call in calls]
        if of_calls:
            of_calls[0][0] = {**message, **of_calls[0][0]}
        turns += of_calls or [[dict(message)]]
    return list(chain.from_iterable(turns))


def _turn_of(result: Message, turns: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The turn whose call a result answers."""
    name = result.get("tool_call_id")
    named = (turn for turn in turns if name and turn[0]["tool_calls"][0].get("id") == name)
    unanswered = (turn for turn in turns if len(turn) == 1)
    return next(named, None) or next(unanswered, turns[-1])


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
    if not isinstance(content, str):
        if role in can.list_roles:
            return content
        content = content_text(content, "")
    return content if role in can.text_roles else [{"type": "text", "text": content}]


def _thought_first(thought: str, content: Any) -> list[dict[str, Any]]:
    """A content as parts, the first of which is a thought."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    return [{"type": "thinking", "thinking": thought}, *(content or ())]


def _call(call: Message, can: Capabilities) -> dict[str, Any]:
    arguments: CallArguments = call["function"]["arguments"]
    value: Any = arguments.text if can.text_arguments else arguments.value
    if arguments.value is None:
        empty = "{}" if can.text_arguments else {}
        value = arguments.text if can.malformed_arguments else empty
    return {**call, "function": {**call["function"], "arguments": value}}


def _joined(turns: Sequence[Message]) -> dict[str, Any]:
    """Turns as one, of the first one's role."""
    made = {**turns[0], "content": "\n\n".join(filter(None, map(text_of, turns)))}
    thoughts = [turn["reasoning_content"] for turn in turns if turn.get("reasoning_content")]
    return made | {"reasoning_content": "\n\n".join(thoughts)} if thoughts else made


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


def _alternating(given: Conversation) -> Conversation:
    """As `_rules_joined`, for templates that refuse turns of one role side by side, turns of the
    user beside results, empty answers, an answer before the first question, or rules alone. What
    the user says after a result becomes part of it: these templates refuse any turn between."""
    *before, last = _rules_joined(given).messages
    if last["role"] in _RULES:
        last = {**last, "role": "user"}
    kept = [m for m in before if m["role"] != "assistant" or "tool_calls" in m or text_of(m)]
    groups: list[list[Message]] = []  # each is one turn
    waiting: list[Message] = []  # for the results of calls before them
    for message in [*kept, last]:
        if message["role"] == "user" and groups and "tool_calls" in groups[-1][0]:
            waiting.append(message)
            continue
        if message["role"] != "tool":
            _group(groups, waiting)
            waiting = []
        _group(groups, [message])
    _group(groups, waiting)
    turns = [_joined(group) if group[1:] else dict(group[0]) for group in groups]
    return given._replace(messages=turns)


def _group(groups: list[list[Message]], messages: Sequence[Message]) -> None:
    """Add messages to the last group where roles alternate, else as groups of their own, with an
    empty question before an answer that comes first."""
    for message in messages:
        role, before = message["role"], groups[-1][0] if groups else {"role": "system"}
        joins = {"user": ("user", "tool"), "assistant": ("assistant",)}.get(role, ())
        if before["role"] in joins and "tool_calls" not in {**before, **message}:
            groups[-1].append(message)
            continue
        if role == "assistant" and before["role"] in _RULES:
            groups.append([{"role": "user", "content": ""}])
        groups.append([message])


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
    return {"type": "object", "required": [], "properties": {}, **_whole_value(schema)}


def _whole_value(schema: Message) -> dict[str, Any]:
    """A schema without nulls, whose types and items are one each and whose objects say what other
    properties they may have."""
    whole = {
        key: value for key, value in schema.items() if value is not None or key in _MAY_BE_NULL
    }
    types = whole.get("type")
    if isinstance(types, list):
        known = [one for one in types if one != "null"]
        whole["type"] = known[0] if known else "string"
    if isinstance(whole.get("items"), list):
        whole["items"] = {"anyOf": whole["items"]}
    if isinstance(whole.get("items"), Mapping):
        whole["items"] = _whole_value(whole["items"])
    if isinstance(properties := whole.get("properties"), Mapping):
        whole["properties"] = {name: _whole_property(one) for name, one in properties.items()}
    return whole


def _whole_property(schema: Any) -> dict[str, Any]:
    whole = _whole_value(schema) if isinstance(schema, Mapping) else {}
    more: dict[str, Any] = {"description": ""}
    if not _has_type(whole):
        more["type"] = "string"
    elif whole.get("type") == "object":
        more["additionalProperties"] = {"type": "string"}
    return {**more, **whole}


def _has_type(schema: Message) -> bool:
    return any(key in schema for key in ("type", "anyOf", "oneOf", "allOf", "$ref", "enum"))


_MAY_BE_NULL = ("default", "const")
_ORDERS = (_system_first, _rules_joined, _alternating)  # one of them at most
_CHANGES: tuple[Callable[[Conversation], Conversation], ...] = (
    _whole_tools,
    _one_thought,
    *_ORDERS,
)
