"""The gateway's side of the text processes: a model's processes, and a spare one for the next.

Ownership: `TextPool` owns the spare process, each `ModelText` the process of its model, and that
process its workers. A worker serves one prompt at a time; one that dies or is late is replaced.
"""

import asyncio
import json
import logging
import os
import socket
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from pdserve.gateway.text.errors import TextError, UnsupportedTokenizer
from pdserve.gateway.text.generation import GenerationDefaults
from pdserve.gateway.text.vocabulary import (
    StoredTokens,
    TextCard,
    Vocabulary,
    stored_vocabulary,
)
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
from pdserve.services.host.tenants.fairness import FairQueue

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 << 20
# All that a text process hears of the gateway's environment, which has secrets.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ", "TMPDIR")
ENDED_S = 1.0  # for the news how a worker ended, once its socket is closed
SLACK_S = 2.0  # for the kernel to have killed a worker that is late
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


Spent = Callable[[bytes, float], None]  # (owner, seconds)
GONE = (asyncio.IncompleteReadError, OSError)


class _Worker:
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
            raise _late() from None
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
            return _late()
        log.warning("a text process ended while it prepared a prompt: code %d", code)
        return TextError("the prompt cannot be prepared: it needs too much memory, or it is broken")


class _Host:
    """The process of a model, or of none yet (process.py)."""

    def __init__(self, process: Process, control: socket.socket, stream: MessageStream) -> None:
        self.control = control
        self.stream = stream
        self._process = process

    @classmethod
    async def start(cls, limits: TextLimits) -> "_Host":
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "pdserve.gateway.text_processes.process"),
                *(str(theirs.fileno()), json.dumps(asdict(limits))),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                start_new_session=True,  # a terminal's Ctrl-C is for the gateway
            )
        return cls(process, ours, await MessageStream.over(ours.dup()))

    def fork(self, sock: socket.socket) -> None:
        """A worker at the other end of the socket. Raises OSError if the process has ended."""
        socket.send_fds(self.control, [FORK], [sock.fileno()])

    async def close(self) -> None:
        """Ends the process, and with it its workers."""
        self.stream.close()
        self.control.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class ModelText:
    """The processes of one model, which turn its prompts into token ids."""

    def __init__(self, host: _Host, workers: int, limit_s: float, spent: Spent) -> None:
        self.alive = True
        self._host = host
        self._free = workers  # that may still be started
        self._limit_s = limit_s
        self._spent = spent
        self._workers: dict[int, _Worker] = {}  # by pid
        self._starting: deque[socket.socket] = deque()
        self._idle: list[_Worker] = []
        self._waiting: FairQueue[asyncio.Future[_Worker]] = FairQueue()
        self._asking: set[asyncio.Task[TextMessage]] = set()  # the loop keeps weak references only
        self._listening = asyncio.create_task(self._listen(), name="text processes")

    async def chat_ids(
        self, owner: bytes, messages: Sequence[Mapping[str, Any]], *, answer: bool, most: int
    ) -> list[int]:
        """The token ids of a conversation; `answer` opens the assistant's turn. See `_ids`."""
        head = {"op": "chat", "messages": messages, "answer": answer, "most": most}
        return await self._ids(owner, TextMessage(head))

    async def text_ids(
        self, owner: bytes, text: str, *, add_special_tokens: bool, most: int
    ) -> list[int]:
        """The token ids of a text, special tokens in it parsed. See `_ids`."""
        head = {"op": "text", "add_special_tokens": add_special_tokens, "most": most}
        return await self._ids(owner, TextMessage(head, [text.encode("utf-8", "surrogatepass")]))

    async def _ids(self, owner: bytes, message: TextMessage) -> list[int]:
        """Owners take turns. Raises TextError, also for more than `most` ids; ServiceError
        UNAVAILABLE."""
        worker = await self._take(owner)
        asking = asyncio.create_task(self._ask(owner, worker, message))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        answer = await asyncio.shield(asking)  # its worker is busy though the client goes
        if "error" in answer.head:
            raise TextError(answer.head["error"], answer.head.get("param", ""))
        return list(memoryview(answer.parts[0]).cast("I"))

    async def close(self) -> None:
        """Ends the processes, and fails the prompts that they work on."""
        self.alive = False
        self._listening.cancel()
        for worker in self._workers.values():
            worker.stream.close()
        for sock in self._starting:
            sock.close()
        self._fail_waiting()
        await self._host.close()

    async def _ask(self, owner: bytes, worker: _Worker, message: TextMessage) -> TextMessage:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answer = await worker.ask(message, self._limit_s)
        except BaseException:
            worker.stream.close()
            self._replace()
            if not self.alive:
                raise _ended() from None
            raise
        finally:
            self._spent(owner, loop.time() - began)
        if "last" in answer.head:  # it ends, with what it holds
            self._replace()
        else:
            self._offer(worker)
        return answer

    async def _take(self, owner: bytes) -> _Worker:
        if not self.alive:
            raise _ended()
        while self._idle:
            if not (worker := self._idle.pop()).code.done():
                return worker
            self._free += 1
        mine: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        self._waiting.push(owner, mine)
        if self._free:
            self._free -= 1
            self._fork()
        try:
            return await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it came at the same time
                self._offer(mine.result())
            raise

    def _offer(self, worker: _Worker) -> None:
        """A worker that has nothing to do."""
        if worker.code.done():
            self._replace()
            return
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():  # otherwise its client has gone
                waiting.set_result(worker)
                return
        self._idle.append(worker)

    def _replace(self) -> None:
        """A worker has gone."""
        if self._waiting and self.alive:
            self._fork()
        else:
            self._free += 1

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._host.fork(theirs)
            except OSError:  # `_listen` hears of it, too
                ours.close()
                return
        self._starting.append(ours)

    async def _listen(self) -> None:
        """Hears of workers that begin and end."""
        with suppress(*GONE):
            while True:
                head = (await self._host.stream.receive()).head
                if "forked" in head:
                    worker = _Worker(await MessageStream.over(self._starting.popleft()))
                    self._workers[head["forked"]] = worker
                    self._offer(worker)
                else:
                    worker = self._workers.pop(head["ended"])
                    worker.code.set_result(head["code"])
                    worker.stream.close()
        log.error("the text processes of a model have ended")
        self.alive = False
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():
                waiting.set_exception(_ended())


