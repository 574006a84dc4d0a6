"""Converts messages of Anthropic's API to the form that chat templates expect. Also the tables of
how each type of block is handled, and the signatures of thinking blocks.

A signature does not prove that the model wrote the reasoning: a client may send any. If the
reasoning is hidden from the client, the signature contains its text, so that it can be part of the
next turn's prompt.
"""

import binascii
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import chain, groupby
from typing import Any

from pydantic_core import to_json

from pdserve.gateway.http.fields import (
    ACCEPTED_TYPE,
    DROPPED_TYPE,
    OMITTED_TYPE,
    REFUSED_TYPE,
    SERVED_TYPE,
    EntryType,
    EntryTypes,
    Handling,
    kept_as_text,
    log_unsupported,
)
from pdserve.gateway.sampling import refuse
from pdserve.services.common.errors import quoted

ROLES: EntryTypes = {"user": SERVED_TYPE, "assistant": SERVED_TYPE, "system": SERVED_TYPE}
# Results of a provider's own tools, and related blocks.
_HISTORY: dict[str, EntryType] = {
    "server_tool_use": kept_as_text("name", "input"),
    "mcp_tool_use": kept_as_text("server_name", "name", "input"),
    **dict.fromkeys(
        (
            "web_search_tool_result", "web_fetch_tool_result", "advisor_tool_result",
            "code_execution_tool_result", "bash_code_execution_tool_result",
            "text_editor_code_execution_tool_result", "tool_search_tool_result",
            "mcp_tool_result",
        ),
        kept_as_text("content"),
    ),
    "compaction": kept_as_text("content"),
    "redacted_thinking": DROPPED_TYPE,
    "fallback": DROPPED_TYPE,
    "mcp_tool_listing": DROPPED_TYPE,
    "tool_addition": DROPPED_TYPE,  # every tool of the request is offered from the start
    "tool_removal": REFUSED_TYPE,
    "image": REFUSED_TYPE,
    "container_upload": REFUSED_TYPE,
}  # fmt: skip
_TEXTS: dict[str, EntryType] = {
    "text": SERVED_TYPE,
    "search_result": kept_as_text("title", "source", "content", of_client=True),
    "document": kept_as_text("title", "context", "source", of_client=True),
}
# Of documents. The text of a source that is served is kept.
SOURCES: EntryTypes = {
    "text": SERVED_TYPE,
    "content": SERVED_TYPE,
    **dict.fromkeys(("base64", "url", "file"), REFUSED_TYPE),
}
SOURCE_BLOCKS: EntryTypes = {"text": SERVED_TYPE, "image": REFUSED_TYPE}
USER_BLOCKS: EntryTypes = {
    **_TEXTS,
    "tool_result": SERVED_TYPE,
    "thinking": DROPPED_TYPE,
    "tool_use": REFUSED_TYPE,
    **_HISTORY,
}
# A block whose type is not listed is dropped.
ASSISTANT_BLOCKS: EntryTypes = {
    **_TEXTS,
    "thinking": SERVED_TYPE,
    "tool_use": SERVED_TYPE,
    "tool_result": REFUSED_TYPE,
    **_HISTORY,
}
SYSTEM_BLOCKS: EntryTypes = {
    "text": SERVED_TYPE,
    "tool_addition": DROPPED_TYPE,
    "tool_removal": REFUSED_TYPE,
}
RESULT_BLOCKS: EntryTypes = {
    **_TEXTS,
    "tool_reference": kept_as_text("tool_name"),
    "browser_state": kept_as_text("tabs", "state_changes"),
    "image": REFUSED_TYPE,
}
# A tool whose type is not listed belongs to the provider, and is left out.
TOOLS: EntryTypes = {
    "custom": SERVED_TYPE,
    "function": REFUSED_TYPE,  # OpenAI's form
    **dict.fromkeys(
        (
            "advisor_20260301", "bash_20241022", "bash_20250124", "browser_toolset_20260801",
            "code_execution_20250522", "code_execution_20250825", "code_execution_20260120",
            "code_execution_20260521", "computer_20241022", "computer_20250124",
            "computer_20251124", "computer_toolset_20260801", "mcp_toolset", "memory_20250818",
            "text_editor_20241022", "text_editor_20250124", "text_editor_20250429",
            "text_editor_20250728", "tool_search_tool_bm25", "tool_search_tool_bm25_20251119",
            "tool_search_tool_regex", "tool_search_tool_regex_20251119", "web_fetch_20250910",
            "web_fetch_20260209", "web_fetch_20260309", "web_fetch_20260318",
            "web_search_20250305", "web_search_20260209", "web_search_20260318",
        ),
        OMITTED_TYPE,
    ),
}  # fmt: skip
TOOL_CHOICES: EntryTypes = {
    "auto": SERVED_TYPE,
    "any": SERVED_TYPE,
    "tool": SERVED_TYPE,
    "none": SERVED_TYPE,
}
THINKING: EntryTypes = {
    "enabled": SERVED_TYPE,
    "auto": SERVED_TYPE,  # another name of "adaptive"
    "adaptive": SERVED_TYPE,
    "disabled": SERVED_TYPE,
    "between_tools": ACCEPTED_TYPE,
}
# Of context_management. Prompts are never shortened.
EDITS: EntryTypes = dict.fromkeys(
    ("clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"), ACCEPTED_TYPE
)
UNIONS: dict[str, EntryTypes] = {
    "roles": ROLES,
    "blocks of the user": USER_BLOCKS,
    "blocks of the assistant": ASSISTANT_BLOCKS,
    "blocks of a system message": SYSTEM_BLOCKS,
    "blocks of a tool's result": RESULT_BLOCKS,
    "sources of a document": SOURCES,
    "blocks of a document's content": SOURCE_BLOCKS,
    "tools": TOOLS,
    "tool choices": TOOL_CHOICES,
    "thinking": THINKING,
    "edits of the context": EDITS,
}
_HIDDEN = b"thought:"
Block = Mapping[str, Any]
Part = dict[str, str]
_BILLING = "x-anthropic-billing-header:"  # a line of Claude Code that differs in each request


