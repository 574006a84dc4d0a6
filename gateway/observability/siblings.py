"""The other gateway processes behind the same port, asked for what only they know.

Each listens at a Unix socket in a folder that is theirs alone. A question is a JSON line, an answer
is a line, too. One that is dead, or late, has no answer.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

ANSWER_S = 1.0
MAX_QUESTION_BYTES = 1 << 18  # the head of an HTTP request has the word, and JSON escapes it

# Of a tenant and a word that says more; a JSON text, or nothing.
Answer = Callable[[bytes, str], bytes]


class Siblings:
    """Those of the process `index` of `num`; without a folder there are none. `start` it when all
    kinds of answers are there, `close` it at the end."""

    def __init__(self, folder: Path | None = None, index: int = 0, num: int = 1) -> None:
        """Raises OSError."""
        self._folder = folder
        self._index = index
        self._num = num
        self._answers: dict[str, Answer] = {}
        self._server: asyncio.Server | None = None
        # By its descriptor, for the path of a socket has at most 107 bytes.
        self._fd = -1 if folder is None else os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)

    def answer(self, kind: str, answer: Answer) -> None:
        """The others get this for questions of that kind."""
        self._answers[kind] = answer

    async def start(self) -> None:
        """Raises OSError."""
        if self._folder is None:
            return
        (self._folder / self._name(self._index)).unlink(missing_ok=True)  # of one that died
        self._server = await asyncio.start_unix_server(
            self._serve, self._path(self._index), limit=MAX_QUESTION_BYTES
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def ask(self, kind: str, tenant: bytes, word: str = "") -> list[bytes]:
        """What those answer that know something, within ANSWER_S."""
        others = [index for index in range(self._num) if index != self._index]
        asked = [self._ask_one(index, [kind, tenant.hex(), word]) for index in others]
        return [answer for answer in await asyncio.gather(*asked) if answer]

    async def _ask_one(self, index: int, question: list[str]) -> bytes:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._path(index))
                try:
                    writer.write(json.dumps(question).encode() + b"\n")
                    line = await reader.read()
                    return line.rstrip(b"\n") if line.endswith(b"\n") else b""  # it has died
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            log.debug("gateway %d does not answer: %s", index, error)
            return b""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await reader.readline()
                if not line.endswith(b"\n"):
                    return  # who asked has gone
                kind, tenant, word = json.loads(line)
                writer.write(self._answers[kind](bytes.fromhex(tenant), word) + b"\n")
                await writer.drain()
        except (OSError, TimeoutError) as error:
            log.debug("a gateway that asked has gone: %s", error)
        finally:
            writer.close()

    def _name(self, index: int) -> str:
        return f"gateway-{index}.sock"

    def _path(self, index: int) -> str:
        return f"/proc/self/fd/{self._fd}/{self._name(index)}"
