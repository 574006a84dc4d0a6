"""Converts messages of Anthropic's API to those that chat templates expect; pure."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from pydantic_core import to_json

from pdserve.gateway.anthropic.members import (
    ASSISTANT_BLOCKS,
    RESULT_BLOCKS,
    SOURCE_BLOCKS,
    SOURCES,
    SYSTEM_BLOCKS,
    USER_BLOCKS,
)
from pdserve.gateway.anthropic.signature import hidden_thought
from pdserve.gateway.requests.members import DROPPED, REFUSED, Fate, Member, Table, note
from pdserve.gateway.sampling import refuse
from pdserve.services.host.errors import quoted

Block = Mapping[str, Any]
Part = dict[str, str]
_BILLING = "x-anthropic-billing-header:"  # a line of Claude Code that differs in each request


def conversation(
    system: str | Sequence[Block] | None,
    messages: Sequence[tuple[str, str | Sequence[Block] | None]],
) -> list[dict[str, Any]]:
    """Return the turns of a chat; `messages` are pairs of a role and a content, None for a message
    that is left out.

    Consecutive messages of the assistant are one turn. Results of tools are separate turns right
    after their calls, and consecutive texts of the user are one turn, since many templates require
    turns to alternate. Each system message is a turn in its place. Raises ServiceError for a block
    that is not served, that belongs to another role, or that answers a call which is not there, and
    if the messages have no content at all.
    """
    made = _Turns()
    made.add_system(system or (), "system")
    num_rules = len(made.turns)
    shown = [
        (role, content, f"messages[{index}].content")
        for index, (role, content) in enumerate(messages)
        if content is not None
    ]
    for role, run in groupby(shown, lambda message: message[0]):
        if role == "system":
            for _, content, at in run:
                made.add_system(content, at)
            continue
        blocks = chain.from_iterable(_blocks(content, at) for _, content, at in run)
        if role == "assistant":
            made.add_assistant(blocks)
        else:
            made.add_user(blocks)
    note(Fate.DROPPED, "blocks", made.dropped)
    if len(made.turns) == num_rules:
        raise refuse("messages", "messages: they have no content")
    return made.turns


class _Turns:
    """Builder of the turns; collects the kinds of blocks that are `dropped`."""

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []
        self.dropped: set[str] = set()
        self._calls: set[str] = set()  # ids of the calls so far
        self._results_at = 0  # where the results of the last calls go

    def add_system(self, content: str | Sequence[Block], at: str) -> None:
        parts = self._texts(content, at, SYSTEM_BLOCKS)
        for part in parts:
            if part["text"].startswith(_BILLING):
                part["text"] = part["text"].partition("\n")[2]
        if parts := [part for part in parts if part["text"]]:
            self.turns.append({"role": "system", "content": parts})

    def add_assistant(self, blocks: Iterable[tuple[Block, str]]) -> None:
        turn: dict[str, Any] = {"role": "assistant", "content": None}
        texts: list[str] = []
        thoughts: list[str] = []
        made = []
        for block, here in blocks:
            kind = block["type"]
            if kind == "thinking":
                thought = _string(block, "thinking", here)
                thoughts.append(thought or hidden_thought(block.get("signature")))
            elif kind == "tool_use":
                name, function = _string(block, "id", here), _string(block, "name", here)
                self._calls.add(name)
                called = {"name": function, "arguments": _arguments(block.get("input"))}
                made.append({"id": name, "type": "function", "function": called})
            else:
                member = ASSISTANT_BLOCKS.get(kind, DROPPED)
                texts += self._text(block, here, member, " in a message of the assistant")
        if texts or not made:
            turn["content"] = "\n".join(texts)
        if any(thoughts):
            turn["reasoning_content"] = "\n".join(filter(None, thoughts))
        if made:
            turn["tool_calls"] = made
        self.turns.append(turn)
        self._results_at = len(self.turns)

    def add_user(self, blocks: Iterable[tuple[Block, str]]) -> None:
        for block, here in blocks:
            if block["type"] == "tool_result":
                self._add_result(block, here)
                continue
            member = USER_BLOCKS.get(block["type"], REFUSED)
            for text in self._text(block, here, member, " in a message of the user"):
                if not self.turns or self.turns[-1]["role"] != "user":
                    self.turns.append({"role": "user", "content": []})
                self.turns[-1]["content"].append({"type": "text", "text": text})

    def _add_result(self, block: Block, here: str) -> None:
        name = _string(block, "tool_use_id", here)
        if name not in self._calls:
            text = f"no tool_use before it has the id {quoted(name)}"
            raise refuse(f"{here}.tool_use_id", f"{here}.tool_use_id: {text}")
        given = block.get("content") or ""
        content: str | list[Part] = given
        if not isinstance(given, str):
            content = self._texts(given, f"{here}.content", RESULT_BLOCKS)
        if block.get("is_error") is True:  # a chat has no other place for it
            if isinstance(content, str):
                content = f"Error:\n{content}"
            else:
                content.insert(0, {"type": "text", "text": "Error:"})
        turn = {"role": "tool", "tool_call_id": name, "content": content}
        self.turns.insert(self._results_at, turn)
        self._results_at += 1

    def _texts(self, content: str | Sequence[Block], at: str, table: Table) -> list[Part]:
        """Return the texts as parts. Raises ServiceError for a block without a text."""
        if not isinstance(content, str | list | tuple):
            raise refuse(at, f"{at} must be a string or a list of blocks")
        return [
            {"type": "text", "text": text}
            for block, here in _blocks(content, at)
            for text in self._text(block, here, table.get(block["type"], REFUSED), " here")
        ]

    def _text(self, block: Block, at: str, member: Member, where: str) -> list[str]:
        """Return the text of a block; empty if the block is dropped. Raises ServiceError if it is
        refused."""
        kind = block["type"]
        if kind == "text":
            return [_string(block, "text", at)]
        if member.fate is Fate.AS_TEXT:
            if kind == "document":
                block = {**block, "source": self._source(block.get("source"), f"{at}.source")}
            return [member.as_text(kind, block)]
        if member.fate is not Fate.DROPPED:
            text = f"blocks of type {quoted(kind)} are not supported by this server{where}"
            raise refuse(f"{at}.type", f"{at}.type: {text}")
        self.dropped.add(kind)
        return []

    def _source(self, source: Any, at: str) -> str:
        """Return the text of a document's source. Raises ServiceError for one without a text."""
        kind = _string(source, "type", at)
        if SOURCES.get(kind, REFUSED) is REFUSED:
            text = f"sources of type {quoted(kind)} are not supported by this server"
            raise refuse(f"{at}.type", f"{at}.type: {text}")
        if kind == "text":
            return _string(source, "data", at)
        parts = self._texts(source.get("content") or (), f"{at}.content", SOURCE_BLOCKS)
        return "\n".join(part["text"] for part in parts)


def _arguments(given: Any) -> Any:
    """Return an object as it is, anything else as the text that the model has written."""
    if given is None:
        return {}
    return given if isinstance(given, Mapping | str) else to_json(given).decode()


def _blocks(content: str | Sequence[Block], at: str) -> list[tuple[Block, str]]:
    """Return each block with its place in the request."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, at)]
    found = []
    for index, block in enumerate(content):
        here = f"{at}[{index}]"
        _string(block, "type", here)
        found.append((block, here))
    return found


def _string(block: Any, key: str, at: str) -> str:
    value = block.get(key) if isinstance(block, Mapping) else None
    if not isinstance(value, str):
        raise refuse(f"{at}.{key}", f"{at}.{key} must be a string")
    return value
