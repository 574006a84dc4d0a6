"""The tokenizer workers of each model, and a spare fork server process for the next model.

Ownership: `TokenizerPool` owns the spare fork server, each `TokenizerWorkers` owns the fork server
of its model, and that process owns its workers. A worker does one piece of work at a time; a worker
that has died or is late is replaced.
"""

import asyncio
import hashlib
import logging
import math
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any, NamedTuple, TypeVar

from pdserve.engine.api import MAX_GRAMMAR_BYTES
from pdserve.protos.common_pb2 import UNAVAILABLE
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.fairness import FairQueue
from pdserve.text.errors import TextError
from pdserve.text.generation_config import GenerationDefaults
from pdserve.text.messages import TemplateInput
from pdserve.text.request import Structure
from pdserve.text.structured_output import StructureCache
from pdserve.text.tokenizer import (
    Frames,
    StoredTokens,
    TextModelInfo,
    Vocabulary,
    stored_vocabulary,
)
from pdserve.text.workers.connections import (
    ForkServer,
    MessageStream,
    TokenizerWorker,
    late_error,
    no_worker_error,
)
from pdserve.text.workers.messages import WorkerLimits, WorkerMessage, ids_of, result_of

log = logging.getLogger(__name__)
SLACK_S = 2.0  # for the kernel to kill a late worker
WAIT_S = 60.0  # of a prompt, for a worker
DEATH_S = 60.0  # how long a grammar that ended its worker is not retried
MAX_CHAR_IDS = 16  # token ids per character
Spent = Callable[[bytes, float], None]  # (owner, seconds)
T = TypeVar("T")


class WorkerQueue:
    """Gives tokenizer workers to requests, one request per worker at a time. If all are busy,
    requests wait, and the owners (tenants) of the waiting requests take turns."""

    def __init__(
        self, fork: Callable[["WorkerQueue"], None], max_workers: int, wait_s: float
    ) -> None:
        """Use up to `max_workers` workers; a request waits up to `wait_s` seconds for one. `fork`
        begins to start a worker, which is passed to `offer` when it runs; it raises OSError if that
        is not possible."""
        self._fork = fork
        self._max_workers = max_workers
        self._free = max_workers  # number of workers that may still be started
        self._wait_s = wait_s
        self._idle: list[TokenizerWorker] = []
        self._waiting: FairQueue[asyncio.Future[TokenizerWorker]] = FairQueue()

    async def take(self, owner: bytes) -> TokenizerWorker:
        """Wait for an idle worker and return it. Raises ServiceError UNAVAILABLE if none is idle
        within the time limit."""
        while self._idle:
            if not (worker := self._idle.pop()).has_ended:
                return worker
            self._free += 1
        future: asyncio.Future[TokenizerWorker] = asyncio.get_running_loop().create_future()
        self._waiting.push(owner, future)
        if self._free:
            self._start()
        try:
            async with asyncio.timeout(self._wait_s):
                try:
                    return await future
                except asyncio.CancelledError:
                    if future.done() and not future.cancelled() and future.exception() is None:
                        # A worker arrived together with the cancellation.
                        self.offer(future.result())
                    raise
        except TimeoutError:
            raise late_error() from None

    def offer(self, worker: TokenizerWorker) -> None:
        """Give an idle worker to the next waiting request, or keep it. A worker that has ended is
        replaced."""
        if worker.has_ended:
            self.replace()
            return
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():  # otherwise the client has disconnected
                waiting.set_result(worker)
                return
        self._idle.append(worker)

    def replace(self) -> None:
        """Record that a worker has ended, and start another one if requests wait."""
        self._free += 1
        if self._waiting:
            self._start()

    def _start(self) -> None:
        """Start another worker. If that fails, waiting requests are left to the running workers; if
        none runs, the requests fail."""
        try:
            self._fork(self)
        except OSError as error:
            log.warning("cannot start a tokenizer worker: %s", error)
            if self._free == self._max_workers:
                self.fail(no_worker_error)
        else:
            self._free -= 1

    def fail(self, make_error: Callable[[], ServiceError]) -> None:
        """Fail all waiting requests, each with an error that `make_error` returns."""
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():
                waiting.set_exception(make_error())


