"""A model's text process and its children, as the gateway talks to them over sockets."""

import asyncio
import json
import logging
import os
import socket
import sys
from asyncio.subprocess import Process
from contextlib import ExitStack, suppress
from dataclasses import asdict

from pdserve.gateway.text.errors import TextError, UnsupportedTokenizer
from pdserve.gateway.text_processes import protocol
from pdserve.gateway.text_processes.protocol import (
    FORK,
    SIZE_BYTES,
    TextLimits,
    TextMessage,
    head_of,
    pack,
    size_of,
)
from pdserve.protos.common_pb2 import UNAVAILABLE
from pdserve.services.host.errors import ServiceError

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 << 20
# All that a text process hears of the gateway's environment, which has secrets.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ", "TMPDIR")
ENDED_S = 1.0  # for the news how a child ended, once its socket is closed
TOO_LONG = {
    -protocol.RENDER_SIGNAL: "the chat template ran for too long",
    -protocol.PROMPT_SIGNAL: "the prompt takes too long to be prepared",
}


class MessageStream:
    """Messages over one end of a socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> "MessageStream":
        return cls(*await asyncio.open_unix_connection(sock=sock))

    async def send(self, message: TextMessage) -> None:
        """Raises OSError if the other side has gone."""
        self._writer.write(pack(message))
        await self._writer.drain()

    async def receive(self) -> TextMessage:
        """Raises asyncio.IncompleteReadError or OSError if the other side has gone, or says more
        than it has to."""
        size = size_of(await self._reader.readexactly(SIZE_BYTES))
        if size > MAX_HEAD_BYTES:
            raise OSError(f"a head of {size} bytes")
        head = head_of(await self._reader.readexactly(size))
        return TextMessage(head, [await self._reader.readexactly(size) for size in head["sizes"]])

    def close(self) -> None:
        self._writer.close()


GONE = (asyncio.IncompleteReadError, OSError)


class TextChild:
    """A process that was forked to prepare prompts."""

    def __init__(self, stream: MessageStream) -> None:
        self.stream = stream
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ask(self, message: TextMessage, limit_s: float) -> TextMessage:
        """Raises TextError for what cannot be prepared, ServiceError for what could be later."""
        try:
            async with asyncio.timeout(limit_s):
                await self.stream.send(message)
                return await self.stream.receive()
        except TimeoutError:
            raise late() from None
        except GONE:
            with suppress(TimeoutError):
                async with asyncio.timeout(ENDED_S):
                    await asyncio.shield(self.code)
            raise self._failure() from None

    def _failure(self) -> Exception:
        code = self.code.result() if self.code.done() else 0
        if code in TOO_LONG:
            return TextError(TOO_LONG[code])
        if code == -protocol.LATE_SIGNAL:
            return late()
        log.warning("a text process ended while it prepared a prompt: code %d", code)
        return TextError("the prompt cannot be prepared: it needs too much memory, or it is broken")


class TextHost:
    """The process of a model, or of none yet (process.py)."""

    def __init__(self, process: Process, control: socket.socket, stream: MessageStream) -> None:
        self.control = control
        self.stream = stream
        self._process = process

    @classmethod
    async def start(cls, limits: TextLimits) -> "TextHost":
        """Raises OSError if the machine has no room for it."""
        with ExitStack() as undo:
            ours, theirs = map(undo.enter_context, socket.socketpair())
            stream = await MessageStream.over(ours.dup())
            undo.callback(stream.close)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "pdserve.gateway.text_processes.process"),
                *(str(theirs.fileno()), json.dumps(asdict(limits))),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                start_new_session=True,  # a terminal's Ctrl-C is for the gateway
            )
            undo.pop_all()
        theirs.close()
        return cls(process, ours, stream)

    def fork(self) -> socket.socket:
        """The socket of a new child. Raises OSError if there can be none now."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [FORK], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    async def load(self, message: TextMessage, limit_s: float) -> TextMessage:
        """The answer to a model's files. Raises UnsupportedTokenizer, also if they kill the
        process; ServiceError UNAVAILABLE if it has died before it had them."""
        received = False
        try:
            async with asyncio.timeout(limit_s):
                await self.stream.send(message)
                await self.stream.receive()
                received = True
                answer = await self.stream.receive()
        except (*GONE, TimeoutError):
            if not received:
                raise no_process() from None
            raise UnsupportedTokenizer("its files need too much time or memory") from None
        if "error" in answer.head:
            raise UnsupportedTokenizer(answer.head["error"])
        return answer

    async def close(self) -> None:
        """Ends the process, and with it its children."""
        self.stream.close()
        self.control.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


def late() -> ServiceError:
    return ServiceError(UNAVAILABLE, "the prompt could not be prepared in time", retry_after_s=1.0)


def no_process() -> ServiceError:
    return ServiceError(UNAVAILABLE, "no text process can be started now", retry_after_s=1.0)
