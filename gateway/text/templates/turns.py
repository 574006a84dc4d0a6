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


def shaped(message: Message, capabilities: Capabilities) -> dict[str, Any]:
    """Return a message with role, content, calls and reasoning in the template's form."""
    result = dict(message)
    if message["role"] == "tool":
        result["role"] = capabilities.results
    if (
        "tool_calls" in result
        and not capabilities.empty_beside_calls
        and not text_of(result).strip()
    ):
        result.pop("content", None)
    if "content" not in result:
        if capabilities.no_content != "absent" or message["role"] != "assistant":
            result["content"] = (
                None if capabilities.no_content == "null" and "tool_calls" in result else ""
            )
    else:
        result["content"] = _content(result["content"], message["role"], capabilities)
    if "tool_calls" in result:
        result["tool_calls"] = [_call(call, capabilities) for call in result["tool_calls"]]
    if "reasoning_content" in result:
        result |= dict.fromkeys(capabilities.reasoning, result["reasoning_content"])
    if capabilities.thinking_form and message["role"] == "assistant":
        thought, content = result.get("reasoning_content"), result.get("content")
        # A template that reads blocks refuses texts beside them.
        if thought or (capabilities.thinking_form == "blocks" and content is not None):
            result["content"] = thinking_content(capabilities.thinking_form, thought, content)
    return result


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


def with_single_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with one call per turn, each followed by its results. A result without a
    known call id belongs to the first call without a result."""
    turns: list[list[dict[str, Any]]] = []  # each with its results
    call_turns: list[list[dict[str, Any]]] = []  # turns of the last message with calls
    open_calls = _OpenCalls()
    for message in messages:
        if message["role"] == "tool" and call_turns:
            call_turns[open_calls.answer(message)].append(dict(message))
            continue
        open_calls = _OpenCalls(message)
        calls = message.get("tool_calls", ())
        call_turns = [[{"role": message["role"], "tool_calls": [call]}] for call in calls]
        if call_turns:
            call_turns[0][0] = {**message, **call_turns[0][0]}
        turns += call_turns or [[dict(message)]]
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
    turns = []
    by_id: dict[str, str] = {}
    calls: Sequence[Message] = ()  # of the last message with calls
    open_calls = _OpenCalls()
    for message in messages:
        turn = dict(message)
        turns.append(turn)
        if "tool_calls" in message:
            calls, open_calls = message["tool_calls"], _OpenCalls(message)
            by_id |= {str(call.get("id")): call["function"]["name"] for call in calls}
        elif message["role"] == "tool" and calls:
            default_name = calls[open_calls.answer(message)]["function"]["name"]
            id = message.get("tool_call_id")
            turn["name"] = (
                message.get("name") or (by_id.get(str(id)) if id else None) or default_name
            )
    return turns


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
    later_rules = [i for i in range(num_leading, len(turns)) if turns[i]["role"] in _RULES]
    for index in later_rules:
        place = "last" if index == len(turns) - 1 else "middle"
        if messages[index - 1]["role"] == "tool":
            place = "result"
        if num_leading == 0 and later_rules == [index] and "alone" in places:
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


def _content(content: Any, role: str, capabilities: Capabilities) -> Any:
    if not isinstance(content, str):
        if role in capabilities.list_roles:
            return content
        content = content_text(content, "")
    return content if role in capabilities.text_roles else [{"type": "text", "text": content}]


def _call(call: Message, capabilities: Capabilities) -> dict[str, Any]:
    arguments: CallArguments = call["function"]["arguments"]
    value: Any = arguments.text if capabilities.text_arguments else arguments.value
    if arguments.value is None:
        empty = "{}" if capabilities.text_arguments else {}
        value = arguments.text if capabilities.malformed_arguments else empty
    return {**call, "function": {**call["function"], "arguments": value}}


def _joined(turns: Sequence[Message]) -> dict[str, Any]:
    """Join turns into one with the role of the first."""
    result = {**turns[0], "content": "\n\n".join(filter(None, map(text_of, turns)))}
    thoughts = [turn["reasoning_content"] for turn in turns if turn.get("reasoning_content")]
    return result | {"reasoning_content": "\n\n".join(thoughts)} if thoughts else result


def _system_first(conversation: Conversation) -> Conversation:
    """Join leading rules into one system turn, and make later rules user turns."""
    return conversation._replace(
        messages=with_known_systems(conversation.messages, ("first",), developer=True)
    )


def _rules_joined(conversation: Conversation) -> Conversation:
    """Change as `_system_first`, for templates whose roles alternate: join a later rule with the
    adjacent user turn or the preceding result."""
    num_leading = _num_leading(conversation.messages)
    turns = [_joined(conversation.messages[:num_leading])] if num_leading else []
    after_rule = False
    for message in conversation.messages[num_leading:]:
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
    return conversation._replace(messages=turns)


def _alternating(conversation: Conversation) -> Conversation:
    """Change as `_rules_joined`, for templates with strictly alternating roles.

    Such templates refuse adjacent turns of one role, user turns next to results, empty answers, an
    answer before the first question, or rules alone. A user turn after a result becomes part of the
    result, because these templates refuse any turn between.
    """
    *earlier, last = _rules_joined(conversation).messages
    if last["role"] in _RULES:
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
    turns = [_joined(group) if group[1:] else dict(group[0]) for group in groups]
    return conversation._replace(messages=turns)


def _group(groups: list[list[Message]], messages: Sequence[Message]) -> None:
    """Add each message to the last group if alternating roles require it, else as a new group. Adds
    an empty question before an answer that would come first."""
    for message in messages:
        role, previous = message["role"], groups[-1][0] if groups else {"role": "system"}
        joinable_roles = {"user": ("user", "tool"), "assistant": ("assistant",)}.get(role, ())
        if previous["role"] in joinable_roles and "tool_calls" not in {**previous, **message}:
            groups[-1].append(message)
            continue
        if role == "assistant" and previous["role"] in _RULES:
            groups.append([{"role": "user", "content": ""}])
        groups.append([message])


def _one_thought(conversation: Conversation) -> Conversation:
    """Move the content beside calls into the reasoning, if there is reasoning."""
    messages = []
    for message in conversation.messages:
        text = text_of(message)
        if text and "tool_calls" in message and "reasoning_content" in message:
            thought = f"{message['reasoning_content']}\n\n{text}"
            message = {**message, "reasoning_content": thought, "content": ""}
        messages.append(message)
    return conversation._replace(messages=messages)


def _complete_tools(conversation: Conversation) -> Conversation:
    """Add all optional fields to the schemas of the tools."""
    if conversation.tools is None:
        return conversation
    return conversation._replace(tools=[_complete_tool(tool) for tool in conversation.tools])


def _dicts_of_any(conversation: Conversation) -> Conversation:
    """Change as `_complete_tools`, and allow objects any other properties explicitly, for templates
    that always read that keyword. Without a type: such templates write "Any" for null."""
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
    """Return an object schema with all fields."""
    return {"type": "object", "required": [], "properties": {}, **_complete_value(schema)}


def _complete_value(schema: Message) -> dict[str, Any]:
    """Return a schema without nulls and with single types and items."""
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
_ORDERS = (_system_first, _rules_joined, _alternating)  # at most one is applied
_CHANGES: tuple[Callable[[Conversation], Conversation], ...] = (
    _complete_tools,
    _dicts_of_any,
    _one_thought,
    *_ORDERS,
)
