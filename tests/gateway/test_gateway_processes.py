"""Gateway processes that query each other: a dead or late process gives no answer."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from pdserve.gateway.metrics import GatewayProcesses, gateway_processes

pytestmark = pytest.mark.anyio


async def test_live_processes_answer(tmp_path: Path, anyio_backend: str) -> None:
    folder = tmp_path / ("long " * 30)  # longer than a socket path may be
    folder.mkdir()
    every = [GatewayProcesses(folder, index, 4) for index in range(3)]  # the fourth has not started
    for index, one in enumerate(every):
        name = str(index).encode()
        one.serve(
            "echo", lambda tenant, word, name=name: b"%s %s " % (name, tenant) + word.encode()
        )
        one.serve("nothing", lambda tenant, word: b"")
        await one.start()
    word = "\n\u20ac" + "\x01" * 20_000
    found = await every[0].query("echo", b"\xff", word)
    assert sorted(found) == [b"%d \xff " % index + word.encode() for index in (1, 2)]
    assert await every[0].query("nothing", b"") == []
    await every[1].close()
    assert await every[0].query("echo", b"", "x") == [b"2  x"]
    again = GatewayProcesses(folder, 1, 4)
    again.serve("echo", lambda tenant, word: b"again")
    await again.start()
    assert sorted(await every[0].query("echo", b"", "x")) == [b"2  x", b"again"]
    for one in (every[0], every[2], again):
        await one.close()


async def test_a_partial_answer_is_ignored_and_a_late_one_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    monkeypatch.setattr(gateway_processes, "ANSWER_S", 0.1)
    asking = GatewayProcesses(tmp_path, 0, 3)

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"hal')
        writer.close()

    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    servers = [
        await asyncio.start_unix_server(serve, tmp_path / f"gateway-{index}.sock")
        for index, serve in enumerate((dies, hangs), 1)
    ]
    assert await asking.query("trace", b"", "x") == []
    for server in servers:
        server.close()
        await server.wait_closed()
    await asking.close()


async def test_a_partial_question_is_ignored(tmp_path: Path, anyio_backend: str) -> None:
    failed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    one = GatewayProcesses(tmp_path)
    await one.start()
    for question in (b"", b'["tra'):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "gateway-0.sock")
        writer.write(question)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    gc.collect()  # an error in a task is reported when the task is collected
    assert not failed
    await one.close()


async def test_a_single_process_queries_no_other(anyio_backend: str) -> None:
    alone = GatewayProcesses()
    await alone.start()
    assert await alone.query("trace", b"") == []
    await alone.close()
