"""The gateway's side of the text processes: a model's processes, and a spare one for the next.

Ownership: `TextPool` owns the spare process, each `TextProcesses` the process of its model, and
that process its children. A child serves one prompt at a time; one that dies or is late is
replaced.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from typing import NamedTuple

from pdserve.gateway.text.errors import TextError
from pdserve.gateway.text.generation import GenerationDefaults
from pdserve.gateway.text.messages import TemplateInput
from pdserve.gateway.text.vocabulary import (
    StoredTokens,
    TextCard,
    Vocabulary,
    stored_vocabulary,
)
from pdserve.gateway.text_processes.host import (
    MessageStream,
    TextChild,
    TextHost,
    late,
    no_process,
)
from pdserve.gateway.text_processes.protocol import TextLimits, TextMessage, ids_of
from pdserve.protos.common_pb2 import UNAVAILABLE
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.tenants.fairness import FairQueue

log = logging.getLogger(__name__)

SLACK_S = 2.0  # for the kernel to have killed a child that is late
WAIT_S = 60.0  # of a prompt, for a child
Spent = Callable[[bytes, float], None]  # (owner, seconds)


class TextProcesses:
    """The processes of one model, which turn its prompts into token ids."""

    def __init__(
        self, host: TextHost, most: int, limit_s: float, wait_s: float, spent: Spent
    ) -> None:
        """`most` children; a prompt may take `limit_s` in one, after `wait_s` for it."""
        self.alive = True
        self._host = host
        self._most = most
        self._free = most  # children that may still be started
        self._limit_s = limit_s
        self._wait_s = wait_s
        self._spent = spent
        self._children: dict[int, TextChild] = {}  # by pid
        self._starting: deque[socket.socket] = deque()
        self._idle: list[TextChild] = []
        self._waiting: FairQueue[asyncio.Future[TextChild]] = FairQueue()
        self._asking: set[asyncio.Task[list[int]]] = set()  # the loop keeps weak references only
        self._listening = asyncio.create_task(self._listen(), name="text processes")

    async def chat_ids(self, owner: bytes, asked: TemplateInput, *, max_len: int) -> list[int]:
        """The token ids of a conversation. See `_ids`."""
        conversation = {part.name: getattr(asked, part.name) for part in fields(asked)}
        head = {"op": "chat", "conversation": conversation, "max_len": max_len}
        return await self._ids(owner, TextMessage(head))

    async def text_ids(
        self, owner: bytes, text: str, *, add_special_tokens: bool, max_len: int
    ) -> list[int]:
        """The token ids of a text, special tokens in it parsed. See `_ids`."""
        head = {"op": "text", "add_special_tokens": add_special_tokens, "max_len": max_len}
        return await self._ids(owner, TextMessage(head, [text.encode("utf-8", "surrogatepass")]))

    async def _ids(self, owner: bytes, message: TextMessage) -> list[int]:
        """Owners take turns. Raises TextError, also for more than `max_len` ids, and for more
        characters of a template; ServiceError UNAVAILABLE."""
        child = await self._take(owner)
        asking = asyncio.create_task(self._ask(owner, child, message))
        self._asking.add(asking)
        asking.add_done_callback(self._asked)
        return await asyncio.shield(asking)  # its child is busy though the client goes

    def _asked(self, asking: asyncio.Task[list[int]]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # its client may have gone, and asyncio would log it

    async def close(self) -> None:
        """Ends the processes, and fails the prompts that they work on."""
        self.alive = False
        self._listening.cancel()
        for child in self._children.values():
            child.stream.close()
        for sock in self._starting:
            sock.close()
        self._fail_waiting(_ended)
        await self._host.close()

    async def _ask(self, owner: bytes, child: TextChild, message: TextMessage) -> list[int]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        keep = False
        try:
            answer = await child.ask(message, self._limit_s)
            keep = "last" not in answer.head  # otherwise it ends, with what it holds
            return ids_of(answer, message.head["max_len"])
        except TextError:
            raise
        except ValueError as error:
            keep = False
            log.error("a text process answers with %s", error)
            raise _ended() from None
        except BaseException:
            if not self.alive:
                raise _ended() from None
            raise
        finally:
            self._spent(owner, loop.time() - began)
            if keep:
                self._offer(child)
            else:
                child.stream.close()
                self._replace()

    async def _take(self, owner: bytes) -> TextChild:
        if not self.alive:
            raise _ended()
        while self._idle:
            if not (child := self._idle.pop()).has_ended:
                return child
            self._free += 1
        mine: asyncio.Future[TextChild] = asyncio.get_running_loop().create_future()
        self._waiting.push(owner, mine)
        if self._free:
            self._fork()
        try:
            async with asyncio.timeout(self._wait_s):
                try:
                    return await mine
                except asyncio.CancelledError:
                    if mine.done() and not mine.cancelled() and mine.exception() is None:
                        self._offer(mine.result())  # it came at the same time
                    raise
        except TimeoutError:
            raise late() from None

    def _offer(self, child: TextChild) -> None:
        """A child that has nothing to do."""
        if child.has_ended:
            self._replace()
            return
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():  # otherwise its client has gone
                waiting.set_result(child)
                return
        self._idle.append(child)

    def _replace(self) -> None:
        """A child has gone."""
        self._free += 1
        if self._waiting and self.alive:
            self._fork()

    def _fork(self) -> None:
        """Starts one of the free children. If that fails, those that run serve all who wait."""
        try:
            self._starting.append(self._host.fork())
        except OSError as error:
            log.warning("a text process cannot be started: %s", error)
            if self._free == self._most:
                self._fail_waiting(no_process)
        else:
            self._free -= 1

    async def _listen(self) -> None:
        """Hears of children that begin and end."""
        try:
            while True:
                head = (await self._host.stream.receive()).head
                if "forked" in head:
                    child = TextChild(await MessageStream.over(self._starting.popleft()))
                    self._children[head["forked"]] = child
                    self._offer(child)
                else:
                    child = self._children.pop(head["ended"])
                    child.code.set_result(head["code"])
                    child.stream.close()
        except (OSError, LookupError, TypeError) as error:
            log.error("the text processes of a model have ended: %s", error)
            self._host.kill()  # if it has not ended, but sends what it must not
        finally:
            self.alive = False
            self._fail_waiting(_ended)

    def _fail_waiting(self, why: Callable[[], ServiceError]) -> None:
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():
                waiting.set_exception(why())


class LoadedText(NamedTuple):
    """What a model's text files say."""

    processes: TextProcesses
    vocabulary: Vocabulary
    has_template: bool
    defaults: GenerationDefaults
    tool_parser: str  # of the template's family; empty: the template shows no tools
    reasoning_parser: str  # likewise; empty: the model does not think


