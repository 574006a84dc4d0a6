"""An MCP server for tests: as a program on its standard streams, or over HTTP in this process.

Events of its tools are recorded in a file, one word per line: pid and argument of a start, then
events.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

CRASHES = "crashes"  # the program ends at once if a file with this name exists
PIXEL = b"\x89PNG\r\n\x1a\n"


def make_server(notes: Path) -> MCPServer:
    server = MCPServer("test", log_level="CRITICAL")

    def note(word: str) -> None:
        with notes.open("a") as file:
            file.write(f"{word}\n")

    @server.tool()
    def add(a: int, b: int) -> str:
        """The sum of two numbers."""
        note("add")
        return str(a + b)

    @server.tool()
    def say(text: str) -> str:
        """Its text again."""
        return text

    @server.tool()
    def fail() -> str:
        raise ToolError("no such city")

    @server.tool()
    def variable(key: str) -> str:
        return os.environ.get(key, "absent")

    @server.tool(structured_output=False)
    def picture() -> list[Any]:
        return ["a pixel", Image(data=PIXEL, format="png")]

    @server.tool()
    async def hang() -> str:
        note("hang")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            note("cancelled")
            raise
        return ""

    @server.tool()
    def die() -> str:
        os._exit(3)

    @server.tool()
    def grow() -> str:
        """From now on there is one more tool."""
        server.add_tool(say, name="more")
        return "grown"

    return server


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def http_tool_server(
    notes: Path, seen: list[dict[str, str]], port: int = 0
) -> AsyncIterator[str]:
    """Yield its address; `seen` gets the headers of each request."""
    served = make_server(notes).streamable_http_app()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seen.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await served(scope, receive, send)

    with socket.create_server(("127.0.0.1", port)) as listener:
        uvicorn_server = _Uvicorn(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=0))
        serving = asyncio.create_task(uvicorn_server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        finally:
            uvicorn_server.should_exit = True
            await serving


def main(notes: Path, argument: str) -> None:
    with notes.open("a") as file:
        file.write(f"{os.getpid()}\n{argument}\n")
    if notes.with_name(CRASHES).exists():
        sys.exit(1)
    make_server(notes).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
