"""Converts messages and tools to forms that a chat template can render; pure."""

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

from pdserve.gateway.text.messages import CallArguments, content_text
from pdserve.gateway.text.templates.capabilities import Capabilities, thinking_content

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
_RULES = ("system", "developer")


class Conversation(NamedTuple):
    messages: Sequence[Message]  # normalized
    tools: Tools | None


def shaped(message: Message, can: Capabilities) -> dict[str, Any]:
    """Return a message with role, content, calls and reasoning in the template's form."""
    made = dict(message)
    if message["role"] == "tool":
        made["role"] = can.results
    if "tool_calls" in made and not can.empty_beside_calls and not text_of(made).strip():
        made.pop("content", None)
    if "content" not in made:
        if can.no_content != "absent" or message["role"] != "assistant":
            made["content"] = None if can.no_content == "null" and "tool_calls" in made else ""
    else:
        made["content"] = _content(made["content"], message["role"], can)
    if "tool_calls" in made:
        made["tool_calls"] = [_call(call, can) for call in made["tool_calls"]]
    if "reasoning_content" in made:
        made |= dict.fromkeys(can.reasoning, made["reasoning_content"])
    if can.thinking_form and message["role"] == "assistant":
        thought, content = made.get("reasoning_content"), made.get("content")
        # A template that reads blocks refuses texts beside them.
        if thought or (can.thinking_form == "blocks" and content is not None):
            made["content"] = thinking_content(can.thinking_form, thought, content)
    return made


def with_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with each content as one text, so that text can be added."""
    return [
        {**message, "content": text_of(message)} if "content" in message else dict(message)
        for message in messages
    ]


def text_of(message: Message) -> str:
    return content_text(message.get("content") or "", "")


def alternatives(first: Conversation) -> list[list[Conversation]]:
    """Return equivalent conversations to try if a template refuses the first one. They are grouped
    by number of changes, fewest first; at most 23 in total."""
    groups: list[list[Conversation]] = []
    made = [first]
    changes = [change for change in _CHANGES if change(first) != first]
    for count in range(1, len(changes) + 1):
        group = []
        for chosen in combinations(changes, count):
            if sum(change in _ORDERS for change in chosen) > 1:
                continue
            if {_whole_tools, _dicts_of_any}.issubset(chosen):
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
    """Return the messages with one call per turn, each followed by its results. A result without a
    known call id belongs to the first call without a result."""
    turns: list[list[dict[str, Any]]] = []  # each with its results
    of_calls: list[list[dict[str, Any]]] = []  # turns of the last message with calls
    open_calls = _OpenCalls()
    for message in messages:
        if message["role"] == "tool" and of_calls:
            of_calls[open_calls.answer(message)].append(dict(message))
            continue
        open_calls = _OpenCalls(message)
        calls = message.get("tool_calls", ())
        of_calls = [[{"role": message["role"], "tool_calls": [call]}] for call in calls]
        if of_calls:
            of_calls[0][0] = {**message, **of_calls[0][0]}
        turns += of_calls or [[dict(message)]]
    return list(chain.from_iterable(turns))


def with_calls_apart(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with no content beside calls: a text becomes a turn before the calls."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        turns.append(dict(message))
        if "tool_calls" not in message:
            continue
        if text_of(message).strip():
            calls = turns[-1].pop("tool_calls")
            turns.append({"role": message["role"], "tool_calls": calls})
        else:
            turns[-1].pop("content", None)
    return turns


def with_named_results(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with the names of the called functions in results without a name."""
    made = []
    by_id: dict[str, str] = {}
    calls: Sequence[Message] = ()  # of the last message with calls
    open_calls = _OpenCalls()
    for message in messages:
        turn = dict(message)
        made.append(turn)
        if "tool_calls" in message:
            calls, open_calls = message["tool_calls"], _OpenCalls(message)
            by_id |= {str(call.get("id")): call["function"]["name"] for call in calls}
        elif message["role"] == "tool" and calls:
            named = calls[open_calls.answer(message)]["function"]["name"]
            id = message.get("tool_call_id")
            turn["name"] = message.get("name") or (by_id.get(str(id)) if id else None) or named
    return made


