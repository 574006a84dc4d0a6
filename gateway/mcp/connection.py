"""A connection to one MCP server through the Python package mcp; imported only if MCP servers are
configured.

The task that opens a connection must close it; closing ends a server program that was started for
it. Any task may call tools; cancelling the task of a call also cancels the call at the server.
"""

import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import (
    CONNECTION_CLOSED,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    Implementation,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic_core import to_json

from pdserve.gateway.mcp.config import McpServer, ToolServerError
from pdserve.gateway.mcp.offer import ServerTool, ToolResult

MAX_PAGES = 16  # of a list of tools
CONNECT_S = 30.0  # of HTTP, and to send a request
READ_S = 300.0  # between two pieces of an answer, or of a server's stream of notifications
# Their lines would contain addresses and what servers send; the gateway logs what matters.
logging.getLogger("mcp").setLevel(logging.CRITICAL)
logging.getLogger("httpx2").setLevel(logging.WARNING)


class Connection:
    """An open connection to an MCP server, which lists and calls the server's tools."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def tools(self) -> list[ServerTool]:
        """Return the tools that the server lists. Raises ToolServerError if the server reports an
        error, ConnectionError or another error of the transport if it cannot be reached."""
        with _converted_errors():
            return await self._list_tools()

    async def _list_tools(self) -> list[ServerTool]:
        tools: list[ServerTool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor, cache_mode="refresh")
            tools += [ServerTool(t.name, t.description or "", t.input_schema) for t in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool of the server and return its result. Raises ToolServerError if the server
        reports an error, ConnectionError or another error of the transport if it cannot be
        reached."""
        with _converted_errors():
            result = await self._client.call_tool(name, dict(arguments))
        return ToolResult(_text(result), bool(result.is_error))


@asynccontextmanager
async def connect(server: McpServer) -> AsyncIterator[Connection]:
    """Connect to an MCP server, and start its program if it has one, for the `async with` block.
    Raises ToolServerError if the server reports an error, OSError if its program cannot start or it
    cannot be reached, or another error of the transport."""
    async with AsyncExitStack() as stack:
        target: Any
        if server.command:
            program, *arguments = server.command
            target = stdio_client(
                StdioServerParameters(command=program, args=arguments, env=dict(server.env))
            )
        else:
            timeout = httpx2.Timeout(CONNECT_S, read=max(READ_S, server.call_s))
            http = httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout)
            await stack.enter_async_context(http)
            target = streamable_http_client(server.url, http_client=http)
        client = Client(target, client_info=Implementation(name="pdserve", version="1"))
        with _converted_errors():
            await stack.enter_async_context(client)
        yield Connection(client)


@contextmanager
def _converted_errors() -> Iterator[None]:
    """Convert an MCPError raised in the block to ConnectionError if the connection was closed, else
    to ToolServerError with the server's text."""
    try:
        yield
    except MCPError as error:
        if error.code == CONNECTION_CLOSED:
            raise ConnectionError from None
        raise ToolServerError(error.message) from None


def _text(result: CallToolResult) -> str:
    """Return the content of a tool's result as text; content other than text is replaced by a short
    description of it."""
    if not result.content and result.structured_content is not None:
        return to_json(result.structured_content).decode()
    return "\n".join(map(_block_text, result.content))


def _block_text(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ResourceLink):
        return f"[a link to {block.uri}]"
    if isinstance(block, EmbeddedResource):
        if isinstance(block.resource, TextResourceContents):
            return block.resource.text
        return f"[a resource of type {block.resource.mime_type}, which is not shown]"
    return f"[{block.type} of type {block.mime_type}, which is not shown]"
