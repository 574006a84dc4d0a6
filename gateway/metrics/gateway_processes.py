"""Queries between the gateway processes that listen on the same port, for state that each keeps in
its own memory.

Each process listens on a Unix socket in a private folder. A query is one line of JSON, and so is
its answer. A process that is dead or does not answer within ANSWER_S counts as having no answer.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

ANSWER_S = 1.0
MAX_QUERY_BYTES = 1 << 18  # details come from an HTTP request's head, and JSON escapes them

# Maps the id of a tenant and the details of a query to a JSON text, or to an empty one.
Answer = Callable[[bytes, str], bytes]


class GatewayProcesses:
    """The connection of gateway process `index` with the `num` - 1 other processes of this gateway;
    without a `folder` there are no others. Call `start` after all calls of `serve`, and `close` at
    the end."""

    def __init__(self, folder: Path | None = None, index: int = 0, num: int = 1) -> None:
        """`folder` holds the processes' sockets. Raises OSError if it cannot be opened."""
        self._folder = folder
        self._index = index
        self._num = num
        self._answers: dict[str, Answer] = {}
        self._server: asyncio.Server | None = None
        # Sockets are addressed through this descriptor: a socket path has at most 107 bytes.
        self._fd = -1 if folder is None else os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)

    def serve(self, kind: str, answer: Answer) -> None:
        """Register `answer` as the function that answers queries of this kind from the other
        processes."""
        self._answers[kind] = answer

    async def start(self) -> None:
        """Listen on this process' socket for queries. Raises OSError if the socket cannot be
        created."""
        if self._folder is None:
            return
        (self._folder / self._name(self._index)).unlink(missing_ok=True)  # of a dead process
        self._server = await asyncio.start_unix_server(
            self._serve, self._path(self._index), limit=MAX_QUERY_BYTES
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def query(self, kind: str, tenant: bytes, details: str = "") -> list[bytes]:
        """Send a query to all other gateway processes at once; return the non-empty answers that
        arrive within ANSWER_S."""
        others = [index for index in range(self._num) if index != self._index]
        queries = [self._query_one(index, [kind, tenant.hex(), details]) for index in others]
        return [answer for answer in await asyncio.gather(*queries) if answer]

    async def _query_one(self, index: int, query: list[str]) -> bytes:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._path(index))
                try:
                    writer.write(json.dumps(query).encode() + b"\n")
                    line = await reader.read()
                    return line.rstrip(b"\n") if line.endswith(b"\n") else b""  # the process died
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {ANSWER_S:g} s"
            log.debug("gateway process %d did not answer a query: %s", index, reason)
            return b""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await reader.readline()
                if not line.endswith(b"\n"):
                    return  # the caller is gone
                kind, tenant, details = json.loads(line)
                writer.write(self._answers[kind](bytes.fromhex(tenant), details) + b"\n")
                await writer.drain()
        except (OSError, TimeoutError) as error:
            log.debug("another gateway process did not wait for the answer to its query: %s", error)
        finally:
            writer.close()

    def _name(self, index: int) -> str:
        return f"gateway-{index}.sock"

    def _path(self, index: int) -> str:
        return f"/proc/self/fd/{self._fd}/{self._name(index)}"