class _OpenCalls:
    """The calls of a message that no result has answered yet."""

    def __init__(self, message: Message | None = None) -> None:
        calls = message.get("tool_calls", ()) if message else ()
        self._ids = [call.get("id") for call in calls]
        self._unanswered = list(range(len(self._ids)))

    def answer(self, result: Message) -> int:
        """Return the index of the call of a result: the one with its id, else the first without a
        result, else the last one."""
        id = result.get("tool_call_id")
        first = self._unanswered[0] if self._unanswered else len(self._ids) - 1
        index = self._ids.index(id) if id and id in self._ids else first
        if index in self._unanswered:
            self._unanswered.remove(index)
        return index


def with_known_systems(
    messages: Sequence[Message], places: Container[str], *, developer: bool
) -> list[dict[str, Any]]:
    """Return the messages with rules (system turns) only in places that the template shows.

    `places`: Capabilities.systems. Elsewhere, leading rules are joined and later ones become user
    turns. Without "first", the leading rules become part of the first user turn. `developer`: the
    template knows that role.
    """
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
    if num_leading and "first" not in places:
        is_next_user = num_leading < len(turns) and turns[num_leading]["role"] == "user"
        end = num_leading + is_next_user
        turns[:end] = [{**_joined(turns[:end]), "role": "user"}]
    elif num_leading > 1 and "several" not in places:
        turns[:num_leading] = [_joined(turns[:num_leading])]
    return turns


def _num_leading(messages: Sequence[Message]) -> int:
    """Return the number of rules at the beginning."""
    others = (i for i, message in enumerate(messages) if message["role"] not in _RULES)
    return next(others, len(messages))


def _content(content: Any, role: str, can: Capabilities) -> Any:
    if not isinstance(content, str):
        if role in can.list_roles:
            return content
        content = content_text(content, "")
    return content if role in can.text_roles else [{"type": "text", "text": content}]


def _call(call: Message, can: Capabilities) -> dict[str, Any]:
    arguments: CallArguments = call["function"]["arguments"]
    value: Any = arguments.text if can.text_arguments else arguments.value
    if arguments.value is None:
        empty = "{}" if can.text_arguments else {}
        value = arguments.text if can.malformed_arguments else empty
    return {**call, "function": {**call["function"], "arguments": value}}


def _joined(turns: Sequence[Message]) -> dict[str, Any]:
    """Join turns into one with the role of the first."""
    made = {**turns[0], "content": "\n\n".join(filter(None, map(text_of, turns)))}
    thoughts = [turn["reasoning_content"] for turn in turns if turn.get("reasoning_content")]
    return made | {"reasoning_content": "\n\n".join(thoughts)} if thoughts else made


def _system_first(given: Conversation) -> Conversation:
    """Join leading rules into one system turn, and make later rules user turns."""
    return given._replace(messages=with_known_systems(given.messages, ("first",), developer=True))


def _rules_joined(given: Conversation) -> Conversation:
    """Change as `_system_first`, for templates whose roles alternate: join a later rule with the
    adjacent user turn or the preceding result."""
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
    """Change as `_rules_joined`, for templates with strictly alternating roles.

    Such templates refuse adjacent turns of one role, user turns next to results, empty answers, an
    answer before the first question, or rules alone. A user turn after a result becomes part of the
    result, because these templates refuse any turn between.
    """
    *before, last = _rules_joined(given).messages
    if last["role"] in _RULES:
        last = {**last, "role": "user"}
    kept = [m for m in before if m["role"] != "assistant" or "tool_calls" in m or text_of(m)]
    groups: list[list[Message]] = []  # each is one turn
    waiting: list[Message] = []  # user turns that must come after the results of earlier calls
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
    """Add each message to the last group if alternating roles require it, else as a new group. Adds
    an empty question before an answer that would come first."""
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
    """Move the content beside calls into the reasoning, if there is reasoning."""
    messages = []
    for message in given.messages:
        said = text_of(message)
        if said and "tool_calls" in message and "reasoning_content" in message:
            thought = f"{message['reasoning_content']}\n\n{said}"
            message = {**message, "reasoning_content": thought, "content": ""}
        messages.append(message)
    return given._replace(messages=messages)


