"""Messages of Anthropic's API made into those that chat templates expect; pure."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from pdserve.gateway.sampling import refuse
from pdserve.services.host.errors import ServiceError, quoted

Block = Mapping[str, Any]
_IGNORED = ("redacted_thinking",)  # another provider's secret, which no template can show
Part = dict[str, str]


def conversation(
    system: str | Sequence[Block] | None, messages: Sequence[tuple[str, str | Sequence[Block]]]
) -> list[dict[str, Any]]:
    """The turns of a chat; `messages` are pairs of a role and a content.

    Messages of the assistant that follow each other are one turn. Results of tools are turns of
    their own, and texts of the user that follow each other are one turn, since many templates want
    turns to alternate. Raises ServiceError for a block that is not
    served, that has another role's kind, or that answers a call which nobody made, and if there is
    no turn at all.
    """
    turns: list[dict[str, Any]] = []
    rules = _texts(system or (), "system")
    if rules:
        turns.append({"role": "system", "content": rules})
    calls: set[str] = set()
    for role, run in groupby(enumerate(messages), lambda numbered: numbered[1][0]):
        blocks = chain.from_iterable(
            _blocks(content, f"messages[{index}].content") for index, (_, content) in run
        )
        if role == "assistant":
            turns.append(_assistant(blocks, calls))
        else:
            _add_user(turns, blocks, calls)
    if all(turn["role"] == "system" for turn in turns):
        raise refuse("messages", "messages: they have no content")
    return turns


def _assistant(blocks: Iterable[tuple[Block, str]], calls: set[str]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": None}
    texts: list[str] = []
    thoughts: list[str] = []
    made = []
    for block, here in blocks:
        kind = block["type"]
        if kind == "text":
            texts.append(_string(block, "text", here))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", here))
        elif kind == "tool_use":
            name, function = _string(block, "id", here), _string(block, "name", here)
            arguments = block.get("input")
            if not isinstance(arguments, Mapping):
                raise refuse(f"{here}.input", f"{here}.input must be an object")
            calls.add(name)
            called = {"name": function, "arguments": arguments}
            made.append({"id": name, "type": "function", "function": called})
        elif kind not in _IGNORED:
            raise _unsupported(kind, here, "assistant")
    if texts or not made:
        turn["content"] = "\n".join(texts)
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if made:
        turn["tool_calls"] = made
    return turn


def _add_user(
    turns: list[dict[str, Any]], blocks: Iterable[tuple[Block, str]], calls: set[str]
) -> None:
    for block, here in blocks:
        kind = block["type"]
        if kind == "text":
            if not turns or turns[-1]["role"] != "user":
                turns.append({"role": "user", "content": []})
            turns[-1]["content"].append(_part(block, here))
        elif kind == "tool_result":
            name = _string(block, "tool_use_id", here)
            if name not in calls:
                text = f"no tool_use before it has the id {quoted(name)}"
                raise refuse(f"{here}.tool_use_id", f"{here}.tool_use_id: {text}")
            texts = _texts(block.get("content") or (), f"{here}.content")
            if block.get("is_error") is True:  # a chat has no other place for it
                texts.insert(0, {"type": "text", "text": "Error:"})
            turns.append({"role": "tool", "tool_call_id": name, "content": texts})
        else:
            raise _unsupported(kind, here, "user")


def _blocks(content: str | Sequence[Block], at: str) -> list[tuple[Block, str]]:
    """Each block, and where it stands."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, at)]
    found = []
    for index, block in enumerate(content):
        here = f"{at}[{index}]"
        _string(block, "type", here)
        found.append((block, here))
    return found


def _texts(content: str | Sequence[Block], at: str) -> list[Part]:
    """Raises ServiceError for a block that is no text."""
    if not isinstance(content, str | list | tuple):
        raise refuse(at, f"{at} must be a string or a list of blocks")
    parts = []
    for block, here in _blocks(content, at):
        if block["type"] != "text":
            raise _unsupported(block["type"], here, "")
        parts.append(_part(block, here))
    return parts


def _part(block: Block, at: str) -> Part:
    return {"type": "text", "text": _string(block, "text", at)}


def _string(block: Any, key: str, at: str) -> str:
    value = block.get(key) if isinstance(block, Mapping) else None
    if not isinstance(value, str):
        raise refuse(f"{at}.{key}", f"{at}.{key} must be a string")
    return value


def _unsupported(kind: str, at: str, role: str) -> ServiceError:
    where = f" in a message of the {role}" if role else " here"
    text = f"blocks of type {quoted(kind)} are not supported by this server{where}"
    return refuse(f"{at}.type", f"{at}.type: {text}")
