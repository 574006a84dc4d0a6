"""MCP servers of a gateway: a program over standard streams, and a server over HTTP."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes import tool_server
from fakes.tool_server import http_tool_server
from prometheus_client import CollectorRegistry, Counter
from systems.chaos.cluster import lasting_port
from systems.eventually import eventually

from pdserve.gateway.mcp import McpServers
from pdserve.gateway.mcp.config import McpServer
from pdserve.gateway.mcp.offer import ServerTool, ToolResult
from pdserve.gateway.mcp.servers import MAX_RESULT_CHARS, Pace

pytestmark = pytest.mark.anyio

FAST = Pace(ask_s=0.1, first_pause_s=0.01, max_pause_s=0.05)
SECRET = "s3cret-value"


def program(notes: Path, **fields: Any) -> McpServer:
    command = (sys.executable, "-P", tool_server.__file__, str(notes), SECRET)
    return McpServer("tools", command, {"TOLD": SECRET}, **fields)


@asynccontextmanager
async def running(
    *configured: McpServer, pace: Pace = FAST, **more: Any
) -> AsyncIterator[McpServers]:
    calls = Counter("calls", "", ("server", "tool", "outcome"), registry=CollectorRegistry())
    servers = McpServers(configured, calls, pace=pace, **more)
    servers.start()
    try:
        yield servers
    finally:
        await servers.close()


def names(servers: McpServers) -> list[str]:
    return [one.name for one in servers.offered]


async def call(servers: McpServers, name: str, **arguments: Any) -> ToolResult:
    (tool,) = (one for one in servers.offered if one.name == name)
    return await servers.call(tool, arguments, 60.0, "req")


async def test_a_program_lists_tools_and_answers_calls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pdserve")
    notes = tmp_path / "notes"
    async with running(program(notes, auto_approve=frozenset({"add"}))) as servers:
        assert servers.offered == ()  # startup does not wait for it
        await eventually(lambda: servers.offered)
        by_name = {one.name: one for one in servers.offered}
        add = by_name["add"]
        assert (add.tool.name, add.tool.description) == ("tools__add", "The sum of two numbers.")
        assert add.tool.parameters is not None
        assert set(add.tool.parameters["properties"]) == {"a", "b"}
        assert (add.approved, by_name["say"].approved) == (True, False)
        assert await call(servers, "add", a=2, b=40) == ToolResult("42", False)
        failed = await call(servers, "fail")
        assert failed.is_error
        assert "no such city" in failed.text
        assert (await call(servers, "add", a="x", b=1)).is_error
        picture = await call(servers, "picture")
        assert picture.text == "a pixel\n[image of type image/png, which is not shown]"
        assert (await call(servers, "variable", key="TOLD")).text == SECRET
        (child,) = (p for p in psutil.Process().children() if str(p.pid) in notes.read_text())
    assert not child.is_running()
    lines = [r.getMessage() for r in caplog.records if r.name == "pdserve.gateway.mcp"]
    assert any(line.startswith("tools add: ok in ") for line in lines)
    assert any(line.startswith("tools fail: error in ") for line in lines)
    assert SECRET not in caplog.text


async def test_the_environment_of_the_gateway_is_not_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_HIDDEN", SECRET)
    async with running(program(tmp_path / "notes")) as servers:
        await eventually(lambda: servers.offered)
        assert (await call(servers, "variable", key="PDSERVE_HIDDEN")).text == "absent"


async def test_a_server_over_http(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pdserve")
    seen: list[dict[str, str]] = []
    async with http_tool_server(tmp_path / "notes", seen) as url:
        server = McpServer("web", url=f"{url}?key={SECRET}", headers={"x-key": SECRET})
        async with running(server) as servers:
            await eventually(lambda: servers.offered)
            assert (await call(servers, "add", a=1, b=2)).text == "3"
            assert {headers["x-key"] for headers in seen} == {SECRET}
    assert SECRET not in caplog.text


async def test_a_server_that_crashes_loses_its_tools_and_restarts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crashes = tmp_path / tool_server.CRASHES
    async with running(program(tmp_path / "notes")) as servers:
        await eventually(lambda: servers.offered)
        offered = servers.offered
        crashes.touch()
        died = await call(servers, "die")
        assert died.is_error
        await eventually(lambda: not servers.offered)
        starts = len((tmp_path / "notes").read_text().splitlines())
        gone = await servers.call(offered[0], {}, 60.0, "req")
        assert gone.text == "error: the tool is not available at the moment"
        # The gateway retries repeatedly, and logs the outage once.
        await eventually(lambda: len((tmp_path / "notes").read_text().splitlines()) > starts + 2)
        away = [r for r in caplog.records if "is unavailable" in r.getMessage()]
        assert len(away) == 1
        crashes.unlink()
        await eventually(lambda: servers.offered)
        assert (await call(servers, "add", a=1, b=2)).text == "3"


async def test_a_server_over_http_that_stops_and_returns(tmp_path: Path) -> None:
    port = lasting_port()
    server = McpServer("web", url=f"http://127.0.0.1:{port}/mcp")
    async with running(server, pace=FAST._replace(reply_s=5.0)) as servers:
        for _ in range(2):
            async with http_tool_server(tmp_path / "notes", [], port):
                await eventually(lambda: servers.offered)
                assert (await call(servers, "add", a=1, b=2)).text == "3"
            await eventually(lambda: not servers.offered)


async def test_a_call_has_a_deadline(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with running(program(notes, call_s=0.2)) as servers:
        await eventually(lambda: servers.offered)
        late = await call(servers, "hang")
        assert late == ToolResult("error: the tool did not answer in time", True)
        await eventually(lambda: "cancelled" in notes.read_text())
        assert servers.offered


async def test_a_cancelled_call_is_cancelled_at_the_server(tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []
    stdio, web = tmp_path / "stdio", tmp_path / "web"
    async with (
        http_tool_server(web, seen) as url,
        running(program(stdio), McpServer("web", url=url)) as servers,
    ):
        await eventually(lambda: {one.server for one in servers.offered} == {"tools", "web"})
        for tool in [one for one in servers.offered if one.name == "hang"]:
            notes = stdio if tool.server == "tools" else web
            calling = asyncio.create_task(servers.call(tool, {}, 60.0, "req"))
            await eventually(lambda notes=notes: notes.exists() and "hang" in notes.read_text())
            calling.cancel()
            await eventually(lambda notes=notes: "cancelled" in notes.read_text())
            assert calling.cancelled()


async def test_new_tools_are_offered(tmp_path: Path) -> None:
    async with running(program(tmp_path / "notes")) as servers:
        await eventually(lambda: servers.offered)
        assert "more" not in names(servers)
        await call(servers, "grow")
        await eventually(lambda: "more" in names(servers))


async def test_a_missing_program(caplog: pytest.LogCaptureFixture) -> None:
    async with running(McpServer("gone", ("/no/such/program",))) as servers:
        await eventually(lambda: "is unavailable" in caplog.text)
        assert servers.offered == ()
    assert "the MCP server 'gone' is unavailable: No such file or directory" in caplog.text


class Scripted:
    """A connection without a server: `hangs` blocks a request for tools, `ends` fails the second
    one."""

    def __init__(self, listed: list[ServerTool], text: str = "") -> None:
        self.listed = listed
        self.text = text
        self.hangs = self.ends = False
        self.num_asked = 0  # on this connection
        self.num_connected = 0

    @asynccontextmanager
    async def __call__(self, server: McpServer) -> AsyncIterator["Scripted"]:
        self.num_connected += 1
        self.num_asked = 0
        yield self

    async def tools(self) -> list[ServerTool]:
        self.num_asked += 1
        if self.ends and self.num_asked > 1:
            raise ConnectionError
        if self.hangs:
            await asyncio.Event().wait()
        return self.listed

    async def call(self, name: str, arguments: Any) -> ToolResult:
        return ToolResult(self.text, False)


async def test_data_from_servers_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    listed = [
        ServerTool("huge", "", {"enum": ["x" * 70_000]}),
        ServerTool("wordy", "x" * 100_000, {}),
        *(ServerTool(f"t{i}", "", {}) for i in range(200)),
    ]
    talks = Scripted(listed, "y" * (MAX_RESULT_CHARS + 5))
    approved = frozenset({"wordy", "wurdy", "*"})
    server = McpServer("s", ("x",), auto_approve=approved)
    async with running(server, connect=talks) as servers:
        await eventually(lambda: servers.offered)
        assert len(servers.offered) == 128
        assert "huge" not in names(servers)
        assert len(servers.offered[0].tool.description) == 8192
        result = await call(servers, "wordy")
        assert result.text.endswith("y\n[5 more characters omitted]")
        assert len(json.dumps(result.text)) < MAX_RESULT_CHARS + 100
    assert "has tools that are too large or too many to offer: huge, t127" in caplog.text
    assert "the MCP server 's' lacks tools that autoApprove names: wurdy\n" in caplog.text


async def test_a_server_that_hangs_loses_its_tools(caplog: pytest.LogCaptureFixture) -> None:
    talks = Scripted([ServerTool("a", "", {})])
    pace = FAST._replace(reply_s=0.05)
    async with running(McpServer("s", ("x",)), connect=talks, pace=pace) as servers:
        await eventually(lambda: servers.offered)
        talks.hangs = True
        await eventually(lambda: not servers.offered)
        await eventually(lambda: talks.num_connected > 3)
        talks.hangs = False
        await eventually(lambda: servers.offered)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warnings == ["the MCP server 's' is unavailable: it did not answer in time"]


async def test_an_outage_after_each_start_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    talks = Scripted([ServerTool("a", "", {})])
    talks.ends = True
    pace = FAST._replace(ask_s=0.01)
    async with running(McpServer("s", ("x",)), connect=talks, pace=pace):
        await eventually(lambda: talks.num_connected > 4)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warnings == ["the MCP server 's' is unavailable: the connection was closed"]
