"""HTTP/1.1 at minimum cost for the client: requests are bytes built ahead, connections are kept.

Computation of a client here takes time from the cores of the servers that it calls.
"""

import asyncio
import json
import re
from typing import Any

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
LOST = 0  # the status of a request whose connection ended before its answer


def request(host: str, method: str, path: str, body: Any = None, key: str = "") -> bytes:
    """The bytes of one request; `host` is host:port."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    data = b""
    if body is not None:
        data = json.dumps(body).encode()
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "\r\n"]).encode() + data


class Connection:
    """One connection to host:port, reopened after the server has closed it."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> "Connection":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._close()

    async def ask(self, asked: bytes) -> tuple[int, bytes]:
        """The status of the answer, and its body; LOST without one."""
        try:
            if self._streams is None:
                host, _, port = self._host.rpartition(":")
                self._streams = await asyncio.open_connection(host, int(port))
            reader, writer = self._streams
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            length = LENGTH.search(head)
            body = await (reader.readexactly(int(length[1])) if length else _chunks(reader))
        except (OSError, asyncio.IncompleteReadError):
            self._close()
            return LOST, b""
        except BaseException:
            self._close()
            raise
        if CLOSES.search(head):
            self._close()
        return int(head[9:12]), body

    def _close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """Read a chunked body."""
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(parts)
