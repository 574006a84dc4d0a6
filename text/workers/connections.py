"""The gateway's side of the connections to a model's fork server process and to its tokenizer
worker processes."""

import asyncio
import json
import logging
import os
import socket
import sys
from asyncio.subprocess import Process
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import cast

from pdserve.protos.common_pb2 import UNAVAILABLE
from pdserve.services.common.errors import MAX_QUOTED, ServiceError, cut
from pdserve.text.errors import TextError, UnsupportedTokenizer
from pdserve.text.workers import messages
from pdserve.text.workers.messages import (
    FORK,
    MessageReader,
    WorkerLimits,
    WorkerMessage,
    pack,
    subject,
)

log = logging.getLogger(__name__)

MAX_UNREAD, MAX_UNREAD_BYTES = 8, 1 << 16  # while no caller receives
# The variables that a fork server inherits; the gateway's environment holds secrets.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ", "TMPDIR")
ENDED_S = 1.0  # wait for a worker's exit code after its socket has closed
TOO_LONG = {
    -messages.RENDER_SIGNAL: "the chat template ran for too long",
    -messages.PROMPT_SIGNAL: "the {} takes too long to prepare",
}


class MessageStream(asyncio.Protocol):
    """Sends and receives messages over one end of a socket pair. Only one caller may wait for a
    message at a time. While none does, it stops reading above MAX_UNREAD messages or
    MAX_UNREAD_BYTES."""

    def __init__(self) -> None:
        self._reader = MessageReader()
        self._messages: deque[WorkerMessage] = deque()  # not received yet
        self._receiving: asyncio.Future[None] | None = None
        self._end_reason = ""  # why the stream has ended; empty while it is open
        self._paused = False
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def over(cls, sock: socket.socket) -> "MessageStream":
        _, stream = await asyncio.get_running_loop().create_unix_connection(cls, sock=sock)
        return stream

    @property
    def is_closed(self) -> bool:
        """Whether the stream has ended, because the other process closed it or sent an invalid
        message."""
        return bool(self._end_reason)

    @property
    def num_unread(self) -> int:
        """Number of messages that have arrived and that no caller has received yet."""
        return len(self._messages)

    def send(self, message: WorkerMessage) -> None:
        """Send a message to the other process. Buffers it without limit, since senders wait for an
        answer before the next message. Raises OSError if the stream has ended."""
        if self._end_reason:
            raise ConnectionResetError(self._end_reason)
        assert self._transport is not None
        self._transport.write(pack(message))

    async def receive(self) -> WorkerMessage:
        """Wait for the next message and return it. Raises OSError if the stream has ended."""
        assert self._receiving is None or self._receiving.done(), (
            "another caller is already receiving"
        )
        while not self._messages:
            if self._end_reason:
                raise ConnectionResetError(self._end_reason)
            self._resume()
            self._receiving = asyncio.get_running_loop().create_future()
            await self._receiving
        return self._messages.popleft()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._messages += self._reader.feed(data)
        except (ValueError, RecursionError) as error:
            log.error("a tokenizer worker sent an invalid message: %s", cut(str(error), MAX_QUOTED))
            self._end("the tokenizer worker sent an invalid message")
            self.close()
            return
        self._wake()
        is_receiving = self._receiving is not None and not self._receiving.done()
        is_full = len(self._messages) > MAX_UNREAD or self._reader.num_unread > MAX_UNREAD_BYTES
        if is_full and not is_receiving and not self._paused:
            assert self._transport is not None
            self._transport.pause_reading()
            self._paused = True

    def connection_lost(self, error: Exception | None) -> None:
        self._end("the tokenizer worker closed the connection")

    def _resume(self) -> None:
        if self._paused:
            assert self._transport is not None
            self._transport.resume_reading()
            self._paused = False

    def _end(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        self._wake()

    def _wake(self) -> None:
        if self._receiving is not None and not self._receiving.done():
            self._receiving.set_result(None)


class TokenizerWorker:
    """The gateway's handle of a tokenizer worker, a process that prepares prompts or compiles
    grammars."""

    def __init__(self, stream: MessageStream) -> None:
        self.stream = stream
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def has_ended(self) -> bool:
        """Whether the worker process has ended or closed its connection, so that it can take no
        more work."""
        return self.exit_code.done() or self.stream.is_closed

    async def request(self, message: WorkerMessage, limit_s: float) -> WorkerMessage:
        """Send work to the worker and return its answer. Raises TextError if the worker ended
        because of this work, ServiceError UNAVAILABLE if it did not answer within `limit_s`
        seconds."""
        try:
            if self.stream.num_unread:
                raise OSError("the tokenizer worker sent an unexpected message")
            async with asyncio.timeout(limit_s):
                self.stream.send(message)
                return await self.stream.receive()
        except TimeoutError:
            raise late_error() from None
        except OSError:
            with suppress(TimeoutError):
                async with asyncio.timeout(ENDED_S):
                    await asyncio.shield(self.exit_code)
            raise self._failure(subject(message)) from None

    def _failure(self, work: str) -> Exception:
        code = self.exit_code.result() if self.exit_code.done() else 0
        if code in TOO_LONG:
            return TextError(TOO_LONG[code].format(work))
        if code == -messages.LATE_SIGNAL:
            return late_error()
        log.warning("a tokenizer worker ended while preparing a %s: exit code %d", work, code)
        return TextError(f"the {work} cannot be prepared: it is invalid or needs too much memory")


class ForkServer:
    """The gateway's handle of a fork server process (fork_server.py), with a model or still without
    one."""

    def __init__(self, process: Process, control: socket.socket, stream: MessageStream) -> None:
        self.control = control
        self.stream = stream
        self._process = process

    @classmethod
    async def start(cls, limits: WorkerLimits, log_format: str) -> "ForkServer":
        """Start a fork server process. Raises OSError if the system cannot start one."""
        with ExitStack() as cleanup:
            parent_sock, child_sock = map(cleanup.enter_context, socket.socketpair())
            stream = await MessageStream.over(parent_sock.dup())
            cleanup.callback(stream.close)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "pdserve.text.workers.fork_server"),
                *(str(child_sock.fileno()), json.dumps(asdict(limits)), log_format),
                pass_fds=[child_sock.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                start_new_session=True,  # a terminal's Ctrl-C is for the gateway only
            )
            cleanup.pop_all()
        child_sock.close()
        return cls(process, parent_sock, stream)

    def fork(self) -> socket.socket:
        """Tell the process to fork a new tokenizer worker; return the gateway's end of the worker's
        socket. Raises OSError if the process cannot be reached."""
        parent_sock, child_sock = socket.socketpair()
        with child_sock:
            try:
                socket.send_fds(self.control, [FORK], [child_sock.fileno()])
            except OSError:
                parent_sock.close()
                raise
        return parent_sock

    async def load(self, message: WorkerMessage, limit_s: float) -> WorkerMessage:
        """Send a model's files to the process and return its answer, which describes the tokenizer.

        Raises UnsupportedTokenizer if the files are unusable, or if the process ends or takes
        longer than `limit_s` seconds after it received them; ServiceError UNAVAILABLE if it did not
        receive them.
        """
        is_received = False
        try:
            async with asyncio.timeout(limit_s):
                self.stream.send(message)
                await self.stream.receive()
                is_received = True
                answer = await self.stream.receive()
        except OSError:  # includes TimeoutError
            if not is_received:
                raise no_worker_error() from None
            raise UnsupportedTokenizer(
                "loading its tokenizer takes too much time or memory"
            ) from None
        if "error" in answer.head:
            raise UnsupportedTokenizer(answer.head["error"])
        return answer

    def kill(self) -> None:
        """Kill the process; the workers that it has forked end with it."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Close the sockets, kill the process and wait until it has ended."""
        self.stream.close()
        self.control.close()
        self.kill()
        await self._process.wait()


def late_error() -> ServiceError:
    return ServiceError(
        UNAVAILABLE, "the prompt could not be prepared in time; try again later", retry_after_s=1.0
    )


def no_worker_error() -> ServiceError:
    return ServiceError(
        UNAVAILABLE,
        "the gateway cannot start a tokenizer worker; try again later",
        retry_after_s=1.0,
    )
