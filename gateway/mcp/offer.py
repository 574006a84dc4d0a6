"""Selects the MCP tools that a chat request offers to the model, names them, and says which ones
the gateway may call itself; pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pdserve.text import Tool, ToolUse

MAX_NAME_CHARS = 64
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


class ServerTool(NamedTuple):
    """A tool as its MCP server lists it."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """An MCP tool in the form in which models see it. `approved`: the gateway may call it itself;
    otherwise the client gets the call."""

    tool: Tool
    server: str
    name: str  # name at its server
    approved: bool


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, as text for the model."""

    text: str
    is_error: bool


def offered_tools(
    listed: Iterable[tuple[str, ServerTool, bool]],
) -> tuple[OfferedTool, ...]:
    """Give each tool a unique name for models, `server__tool`, cut to MAX_NAME_CHARS. `listed` has
    triples (server name, tool, whether the gateway may call it)."""
    offered: dict[str, OfferedTool] = {}
    for server, tool, approved in listed:
        full_name = _NOT_IN_NAMES.sub("_", f"{server}__{tool.name}")[:MAX_NAME_CHARS]
        name, number = full_name, 1
        while name in offered:
            number += 1
            ending = f"_{number}"
            name = full_name[: MAX_NAME_CHARS - len(ending)] + ending
        tool_for_model = Tool(name, tool.description, tool.parameters)
        offered[name] = OfferedTool(tool_for_model, server, tool.name, approved)
    return tuple(offered.values())


def with_offered(
    use: ToolUse | None, offered: Sequence[OfferedTool]
) -> tuple[ToolUse | None, Mapping[str, OfferedTool]]:
    """Add MCP tools to the tools of a client's request; return the combined tools, and a mapping
    from names to the MCP tools that were added. An MCP tool with the name of a client's tool is
    left out.

    No tool is added if the client's tool choice is "none". If it requires a call or allows only
    some tools, the model may call only the client's own tools.
    """
    if use is None:
        use = ToolUse(())
    if use.choice == "none" or (use.choice == "required" and not use.tools):
        return use, {}
    client_names = {tool.name for tool in use.tools}
    added = {item.tool.name: item for item in offered if item.tool.name not in client_names}
    only = tuple(use.only)
    if use.choice == "required" and not only:
        only = tuple(tool.name for tool in use.tools)
    tools = (*use.tools, *(item.tool for item in added.values()))
    return replace(use, tools=tools, only=only), added