def signature_of(thought: str, *, hidden: bool) -> str:
    """Return the signature of a thinking block: a hash of the reasoning or, if the block is sent
    without its reasoning (`hidden`), the encoded reasoning itself."""
    data = thought.encode(errors="replace")
    return b64encode(_HIDDEN + data if hidden else sha256(data).digest()).decode()


def hidden_thought(signature: object) -> str:
    """Return the reasoning that a signature of this server contains; empty if it contains none."""
    if not isinstance(signature, str):
        return ""
    try:
        data = b64decode(signature, validate=True)
        return data.removeprefix(_HIDDEN).decode() if data.startswith(_HIDDEN) else ""
    except (binascii.Error, ValueError):
        return ""


def conversation(
    system: str | Sequence[Block] | None,
    messages: Sequence[tuple[str, str | Sequence[Block] | None]],
) -> list[dict[str, Any]]:
    """Convert a system prompt and messages to the turns of a chat. `messages` are pairs of role and
    content; a message whose content is None is left out.

    Consecutive messages of the assistant become one turn. Each tool result becomes a turn directly
    after the turn with its call. Consecutive texts of the user become one turn, since many
    templates require that user and assistant alternate. Each system message is a turn at its place.
    Raises ServiceError for a block that is not supported or not allowed for its role, for the
    result of a call that does not exist, and if no message has content.
    """
    turns = _Turns()
    turns.add_system(system or (), "system")
    num_rules = len(turns.turns)
    visible = [
        (role, content, f"messages[{index}].content")
        for index, (role, content) in enumerate(messages)
        if content is not None
    ]
    for role, run in groupby(visible, lambda message: message[0]):
        if role == "system":
            for _, content, path in run:
                turns.add_system(content, path)
            continue
        blocks = chain.from_iterable(_blocks(content, path) for _, content, path in run)
        if role == "assistant":
            turns.add_assistant(blocks)
        else:
            turns.add_user(blocks)
    log_unsupported(Handling.DROPPED, "blocks", turns.dropped)
    if len(turns.turns) == num_rules:
        raise refuse("messages", "messages: at least one message must have content")
    return turns.turns