class TokenizerWorkers:
    """The tokenizer workers of one model, which tokenize its prompts and compile its grammars."""

    def __init__(
        self, fork_server: ForkServer, max_workers: int, limit_s: float, wait_s: float, spent: Spent
    ) -> None:
        """Use up to `max_workers` workers for prompts, and one for grammars. Work waits up to
        `wait_s` seconds for a worker, and then may take `limit_s`. `spent` gets the owner and the
        seconds of each piece of work."""
        self.alive = True
        self._fork_server = fork_server
        self._limit_s = limit_s
        self._spent = spent
        self._workers: dict[int, TokenizerWorker] = {}  # by pid
        self._starting: deque[tuple[socket.socket, WorkerQueue]] = deque()
        self._prompts = WorkerQueue(self._fork, max_workers, wait_s)
        self._grammars = WorkerQueue(self._fork, 1, wait_s)  # separate: prompts do not wait for it
        self._compiled = StructureCache()
        self._tasks: set[asyncio.Task[Any]] = set()  # the event loop keeps only weak references
        self._listening = asyncio.create_task(self._listen(), name="tokenizer workers")

    async def chat_ids(self, owner: bytes, request: TemplateInput, *, max_len: int) -> list[int]:
        """Render a conversation with the model's chat template and return the prompt's token ids,
        at most `max_len`. Raises TextError if it is invalid or too long; ServiceError UNAVAILABLE
        if no worker is available in time."""
        conversation = {field.name: getattr(request, field.name) for field in fields(request)}
        head = {"op": "chat", "conversation": conversation, "max_len": max_len}
        return (await self._ids(owner, WorkerMessage(head), 1, max_len))[0]

    async def text_ids(
        self,
        owner: bytes,
        text: str,
        *,
        add_special_tokens: bool,
        max_len: int,
        parse_special: bool = True,
    ) -> list[int]:
        """Convert a text to at most `max_len` token ids. With `parse_special`, the texts of special
        tokens become these tokens. Raises TextError if the text is invalid or too long;
        ServiceError UNAVAILABLE if no worker is available in time."""
        head = {
            "op": "text",
            "add_special_tokens": add_special_tokens,
            "parse_special": parse_special,
            "max_len": max_len,
        }
        message = WorkerMessage(head, [text.encode("utf-8", "surrogatepass")])
        return (await self._ids(owner, message, 1, max_len))[0]

    async def sequences(self, owner: bytes, texts: Sequence[str]) -> list[list[int]]:
        """Convert each of several texts to token ids, as text that follows other text; texts of
        special tokens become these tokens. Raises TextError if a text is invalid; ServiceError
        UNAVAILABLE if no worker is available in time."""
        head = {"op": "sequences", "texts": list(texts)}
        max_ids = MAX_CHAR_IDS * sum(map(len, texts))
        return await self._ids(owner, WorkerMessage(head), len(texts), max_ids)

    async def grammar(self, owner: bytes, structure: Structure) -> str:
        """Compile a structure to the text of Grammar.source (protos/common.proto); results are
        cached. Raises TextError, which names the request's field, if it does not compile;
        ServiceError UNAVAILABLE if no worker is available in time."""
        data = structure.encoded()
        key = hashlib.sha256(data).digest()
        compiled = self._compiled.get(key, self._now())
        if compiled is None:
            compiled = await self._compile(owner, key, data, structure.param)
        if isinstance(compiled, TextError):
            raise TextError(str(compiled), compiled.param)
        return compiled

    async def _compile(self, owner: bytes, key: bytes, data: bytes, param: str) -> str | TextError:
        worker = await self._take(owner, self._grammars)
        compiled = self._compiled.get(key, self._now())  # another request may have compiled it
        if compiled is not None:
            self._grammars.offer(worker)
            return compiled
        message = WorkerMessage({"op": "grammar"}, [data])

        async def compile_now() -> str | TextError:
            result: str | TextError
            until_s = math.inf
            try:
                result = await self._request(
                    owner,
                    self._grammars,
                    worker,
                    message,
                    lambda answer: result_of(answer, MAX_GRAMMAR_BYTES).decode(),
                )
            except TextError as error:
                result = TextError(str(error), error.param or param)
                if not error.param:  # the worker ended, perhaps for another reason
                    until_s = self._now() + DEATH_S
            self._compiled.put(key, result, until_s)
            return result

        return await self._finish(compile_now())

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _ids(
        self, owner: bytes, message: WorkerMessage, count: int, max_len: int
    ) -> list[list[int]]:
        """Send work to a prompt worker and return the `count` sequences of token ids in its answer;
        owners take turns. Raises TextError if the work cannot be done or gives more than `max_len`
        ids (for a chat, also characters); ServiceError UNAVAILABLE if no worker is available in
        time."""
        worker = await self._take(owner, self._prompts)
        return await self._finish(
            self._request(
                owner,
                self._prompts,
                worker,
                message,
                lambda answer: ids_of(answer, count, max_len),
            )
        )

    async def _take(self, owner: bytes, queue: WorkerQueue) -> TokenizerWorker:
        if not self.alive:
            raise _ended_error()
        return await queue.take(owner)

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work in a separate task and wait for it. If the client disconnects, the task
        continues, because its worker stays busy until the answer comes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return await asyncio.shield(task)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it, or asyncio logs it if the client has disconnected

    async def close(self) -> None:
        """End the workers and their fork server; prompts and grammars in progress fail."""
        self.alive = False
        self._listening.cancel()
        for worker in self._workers.values():
            worker.stream.close()
        for sock, _ in self._starting:
            sock.close()
        self._fail_waiting()
        await self._fork_server.close()

    async def _request(
        self,
        owner: bytes,
        queue: WorkerQueue,
        worker: TokenizerWorker,
        message: WorkerMessage,
        read: Callable[[WorkerMessage], T],
    ) -> T:
        """Send work to a worker, return `read(answer)`, and give the worker back. `read` raises
        ValueError if the answer is malformed; the worker is then replaced."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        is_reusable = False
        try:
            answer = await worker.request(message, self._limit_s)
            is_reusable = "last" not in answer.head  # "last": the worker ends, to free its memory
            return read(answer)
        except TextError:
            raise
        except ValueError as error:
            is_reusable = False
            log.error("a tokenizer worker sent an invalid answer: %s", error)
            raise _ended_error() from None
        except BaseException:
            if not self.alive:
                raise _ended_error() from None
            raise
        finally:
            self._spent(owner, loop.time() - started)
            if is_reusable:
                queue.offer(worker)
            else:
                worker.stream.close()
                queue.replace()

    def _fork(self, queue: WorkerQueue) -> None:
        """Tell the fork server to start a worker for a queue. Raises OSError if it cannot be
        reached."""
        self._starting.append((self._fork_server.fork(), queue))

    async def _listen(self) -> None:
        """Receive the fork server's reports of workers that have started or ended, until it
        ends."""
        try:
            while True:
                head = (await self._fork_server.stream.receive()).head
                if "forked" in head:
                    sock, queue = self._starting.popleft()
                    worker = TokenizerWorker(await MessageStream.over(sock))
                    self._workers[head["forked"]] = worker
                    queue.offer(worker)
                else:
                    worker = self._workers.pop(head["ended"])
                    worker.exit_code.set_result(head["code"])
                    worker.stream.close()
        except (OSError, LookupError, TypeError) as error:
            log.error("the tokenizer workers of a model ended unexpectedly: %s", error)
            self._fork_server.kill()  # it may still run and have sent an invalid message
        finally:
            self.alive = False
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        self._prompts.fail(_ended_error)
        self._grammars.fail(_ended_error)


class LoadedTokenizer(NamedTuple):
    """The tokenizer workers of a model, and the facts that they have read from its files."""

    workers: TokenizerWorkers
    vocabulary: Vocabulary
    frames: Frames
    has_template: bool
    defaults: GenerationDefaults
    tool_parser: str  # of the template's family; empty: the template shows no tools
    reasoning_parser: str  # of the template's family; empty: the model does not reason


class TokenizerPool:
    """Starts a fork server and tokenizer workers for each model. `prepare` starts a fork server
    process before its model is known, because its imports take long."""

    def __init__(
        self,
        limits: WorkerLimits,
        num_workers: int,
        spent: Spent = lambda owner, seconds: None,
        wait_s: float = WAIT_S,
        log_format: str = "text",
    ) -> None:
        """Use up to `num_workers` workers for the prompts of each model. `spent` gets the owner and
        the seconds of each piece of work; work waits up to `wait_s` seconds for a worker."""
        self._limits = limits
        self._spent = spent
        self._num_workers = num_workers
        self._wait_s = wait_s
        self._log_format = log_format
        self._spare: asyncio.Task[ForkServer] | None = None

    def prepare(self) -> None:
        """Start a spare fork server for the next `load`, unless there is one already."""
        if self._spare is None:
            self._spare = asyncio.create_task(ForkServer.start(self._limits, self._log_format))

    async def load(self, model_info: TextModelInfo, files: Mapping[str, bytes]) -> LoadedTokenizer:
        """Load a model's tokenizer, chat template and generation defaults from its files in the
        spare fork server. Raises UnsupportedTokenizer if the files are unusable; ServiceError
        UNAVAILABLE if no process can be started."""
        self.prepare()
        assert self._spare is not None
        spare, self._spare = self._spare, None
        try:
            fork_server = await spare
        except OSError as error:
            log.warning("cannot start a tokenizer worker: %s", error)
            raise no_worker_error() from None
        head = {"model_info": asdict(model_info), "files": list(files)}
        request = WorkerMessage(head, list(files.values()))
        try:
            answer = await fork_server.load(request, self._limits.load_s + SLACK_S)
            loaded = dict(answer.head)
            tokens = StoredTokens(*answer.parts)
            vocabulary = stored_vocabulary(
                model_info, loaded["decoder"], loaded["special_ids"], tokens
            )
        except BaseException:
            await fork_server.close()
            raise
        workers = TokenizerWorkers(
            fork_server, self._num_workers, self._limits.late_s + SLACK_S, self._wait_s, self._spent
        )
        return LoadedTokenizer(
            workers,
            vocabulary,
            Frames(**loaded["frames"]),
            loaded["has_template"],
            GenerationDefaults(**loaded["defaults"]),
            str(loaded["tool_parser"]),
            str(loaded["reasoning_parser"]),
        )

    async def close(self) -> None:
        """End the spare fork server, if there is one."""
        if self._spare is not None:
            with suppress(OSError):
                await (await self._spare).close()


def _ended_error() -> ServiceError:
    return ServiceError(
        UNAVAILABLE, "the model's tokenizer workers have ended; try again", retry_after_s=1.0
    )
