"""The tokenizer workers of each model, and a spare for the next model.

Ownership: `TextPool` owns the spare process, each `TextProcesses` the process of its model, and
that process its children. A child does one piece of work at a time; a dead or late child is
replaced.
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
from pdserve.text.processes.messages import TextLimits, TextMessage, answered, ids_of
from pdserve.text.processes.parent import (
    MessageStream,
    TextChild,
    TextHost,
    late_error,
    no_process_error,
)
from pdserve.text.request import Structure
from pdserve.text.structured_output import StructureCache
from pdserve.text.tokenizer import StoredTokens, TextCard, Vocabulary, stored_vocabulary

log = logging.getLogger(__name__)
SLACK_S = 2.0  # for the kernel to kill a late child
WAIT_S = 60.0  # of a prompt, for a child
DEATH_S = 60.0  # how long a grammar that ended its child is not retried
MAX_CHAR_IDS = 16  # token ids per character
Spent = Callable[[bytes, float], None]  # (owner, seconds)
T = TypeVar("T")


class Children:
    """Lends children to requests, one request per child at a time; owners take turns."""

    def __init__(
        self, fork: Callable[["Children"], None], max_children: int, wait_s: float
    ) -> None:
        """Make a pool of up to `max_children`; a request waits up to `wait_s` for one. `fork`
        starts a child that is later passed to `offer`, or raises OSError."""
        self._fork = fork
        self._max_children = max_children
        self._free = max_children  # number of children that may still be started
        self._wait_s = wait_s
        self._idle: list[TextChild] = []
        self._waiting: FairQueue[asyncio.Future[TextChild]] = FairQueue()

    async def take(self, owner: bytes) -> TextChild:
        """Wait for an idle child. Raises ServiceError UNAVAILABLE if there is none in time."""
        while self._idle:
            if not (child := self._idle.pop()).has_ended:
                return child
            self._free += 1
        future: asyncio.Future[TextChild] = asyncio.get_running_loop().create_future()
        self._waiting.push(owner, future)
        if self._free:
            self._start()
        try:
            async with asyncio.timeout(self._wait_s):
                try:
                    return await future
                except asyncio.CancelledError:
                    if future.done() and not future.cancelled() and future.exception() is None:
                        # A child arrived together with the cancellation.
                        self.offer(future.result())
                    raise
        except TimeoutError:
            raise late_error() from None

    def offer(self, child: TextChild) -> None:
        """Add an idle child, or replace it if it has ended."""
        if child.has_ended:
            self.replace()
            return
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():  # otherwise the client has disconnected
                waiting.set_result(child)
                return
        self._idle.append(child)

    def replace(self) -> None:
        """Account for an ended child, and start another if requests wait."""
        self._free += 1
        if self._waiting:
            self._start()

    def _start(self) -> None:
        """Start a child. On failure, running children serve the queue; if none runs, fail it."""
        try:
            self._fork(self)
        except OSError as error:
            log.warning("cannot start a text process: %s", error)
            if self._free == self._max_children:
                self.fail(no_process_error)
        else:
            self._free -= 1

    def fail(self, make_error: Callable[[], ServiceError]) -> None:
        """Fail all waiting requests with `why()`."""
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():
                waiting.set_exception(make_error())


class TextProcesses:
    """The processes of one model; they tokenize its prompts and compile its grammars."""

    def __init__(
        self, host: TextHost, max_children: int, limit_s: float, wait_s: float, spent: Spent
    ) -> None:
        """Use up to `max_children` for prompts and one child for grammars. Work waits up to
        `wait_s` for a child and may take `limit_s` in it."""
        self.alive = True
        self._host = host
        self._limit_s = limit_s
        self._spent = spent
        self._children: dict[int, TextChild] = {}  # by pid
        self._starting: deque[tuple[socket.socket, Children]] = deque()
        self._prompts = Children(self._fork, max_children, wait_s)
        self._grammars = Children(self._fork, 1, wait_s)  # separate: prompts do not wait for it
        self._compiled = StructureCache()
        self._tasks: set[asyncio.Task[Any]] = set()  # the event loop keeps only weak references
        self._listening = asyncio.create_task(self._listen(), name="text processes")

    async def chat_ids(self, owner: bytes, request: TemplateInput, *, max_len: int) -> list[int]:
        """Render a conversation and return its token ids. Raises as `_ids` does."""
        conversation = {field.name: getattr(request, field.name) for field in fields(request)}
        head = {"op": "chat", "conversation": conversation, "max_len": max_len}
        return (await self._ids(owner, TextMessage(head), 1, max_len))[0]

    async def text_ids(
        self,
        owner: bytes,
        text: str,
        *,
        add_special_tokens: bool,
        max_len: int,
        parse_special: bool = True,
    ) -> list[int]:
        """Return the token ids of a text. Raises as `_ids` does. Without `parse_special`, the text
        of special tokens is plain text."""
        head = {
            "op": "text",
            "add_special_tokens": add_special_tokens,
            "parse_special": parse_special,
            "max_len": max_len,
        }
        message = TextMessage(head, [text.encode("utf-8", "surrogatepass")])
        return (await self._ids(owner, message, 1, max_len))[0]

    async def sequences(self, owner: bytes, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text as a continuation of other text, with special tokens
        parsed. Raises as `_ids` does."""
        head = {"op": "sequences", "texts": list(texts)}
        max_ids = MAX_CHAR_IDS * sum(map(len, texts))
        return await self._ids(owner, TextMessage(head), len(texts), max_ids)

    async def grammar(self, owner: bytes, structure: Structure) -> str:
        """Compile a structure to Grammar.source; results are cached. Raises TextError that names
        the structure's field; ServiceError UNAVAILABLE."""
        data = structure.encoded()
        key = hashlib.sha256(data).digest()
        compiled = self._compiled.get(key, self._now())
        if compiled is None:
            compiled = await self._compile(owner, key, data, structure.param)
        if isinstance(compiled, TextError):
            raise TextError(str(compiled), compiled.param)
        return compiled

    async def _compile(self, owner: bytes, key: bytes, data: bytes, param: str) -> str | TextError:
        child = await self._take(owner, self._grammars)
        compiled = self._compiled.get(key, self._now())  # another request may have compiled it
        if compiled is not None:
            self._grammars.offer(child)
            return compiled
        message = TextMessage({"op": "grammar"}, [data])

        async def ask() -> str | TextError:
            result: str | TextError
            until_s = math.inf
            try:
                result = await self._ask(
                    owner,
                    self._grammars,
                    child,
                    message,
                    lambda answer: answered(answer, MAX_GRAMMAR_BYTES).decode(),
                )
            except TextError as error:
                result = TextError(str(error), error.param or param)
                if not error.param:  # the child ended, perhaps for another reason
                    until_s = self._now() + DEATH_S
            self._compiled.put(key, result, until_s)
            return result

        return await self._finish(ask())

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _ids(
        self, owner: bytes, message: TextMessage, count: int, max_len: int
    ) -> list[list[int]]:
        """Return `count` sequences of token ids; owners take turns. Raises TextError, also for more
        than `max_len` ids or, from a template, characters; ServiceError UNAVAILABLE."""
        child = await self._take(owner, self._prompts)
        return await self._finish(
            self._ask(
                owner,
                self._prompts,
                child,
                message,
                lambda answer: ids_of(answer, count, max_len),
            )
        )

    async def _take(self, owner: bytes, children: Children) -> TextChild:
        if not self.alive:
            raise _ended_error()
        return await children.take(owner)

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work; it continues if the client disconnects, because its child is busy."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return await asyncio.shield(task)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it, or asyncio logs it if the client has disconnected

    async def close(self) -> None:
        """End the processes and fail the prompts and grammars in progress."""
        self.alive = False
        self._listening.cancel()
        for child in self._children.values():
            child.stream.close()
        for sock, _ in self._starting:
            sock.close()
        self._fail_waiting()
        await self._host.close()

    async def _ask(
        self,
        owner: bytes,
        children: Children,
        child: TextChild,
        message: TextMessage,
        read: Callable[[TextMessage], T],
    ) -> T:
        """Send the message to the child and return `read(answer)`. `read` raises ValueError if the
        answer is malformed; the child is then replaced."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        is_reusable = False
        try:
            answer = await child.ask(message, self._limit_s)
            is_reusable = "last" not in answer.head  # "last": the child ends, to free its memory
            return read(answer)
        except TextError:
            raise
        except ValueError as error:
            is_reusable = False
            log.error("a text process sent an invalid answer: %s", error)
            raise _ended_error() from None
        except BaseException:
            if not self.alive:
                raise _ended_error() from None
            raise
        finally:
            self._spent(owner, loop.time() - started)
            if is_reusable:
                children.offer(child)
            else:
                child.stream.close()
                children.replace()

    def _fork(self, children: Children) -> None:
        """Request a child. Raises OSError if that fails."""
        self._starting.append((self._host.fork(), children))

    async def _listen(self) -> None:
        """Handle the start and exit of children until the process ends."""
        try:
            while True:
                head = (await self._host.stream.receive()).head
                if "forked" in head:
                    sock, children = self._starting.popleft()
                    child = TextChild(await MessageStream.over(sock))
                    self._children[head["forked"]] = child
                    children.offer(child)
                else:
                    child = self._children.pop(head["ended"])
                    child.code.set_result(head["code"])
                    child.stream.close()
        except (OSError, LookupError, TypeError) as error:
            log.error("the text processes of a model ended unexpectedly: %s", error)
            self._host.kill()  # it may still run and have sent an invalid message
        finally:
            self.alive = False
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        self._prompts.fail(_ended_error)
        self._grammars.fail(_ended_error)


class LoadedText(NamedTuple):
    """The loaded text files of a model."""

    processes: TextProcesses
    vocabulary: Vocabulary
    has_template: bool
    defaults: GenerationDefaults
    tool_parser: str  # of the template's family; empty: the template shows no tools
    reasoning_parser: str  # of the template's family; empty: the model does not reason


class TextPool:
    """Starts text processes; `prepare` starts one before its model is known, because imports are
    slow."""

    def __init__(
        self,
        limits: TextLimits,
        num_children: int,
        spent: Spent = lambda owner, seconds: None,
        wait_s: float = WAIT_S,
        log_format: str = "text",
    ) -> None:
        """Use up to `num_children` children for prompts per model. `spent` receives the owner and
        the seconds of each piece of work; `wait_s` bounds the wait for a child."""
        self._limits = limits
        self._spent = spent
        self._num_children = num_children
        self._wait_s = wait_s
        self._log_format = log_format
        self._spare: asyncio.Task[TextHost] | None = None

    def prepare(self) -> None:
        """Start a process for the next `load` unless there is a spare one."""
        if self._spare is None:
            self._spare = asyncio.create_task(TextHost.start(self._limits, self._log_format))

    async def load(self, card: TextCard, files: Mapping[str, bytes]) -> LoadedText:
        """Load tokenizer, template and generation defaults of a model. Raises UnsupportedTokenizer;
        ServiceError UNAVAILABLE if no process can be started."""
        self.prepare()
        assert self._spare is not None
        spare, self._spare = self._spare, None
        try:
            host = await spare
        except OSError as error:
            log.warning("cannot start a text process: %s", error)
            raise no_process_error() from None
        request = TextMessage({"card": asdict(card), "files": list(files)}, list(files.values()))
        try:
            answer = await host.load(request, self._limits.load_s + SLACK_S)
            head = dict(answer.head)
            tokens = StoredTokens(*answer.parts)
            vocabulary = stored_vocabulary(card, head["decoder"], head["special_ids"], tokens)
        except BaseException:
            await host.close()
            raise
        processes = TextProcesses(
            host, self._num_children, self._limits.late_s + SLACK_S, self._wait_s, self._spent
        )
        defaults = GenerationDefaults(**head["defaults"])
        return LoadedText(
            processes,
            vocabulary,
            head["has_template"],
            defaults,
            str(head["tool_parser"]),
            str(head["reasoning_parser"]),
        )

    async def close(self) -> None:
        """End the spare process."""
        if self._spare is not None:
            with suppress(OSError):
                await (await self._spare).close()


def _ended_error() -> ServiceError:
    return ServiceError(
        UNAVAILABLE, "the model's text processes have ended; try again", retry_after_s=1.0
    )