def _whole_tools(given: Conversation) -> Conversation:
    """Add all optional fields to the schemas of the tools."""
    if given.tools is None:
        return given
    return given._replace(tools=[_whole_tool(tool) for tool in given.tools])


def _dicts_of_any(given: Conversation) -> Conversation:
    """Change as `_whole_tools`, and say of objects that their other properties may be anything, for
    templates that always read that. Without a type: such templates write "Any" for null."""
    if given.tools is None:
        return given
    tools = []
    for tool in map(_whole_tool, given.tools):
        function = tool["function"]
        whole = function["parameters"]
        parameters = {**whole, "properties": _with_dicts_of_any(whole)["properties"]}
        tools.append({**tool, "function": {**function, "parameters": parameters}})
    return given._replace(tools=tools)


def _with_dicts_of_any(schema: Message) -> dict[str, Any]:
    made = dict(schema)
    for key in _INNER:
        if isinstance(made.get(key), Mapping):
            made[key] = _with_dicts_of_any(made[key])
    if isinstance(properties := made.get("properties"), Mapping):
        made["properties"] = {
            name: _with_dicts_of_any(one) if isinstance(one, Mapping) else one
            for name, one in properties.items()
        }
    if made.get("type") == "object":
        made.setdefault("additionalProperties", {"type": None})
    return made


def _whole_tool(tool: Message) -> dict[str, Any]:
    function = dict(tool["function"])
    function["description"] = function.get("description") or ""
    function["parameters"] = _whole_schema(function.get("parameters") or {})
    return {**tool, "function": function}


def _whole_schema(schema: Message) -> dict[str, Any]:
    """Return an object schema with all fields."""
    return {"type": "object", "required": [], "properties": {}, **_whole_value(schema)}


def _whole_value(schema: Message) -> dict[str, Any]:
    """Return a schema without nulls and with single types and items."""
    whole = {
        key: value for key, value in schema.items() if value is not None or key in _MAY_BE_NULL
    }
    types = whole.get("type")
    if isinstance(types, list):
        known = [one for one in types if one != "null"]
        whole["type"] = known[0] if known else "string"
    if isinstance(whole.get("items"), list):
        whole["items"] = {"anyOf": whole["items"]}
    for key in _INNER:
        if isinstance(whole.get(key), Mapping):
            whole[key] = _whole_value(whole[key])
    if isinstance(properties := whole.get("properties"), Mapping):
        whole["properties"] = {name: _whole_property(one) for name, one in properties.items()}
    return whole


def _whole_property(schema: Any) -> dict[str, Any]:
    whole = _whole_value(schema) if isinstance(schema, Mapping) else {}
    more: dict[str, Any] = {"description": ""}
    if not _has_type(whole):
        more["type"] = "string"
    return {**more, **whole}


def _has_type(schema: Message) -> bool:
    return any(key in schema for key in ("type", "anyOf", "oneOf", "allOf", "$ref", "enum"))


_MAY_BE_NULL = ("default", "const")
_INNER = ("items", "additionalProperties")  # keywords whose value is a schema
_ORDERS = (_system_first, _rules_joined, _alternating)  # at most one is applied
_CHANGES: tuple[Callable[[Conversation], Conversation], ...] = (
    _whole_tools,
    _dicts_of_any,
    _one_thought,
    *_ORDERS,
)