class TextPool:
    """Starts text processes; `prepare` begins one before its model is known, since imports take a
    while."""

    def __init__(
        self,
        limits: TextLimits,
        num_children: int,
        spent: Spent = lambda owner, seconds: None,
        wait_s: float = WAIT_S,
    ) -> None:
        """`num_children`: of each model; `spent` hears whose prompt took how many seconds;
        `wait_s`: how long a prompt may wait for a child."""
        self._limits = limits
        self._spent = spent
        self._num_children = num_children
        self._wait_s = wait_s
        self._spare: asyncio.Task[TextHost] | None = None

    def prepare(self) -> None:
        """Starts a process for the next `load`, unless one waits for it."""
        if self._spare is None:
            self._spare = asyncio.create_task(TextHost.start(self._limits))

    async def load(self, card: TextCard, files: Mapping[str, bytes]) -> LoadedText:
        """Loads tokenizer, template and generation defaults. Raises UnsupportedTokenizer, and
        ServiceError UNAVAILABLE if there is no process for it now."""
        self.prepare()
        assert self._spare is not None
        spare, self._spare = self._spare, None
        try:
            host = await spare
        except OSError as error:
            log.warning("a text process cannot be started: %s", error)
            raise no_process() from None
        asked = TextMessage({"card": asdict(card), "files": list(files)}, list(files.values()))
        try:
            answer = await host.load(asked, self._limits.load_s + SLACK_S)
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
        """Ends the spare process."""
        if self._spare is not None:
            with suppress(OSError):
                await (await self._spare).close()


def _ended() -> ServiceError:
    return ServiceError(UNAVAILABLE, "the model's text processes have ended", retry_after_s=1.0)
