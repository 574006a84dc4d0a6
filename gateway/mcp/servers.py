"""The MCP servers of a gateway. One task per server connects to it, lists its tools repeatedly and
reconnects after failures.

Invariant: `offered` has only tools of servers that answered their last query, so a request never
waits for a server that is down. Only a server's task opens and closes its connection.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, NamedTuple, Protocol

from prometheus_client import Counter
from pydantic_core import to_json

from pdserve.gateway.mcp.config import ALL, McpServer, ToolServerError
from pdserve.gateway.mcp.offer import OfferedTool, ServerTool, ToolResult, offered_tools

log = logging.getLogger("pdserve.gateway.mcp")

MAX_TOOLS = 128  # of a server
MAX_SCHEMA_BYTES = 1 << 16
MAX_DESCRIPTION_CHARS = 1 << 13
MAX_RESULT_CHARS = 1 << 16
MAX_LOGGED_CHARS = 200
CLOSE_S = 6.0  # for all servers to end; ending a program, at last by force, takes less
AWAY = "error: the tool is not available at the moment"


class ToolConnection(Protocol):
    """The interface of a connection to an MCP server; implemented in connection.py, and by fakes in
    tests."""

    async def tools(self) -> Sequence[ServerTool]: ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult: ...


Connect = Callable[[McpServer], AbstractAsyncContextManager[ToolConnection]]


class Pace(NamedTuple):
    """Times in seconds: `reply_s` limits the start of a server and each of its answers; `ask_s` is
    the interval between two listings of its tools; pauses before a reconnect double from
    `first_pause_s` to `max_pause_s`."""

    reply_s: float = 30.0
    ask_s: float = 15.0
    first_pause_s: float = 1.0
    max_pause_s: float = 60.0


class McpServers:
    """All MCP servers of a gateway. `offered` has the tools that are available now, in the order of
    the servers in the configuration."""

    def __init__(
        self,
        configured: Sequence[McpServer],
        calls: Counter,
        connect: Connect | None = None,
        pace: Pace = Pace(),  # noqa: B008  (immutable)
    ) -> None:
        """`calls` is a Prometheus counter of tool calls, labeled by server, tool and outcome.
        `connect` opens a connection to a server; it defaults to connection.py's."""
        self.offered: tuple[OfferedTool, ...] = ()
        self._calls = calls
        self._servers = {
            server.name: _ServerTask(server, connect, pace, self._on_change)
            for server in configured
        }
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start one task per server, which connects to it in the background. Call it in a running
        event loop."""
        self._tasks = [
            asyncio.create_task(server.run(), name=f"mcp-{name}")
            for name, server in self._servers.items()
        ]

    async def close(self) -> None:
        """Close all connections and end the server programs that were started; waits at most
        CLOSE_S."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    async def call(
        self, tool: OfferedTool, arguments: Mapping[str, Any], within_s: float, request: str
    ) -> ToolResult:
        """Call an MCP tool and return its result, cut to MAX_RESULT_CHARS. Returns an error result,
        without raising, if the call fails or takes more than `within_s` seconds."""
        start = asyncio.get_running_loop().time()
        outcome = "cancelled"
        result = ToolResult(AWAY, True)
        try:
            result, outcome = await self._servers[tool.server].call(tool.name, arguments, within_s)
        finally:
            self._calls.labels(tool.server, tool.name, outcome).inc()
            elapsed_s = asyncio.get_running_loop().time() - start
            summary = f"{tool.server} {tool.name}: {outcome} in {elapsed_s:.3f}s"
            log.debug(
                "%s, %d characters in the MCP tool's result",
                summary,
                len(result.text),
                extra={"request": request},
            )
        if len(result.text) > MAX_RESULT_CHARS:
            num_omitted = len(result.text) - MAX_RESULT_CHARS
            text = f"{result.text[:MAX_RESULT_CHARS]}\n[{num_omitted} more characters omitted]"
            return ToolResult(text, result.is_error)
        return result

    def _on_change(self) -> None:
        self.offered = offered_tools(
            (server.config.name, tool, server.config.approves(tool.name))
            for server in self._servers.values()
            for tool in server.tools
        )


