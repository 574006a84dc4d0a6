"""Writes tools as plain text, for chat templates without tool support; pure.

One text describes the tools and how to call them. Calls become text of the assistant's turns in the
described form, and results become text of user turns, which every template can render. All of it
counts as client text, so it never becomes special tokens.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.text.parsing import CallForm
from pdserve.text.templates.turns import with_named_results

Message = Mapping[str, Any]


def described(tools: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    """Return a text that describes the tools and the form in which to call them."""
    functions = "\n".join(_json(tool["function"]) for tool in tools)
    return (
        "You can call these functions. Each has a name, and a JSON schema of its arguments:\n"
        f"{functions}\n\n"
        "To call a function, write its name and its arguments as JSON in this form:\n"
        f"{form.begin}{{...}}{form.end}\n"
        "To call several, write several. The results are in the next message."
    )


def plain_turns(
    messages: Sequence[Message], form: CallForm, *, calls: bool = True, results: bool = True
) -> list[dict[str, Any]]:
    """Return the messages with tool `calls` and `results` (role `tool`) as text. User turns that
    become adjacent through this are joined, for templates whose roles alternate."""
    turns: list[dict[str, Any]] = []
    previous_is_result = False
    for turn in with_named_results(messages):
        turn_calls = turn.get("tool_calls", ())
        if turn_calls and calls:
            del turn["tool_calls"]
            turn["content"] = _lines(
                turn.get("content"), *(_call(call, form) for call in turn_calls)
            )
        is_result = results and turn["role"] == "tool"
        if is_result:
            turn = {"role": "user", "content": _result(turn)}
        if (
            turns
            and turns[-1]["role"] == turn["role"] == "user"
            and (is_result or previous_is_result)
        ):
            turns[-1]["content"] = _lines(turns[-1]["content"], turn["content"])
        else:
            turns.append(turn)
        previous_is_result = is_result
    return turns


def in_system_turn(turns: Sequence[Message], text: str) -> list[dict[str, Any]]:
    """Return the turns with a text appended to the system turn, which is added if missing."""
    first, *others = turns
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *map(dict, turns)]
    content = _lines(first["content"], text, separator="\n\n")
    return [{**first, "content": content}, *map(dict, others)]


def _call(call: Message, form: CallForm) -> str:
    function = call["function"]
    begin = form.begin.replace("NAME", function["name"])
    value, text = function["arguments"].value, function["arguments"].text
    return begin + (text if value is None else _json(value)) + form.end


def _result(message: Message) -> str:
    return f"Result of {message.get('name') or 'the call'}:\n{message['content']}"


def _lines(*texts: str | None, separator: str = "\n") -> str:
    return separator.join(text for text in texts if text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
