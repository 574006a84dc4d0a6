"""Converts the messages of a conversation to the form that a chat template can render; pure.

For a template without tool support, tools are written as plain text: a text in the system turn
describes the tools and how to call them, earlier calls become text of assistant turns in that form,
and results become text of user turns. All of this counts as client text, so it never becomes
special tokens.
"""

import json
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from typing import Any

from pdserve.text.messages import CallArguments, content_text
from pdserve.text.parsing import CallForm
from pdserve.text.templates.capabilities import Capabilities, thinking_content

Message = Mapping[str, Any]
SYSTEM_ROLES = ("system", "developer")


def shaped(message: Message, capabilities: Capabilities) -> dict[str, Any]:
    """Return a message whose role, content, tool calls and reasoning have the form that the
    template expects."""
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


def with_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with every content converted to one text, so that text can be
    appended."""
    return [
        {**message, "content": text_of(message)} if "content" in message else dict(message)
        for message in messages
    ]


def text_of(message: Message) -> str:
    return content_text(message.get("content") or "", "")


def with_single_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Split turns with several tool calls into turns with one call, each followed by its results. A
    result whose call id is unknown is assigned to the first call without a result."""
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
    """Split turns with both text and tool calls into a turn with the text and a turn with the
    calls."""
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
    """Add the name of the called function to each tool result that lacks it."""
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
    """The tool calls of one message for which no result has come yet."""

    def __init__(self, message: Message | None = None) -> None:
        calls = message.get("tool_calls", ()) if message else ()
        self._ids = [call.get("id") for call in calls]
        self._unanswered = list(range(len(self._ids)))

    def answer(self, result: Message) -> int:
        """Return the index of the call to which a tool result belongs: the call with its id, else
        the first without a result, else the last one. Then that call counts as having a result."""
        id = result.get("tool_call_id")
        first = self._unanswered[0] if self._unanswered else len(self._ids) - 1
        index = self._ids.index(id) if id and id in self._ids else first
        if index in self._unanswered:
            self._unanswered.remove(index)
        return index


def with_known_systems(
    messages: Sequence[Message], places: Container[str], *, developer: bool
) -> list[dict[str, Any]]:
    """Change system turns (role "system" or "developer") in places where the template does not show
    them.

    In such places, leading system turns are joined into one and later ones become user turns. If
    the template shows no system turn at the beginning, the leading ones become part of the first
    user turn. `places`: the places where the template shows system turns (Capabilities.systems).
    `developer`: the template knows the role "developer"; if not, that role becomes "system".
    """
    num_leading = num_leading_systems(messages)
    turns = [dict(message) for message in messages]
    if not developer or len({turn["role"] for turn in turns[:num_leading]}) > 1:
        for turn in turns:
            if turn["role"] == "developer":
                turn["role"] = "system"
    later_systems = [i for i in range(num_leading, len(turns)) if turns[i]["role"] in SYSTEM_ROLES]
    for index in later_systems:
        place = "last" if index == len(turns) - 1 else "middle"
        if messages[index - 1]["role"] == "tool":
            place = "result"
        if num_leading == 0 and later_systems == [index] and "alone" in places:
            continue
        if place not in places:
            turns[index]["role"] = "user"
    if num_leading and "first" not in places:
        is_next_user = num_leading < len(turns) and turns[num_leading]["role"] == "user"
        end = num_leading + is_next_user
        turns[:end] = [{**joined(turns[:end]), "role": "user"}]
    elif num_leading > 1 and "several" not in places:
        turns[:num_leading] = [joined(turns[:num_leading])]
    return turns


def num_leading_systems(messages: Sequence[Message]) -> int:
    """Return the number of system turns at the beginning of a conversation."""
    others = (i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES)
    return next(others, len(messages))


def joined(turns: Sequence[Message]) -> dict[str, Any]:
    """Join several turns into one, which has the role of the first and their texts and
    reasoning."""
    result = {**turns[0], "content": "\n\n".join(filter(None, map(text_of, turns)))}
    thoughts = [turn["reasoning_content"] for turn in turns if turn.get("reasoning_content")]
    return result | {"reasoning_content": "\n\n".join(thoughts)} if thoughts else result


def tools_description(tools: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    """Return the text that tells a model which tools exist and how to write a call, for a template
    without tool support."""
    functions = "\n".join(_json_text(tool["function"]) for tool in tools)
    return (
        "You can call these functions. Each has a name, and a JSON schema of its arguments:\n"
        f"{functions}\n\n"
        "To call a function, write its name and its arguments as JSON in this form:\n"
        f"{form.begin}{{...}}{form.end}\n"
        "To call several, write several. The results are in the next message."
    )


def with_plain_tools(
    messages: Sequence[Message], form: CallForm, *, calls: bool = True, results: bool = True
) -> list[dict[str, Any]]:
    """Convert tool calls (if `calls`) and tool results (if `results`) to plain text in assistant
    and user turns. User turns that become adjacent are joined, for templates whose roles must
    alternate."""
    turns: list[dict[str, Any]] = []
    previous_is_result = False
    for turn in with_named_results(messages):
        turn_calls = turn.get("tool_calls", ())
        if turn_calls and calls:
            del turn["tool_calls"]
            turn["content"] = _joined_lines(
                turn.get("content"), *(_call_text(call, form) for call in turn_calls)
            )
        is_result = results and turn["role"] == "tool"
        if is_result:
            turn = {"role": "user", "content": _result_text(turn)}
        if (
            turns
            and turns[-1]["role"] == turn["role"] == "user"
            and (is_result or previous_is_result)
        ):
            turns[-1]["content"] = _joined_lines(turns[-1]["content"], turn["content"])
        else:
            turns.append(turn)
        previous_is_result = is_result
    return turns


def in_system_turn(turns: Sequence[Message], text: str) -> list[dict[str, Any]]:
    """Append a text to the system turn at the beginning; add such a turn if there is none."""
    first, *others = turns
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *map(dict, turns)]
    content = _joined_lines(first["content"], text, separator="\n\n")
    return [{**first, "content": content}, *map(dict, others)]


def _call_text(call: Message, form: CallForm) -> str:
    function = call["function"]
    begin = form.begin.replace("NAME", function["name"])
    value, text = function["arguments"].value, function["arguments"].text
    return begin + (text if value is None else _json_text(value)) + form.end


def _result_text(message: Message) -> str:
    return f"Result of {message.get('name') or 'the call'}:\n{message['content']}"


def _joined_lines(*texts: str | None, separator: str = "\n") -> str:
    return separator.join(text for text in texts if text)


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