class _ServerTask:
    """The task of one MCP server: connects to it and lists its tools. `tools` is empty while the
    server is unavailable."""

    def __init__(
        self, config: McpServer, connect: Connect | None, pace: Pace, on_change: Callable[[], None]
    ) -> None:
        self.config = config
        self.tools: Sequence[ServerTool] = []
        self._connect = connect
        self._pace = pace
        self._on_change = on_change
        self._connection: ToolConnection | None = None
        self._poll_now = asyncio.Event()  # query its tools now
        self._failures = 0  # since its last answer
        self._listed: Sequence[ServerTool] = []

    async def run(self) -> None:
        """Connect to the server, and again with growing pauses after each failure, until the task
        is cancelled."""
        if self._connect is None:
            # This import takes a while, and few gateways have servers.
            self._connect = await asyncio.to_thread(_imported_connect)
        while True:
            try:
                await self._serve(self._connect)
            except Exception as error:
                if not self._failures:
                    log.warning(
                        "the MCP server %r is unavailable: %s", self.config.name, _reason(error)
                    )
                self._failures += 1
            finally:
                self._connection = None
                self._set_tools([])
            pause_s = self._pace.first_pause_s * 2 ** min(self._failures - 1, 16)
            await asyncio.sleep(min(pause_s, self._pace.max_pause_s))

    async def _serve(self, connect: Connect) -> None:
        """Connect to the server and list its tools every `ask_s` seconds. Raises an exception when
        the server fails or does not answer in time."""
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(self._pace.reply_s):
                connection = await stack.enter_async_context(connect(self.config))
            steady = False  # a server that ends soon after each start is still the same failure
            while True:
                self._poll_now.clear()
                async with asyncio.timeout(self._pace.reply_s):
                    listed = await connection.tools()
                self._connection = connection
                self._set_tools(listed)
                if steady:
                    self._failures = 0
                steady = True
                await _set_within(self._poll_now, self._pace.ask_s)

    async def call(
        self, name: str, arguments: Mapping[str, Any], within_s: float
    ) -> tuple[ToolResult, str]:
        """Call a tool of this server; return its result and the outcome as a word for the metrics
        and the log: "ok", "error", "timeout", "failed" or "away" (not connected). Does not raise if
        the call fails."""
        if self._connection is None:
            return ToolResult(AWAY, True), "away"
        try:
            async with asyncio.timeout(min(within_s, self.config.call_s)):
                result = await self._connection.call(name, arguments)
        except TimeoutError:
            return ToolResult("error: the tool did not answer in time", True), "timeout"
        except ToolServerError as error:
            return ToolResult(f"error: {error}", True), "error"
        except Exception as error:  # the package and its transports have other exceptions
            self._poll_now.set()  # checks whether it is still there
            log.debug(
                "a tool call to the MCP server %r failed: %s", self.config.name, _reason(error)
            )
            return ToolResult(AWAY, True), "failed"
        if result.is_error:
            return ToolResult(f"error: {result.text}", True), "error"
        return result, "ok"

    def _set_tools(self, listed: Sequence[ServerTool]) -> None:
        if listed != self._listed:
            self._listed = listed
            self.tools = self._bounded(listed)
            log.info("the MCP server %r now offers %d tools", self.config.name, len(self.tools))
            missing = self.config.auto_approve - {ALL, *(tool.name for tool in self.tools)}
            if listed and missing:
                names = ", ".join(sorted(missing))[:MAX_LOGGED_CHARS]
                log.warning(
                    "the MCP server %r lacks tools that autoApprove names: %s",
                    self.config.name,
                    names,
                )
            self._on_change()

    def _bounded(self, listed: Sequence[ServerTool]) -> list[ServerTool]:
        """Return at most MAX_TOOLS of the listed tools, without those whose schema exceeds
        MAX_SCHEMA_BYTES, and with descriptions cut to MAX_DESCRIPTION_CHARS; log the names of
        omitted tools."""
        tools: list[ServerTool] = []
        skipped = []
        for tool in listed:
            too_large = len(to_json(tool.parameters)) > MAX_SCHEMA_BYTES
            if too_large or len(tools) == MAX_TOOLS or not tool.name:
                skipped.append(tool.name)
                continue
            tools.append(tool._replace(description=tool.description[:MAX_DESCRIPTION_CHARS]))
        if skipped:
            names = ", ".join(skipped)[:MAX_LOGGED_CHARS]
            name = self.config.name
            log.warning(
                "the MCP server %r has tools that are too large or too many to offer: %s",
                name,
                names,
            )
        return tools


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, or at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _imported_connect() -> Connect:
    from pdserve.gateway.mcp.connection import connect

    return connect


def _reason(error: BaseException) -> str:
    """Return the reason of a server's failure for the log. Of an unknown exception, only the type
    is returned, since its text may contain an address with secrets."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, ToolServerError):
        return str(error)[:MAX_LOGGED_CHARS]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ConnectionError):
        return "the connection was closed"
    return type(error).__name__