class LoadedText(NamedTuple):
    """What a model's text files say."""

    processes: ModelText
    vocabulary: Vocabulary
    has_template: bool
    defaults: GenerationDefaults


class TextPool:
    """Starts text processes; `prepare` begins one before its model is known, since imports take a
    while."""

    def __init__(
        self, limits: TextLimits, workers: int, spent: Spent = lambda owner, seconds: None
    ) -> None:
        """`workers`: of each model; `spent` hears whose prompt took how many seconds."""
        self._limits = limits
        self._spent = spent
        self._workers = workers
        self._spare: asyncio.Task[_Host] | None = None

    def prepare(self) -> None:
        """Starts the process of the next model, if there is none."""
        if self._spare is None:
            self._spare = asyncio.create_task(_Host.start(self._limits))

    async def load(self, card: TextCard, files: Mapping[str, bytes]) -> LoadedText:
        """Loads tokenizer, template and generation defaults. Raises UnsupportedTokenizer."""
        self.prepare()
        assert self._spare is not None
        spare, self._spare = self._spare, None
        host = await spare
        asked = TextMessage({"card": asdict(card), "files": list(files)}, list(files.values()))
        try:
            async with asyncio.timeout(self._limits.load_s + SLACK_S):
                await host.stream.send(asked)
                answer = await host.stream.receive()
            if "error" in answer.head:
                raise UnsupportedTokenizer(answer.head["error"])
            head = dict(answer.head)
            tokens = StoredTokens(*answer.parts)
            vocabulary = stored_vocabulary(card, head["decoder"], head["special_ids"], tokens)
        except (*GONE, TimeoutError):
            await host.close()
            raise UnsupportedTokenizer("its files need too much time or memory") from None
        except BaseException:
            await host.close()
            raise
        processes = ModelText(host, self._workers, self._limits.late_s + SLACK_S, self._spent)
        defaults = GenerationDefaults(**head["defaults"])
        return LoadedText(processes, vocabulary, head["has_template"], defaults)

    async def close(self) -> None:
        """Ends the spare process."""
        if self._spare is not None:
            await (await self._spare).close()


def _late() -> ServiceError:
    return ServiceError(UNAVAILABLE, "the prompt could not be prepared in time", retry_after_s=1.0)


def _ended() -> ServiceError:
    return ServiceError(UNAVAILABLE, "the model's text processes have ended", retry_after_s=1.0)