class _Turns:
    """Builds the turns of a chat, block by block. `dropped` collects the types of blocks that are
    left out."""

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []
        self.dropped: set[str] = set()
        self._calls: set[str] = set()  # ids of the calls so far
        self._results_index = 0  # where the results of the last calls go

    def add_system(self, content: str | Sequence[Block], path: str) -> None:
        parts = self._texts(content, path, SYSTEM_BLOCKS)
        for part in parts:
            if part["text"].startswith(_BILLING):
                part["text"] = part["text"].partition("\n")[2]
        if parts := [part for part in parts if part["text"]]:
            self.turns.append({"role": "system", "content": parts})

    def add_assistant(self, blocks: Iterable[tuple[Block, str]]) -> None:
        turn: dict[str, Any] = {"role": "assistant", "content": None}
        texts: list[str] = []
        thoughts: list[str] = []
        calls = []
        for block, path in blocks:
            kind = block["type"]
            if kind == "thinking":
                thought = _string(block, "thinking", path)
                thoughts.append(thought or hidden_thought(block.get("signature")))
            elif kind == "tool_use":
                call_id, function_name = _string(block, "id", path), _string(block, "name", path)
                self._calls.add(call_id)
                function = {"name": function_name, "arguments": _arguments(block.get("input"))}
                calls.append({"id": call_id, "type": "function", "function": function})
            else:
                entry_type = ASSISTANT_BLOCKS.get(kind, DROPPED_TYPE)
                texts += self._text(block, path, entry_type, " in a message of the assistant")
        if texts or not calls:
            turn["content"] = "\n".join(texts)
        if any(thoughts):
            turn["reasoning_content"] = "\n".join(filter(None, thoughts))
        if calls:
            turn["tool_calls"] = calls
        self.turns.append(turn)
        self._results_index = len(self.turns)

    def add_user(self, blocks: Iterable[tuple[Block, str]]) -> None:
        for block, path in blocks:
            if block["type"] == "tool_result":
                self._add_result(block, path)
                continue
            entry_type = USER_BLOCKS.get(block["type"], REFUSED_TYPE)
            for text in self._text(block, path, entry_type, " in a message of the user"):
                if not self.turns or self.turns[-1]["role"] != "user":
                    self.turns.append({"role": "user", "content": []})
                self.turns[-1]["content"].append({"type": "text", "text": text})

    def _add_result(self, block: Block, path: str) -> None:
        call_id = _string(block, "tool_use_id", path)
        if call_id not in self._calls:
            text = f"no earlier tool_use block has the id {quoted(call_id)}"
            raise refuse(f"{path}.tool_use_id", f"{path}.tool_use_id: {text}")
        output = block.get("content") or ""
        content: str | list[Part] = output
        if not isinstance(output, str):
            content = self._texts(output, f"{path}.content", RESULT_BLOCKS)
        if block.get("is_error") is True:  # a chat has no other place for it
            if isinstance(content, str):
                content = f"Error:\n{content}"
            else:
                content.insert(0, {"type": "text", "text": "Error:"})
        turn = {"role": "tool", "tool_call_id": call_id, "content": content}
        self.turns.insert(self._results_index, turn)
        self._results_index += 1

    def _texts(self, content: str | Sequence[Block], path: str, table: EntryTypes) -> list[Part]:
        """Return the texts of content blocks as text parts. `table` says how each type of block is
        handled; `path` is the content's place in the request. Raises ServiceError for a block that
        is not supported."""
        if not isinstance(content, str | list | tuple):
            raise refuse(path, f"{path} must be a string or a list of blocks")
        return [
            {"type": "text", "text": text}
            for block, block_path in _blocks(content, path)
            for text in self._text(
                block, block_path, table.get(block["type"], REFUSED_TYPE), " here"
            )
        ]

    def _text(self, block: Block, path: str, entry_type: EntryType, place: str) -> list[str]:
        """Return the text of one block in a list; an empty list if the block is dropped. `place`
        ends the error text, such as " in a message of the user". Raises ServiceError for a block
        that is not supported."""
        kind = block["type"]
        if kind == "text":
            return [_string(block, "text", path)]
        if entry_type.handling is Handling.AS_TEXT:
            if kind == "document":
                block = {**block, "source": self._source(block.get("source"), f"{path}.source")}
            return [entry_type.as_text(kind, block)]
        if entry_type.handling is not Handling.DROPPED:
            text = f"blocks of type {quoted(kind)} are not supported by this server{place}"
            raise refuse(f"{path}.type", f"{path}.type: {text}")
        self.dropped.add(kind)
        return []

    def _source(self, source: Any, path: str) -> str:
        """Return the text of a document block's source. Raises ServiceError if its type is not
        supported."""
        kind = _string(source, "type", path)
        if SOURCES.get(kind, REFUSED_TYPE) is REFUSED_TYPE:
            text = f"sources of type {quoted(kind)} are not supported by this server"
            raise refuse(f"{path}.type", f"{path}.type: {text}")
        if kind == "text":
            return _string(source, "data", path)
        parts = self._texts(source.get("content") or (), f"{path}.content", SOURCE_BLOCKS)
        return "\n".join(part["text"] for part in parts)


def _arguments(value: Any) -> Any:
    """Return the arguments of an earlier tool call: an object or text unchanged, any other value as
    JSON text."""
    if value is None:
        return {}
    return value if isinstance(value, Mapping | str) else to_json(value).decode()


def _blocks(content: str | Sequence[Block], path: str) -> list[tuple[Block, str]]:
    """Return each block of a message's content with its place in the request; a string counts as
    one text block. Raises ServiceError for a block without a type."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, path)]
    blocks = []
    for index, block in enumerate(content):
        block_path = f"{path}[{index}]"
        _string(block, "type", block_path)
        blocks.append((block, block_path))
    return blocks


def _string(block: Any, key: str, path: str) -> str:
    value = block.get(key) if isinstance(block, Mapping) else None
    if not isinstance(value, str):
        raise refuse(f"{path}.{key}", f"{path}.{key} must be a string")
    return value
