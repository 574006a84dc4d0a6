"""Runs one batch to its end, continuing where an earlier run stopped.

Routers do not know the models that workers still load, and a fleet serves its small models first,
so an absent model may still appear. A line waits for it
- to the end of the window, if the key had responses from it in the last day;
- for STARTING_S after the gateway began, when workers may have been started with it;
- for MODEL_WAIT_S in any case.

The state is in the database: an interrupted run loses only responses that were not committed, and
those lines run again.
"""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from pdserve.gateway.batches import jsonl
from pdserve.gateway.batches.batches import OwnedBatch
from pdserve.gateway.batches.files import Files
from pdserve.gateway.batches.jsonl import LineChecker, LineError, LineRequest, LineSplitter, Span
from pdserve.gateway.batches.tables import StoredBatch
from pdserve.services.common.fairness import FairSemaphore
from pdserve.services.common.tenants import Tenant

PAUSE_S = 0.05  # between two checks for waiting requests
MODEL_WAIT_S = 30.0
STARTING_S = 900.0
MAX_MODELS = 1000  # waited for per batch; a fleet has fewer, so more names are typing errors
MAX_NAME = 512  # characters of a name that are compared
WasUsed = Callable[[str, str], Awaitable[bool]]
"""Whether a tenant (its id in hexadecimal) has used a model in the last day."""
MAX_ERRORS = 100  # reported errors of an input file
LINES_AT_ONCE = 500  # lines written in one transaction
PAGE = 64  # lines read by one query
CHECK_BYTES = 1 << 14  # bytes of input checked before other tasks get a turn
RETRIED_STATUSES = (429, 499, 503)  # the server is busy or ends; these are not results
NOT_FOUND = 404
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 30.0  # before a line is retried
REASONS = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "The batch was cancelled before this request was executed.",
}


class LineSlots:
    """Lets at most `max_running` lines of batches run at once; tenants take turns. While any of
    the `num_waiting()` client requests waits for its first token, a line starts only if no other
    one runs, so that batches progress without delaying clients."""

    def __init__(self, max_running: int, num_waiting: Callable[[], int]) -> None:
        self.max_running = max_running
        self._num_waiting = num_waiting
        self._turns = FairSemaphore(max_running)
        self.running = 0

    @asynccontextmanager
    async def turn(self, owner: bytes) -> AsyncIterator[None]:
        """Run one line in the block."""
        async with self._turns.turn(owner):
            while self.running and self._num_waiting():  # noqa: ASYNC110  (nothing signals it)
                await asyncio.sleep(PAUSE_S)
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1


class AbsentModels:
    """Models that lines of one batch request and that no worker serves."""

    def __init__(self, tenant: str, was_used: WasUsed, starting_until: float) -> None:
        """`starting_until` is in seconds on the clock of `gives_up`."""
        self._tenant = tenant
        self._was_used = was_used
        self._starting_until = starting_until
        self._since: dict[str, float] = {}
        self._given_up: set[str] = set()

    def found(self, model: str) -> None:
        """Record that the model is served."""
        self._since.pop(model, None)
        self._given_up.discard(model)

    async def gives_up(self, model: str, now: float) -> bool:
        """Return whether "model not found" is the result of a line; if not, the line waits for the
        model. Raises ServiceError if the database cannot be used."""
        if model in self._given_up:
            return True
        if len(self._since) < MAX_MODELS:
            self._since.setdefault(model, now)
        since = self._since.get(model)
        if since is not None:
            if now < max(since + MODEL_WAIT_S, self._starting_until):
                return False
            if await self._was_used(self._tenant, model):
                return False
            self._given_up.add(model)
        return True


@dataclass(frozen=True, slots=True)
class LineResponse:
    """The API's response to a line; `body` is JSON."""

    request_id: str
    status: int
    body: bytes
    retry_after_s: float = 0.0


SendLine = Callable[[str, bytes, Tenant, str], Awaitable[LineResponse]]
"""Sends the request of a line to the API: (endpoint, body, tenant, session)."""


class _Stopped(Exception):
    """The run ends before the batch does, since `stopping` is set."""


class BatchRun:
    """Validates the input file of a batch, runs its lines and ends it.

    `cancelling` is set when the client cancels the batch, `stopping` when this process ends:
    running lines may finish, and no more are begun.
    """

    def __init__(
        self,
        owned: OwnedBatch,
        files: Files,
        send: SendLine,
        slots: LineSlots,
        max_line_bytes: int,
        absent: AbsentModels,
    ) -> None:
        self._owned = owned
        self._files = files
        self._send = send
        self._slots = slots
        self._max_line_bytes = max_line_bytes
        self._absent = absent
        self._set_aside: dict[str, Span] = {}  # the first line of each absent model
        self.waits = False  # all remaining lines request absent models
        self.cancelling = asyncio.Event()
        self.stopping = asyncio.Event()

    async def run(self) -> None:
        """Run until the batch has ended, or until soon after `stopping` is set. Raises LeaseLost,
        and ServiceError if the database cannot be used."""
        with suppress(_Stopped):
            await self._run()

    async def _run(self) -> None:
        batch = await self._owned.load()
        if batch.status == "validating":
            if not await self._validate(batch):
                return
            batch = await self._owned.load()
        if batch.status == "cancelling" and batch.in_progress_at is None:
            await self._owned.restart_validation()
            await self._owned.end("cancelled")
            return
        if batch.status == "in_progress":
            await self._answer_lines(batch)
            self._check_stopping()
            batch = await self._owned.load()
        if await self._owned.lines(0, 1):
            cancelled = batch.status == "cancelling"
            await self._give_up(batch, "batch_cancelled" if cancelled else "batch_expired")
            await self._owned.end("cancelled" if cancelled else "expired")
            return
        await self._owned.finalize()
        cancelled = (await self._owned.load()).status == "cancelling"
        await self._owned.end("cancelled" if cancelled else "completed")

    def _check_stopping(self) -> None:
        if self.stopping.is_set():
            raise _Stopped

    # --- the input file

    async def _validate(self, batch: StoredBatch) -> bool:
        """Check all lines and store them; return whether all are valid."""
        await self._owned.restart_validation()
        checker = LineChecker(batch.endpoint, self._max_line_bytes)
        errors: list[LineError] = []
        spans: list[Span] = []
        async with aclosing(self._lines_of(batch.input_file_id)) as lines:
            async for span, line in lines:
                try:
                    checker.check(span, line)
                except LineError as error:
                    errors.append(error)
                    if len(errors) == MAX_ERRORS or error.code == "too_many_tasks":
                        break
                spans.append(span)
                if len(spans) == LINES_AT_ONCE and not errors:
                    await self._owned.add_lines(spans)
                    spans.clear()
        if not checker.count:
            errors.append(LineError("empty_file", "The input file contains no requests."))
        if errors:
            await self._owned.fail([error.as_object() for error in errors])
            return False
        if spans:
            await self._owned.add_lines(spans)
        await self._owned.begin(checker.count)
        return True

    async def _lines_of(self, file_id: str) -> AsyncGenerator[tuple[Span, bytes | None], None]:
        splitter = LineSplitter(self._max_line_bytes)
        async with aclosing(self._files.pieces(file_id)) as pieces:
            async for piece in pieces:
                self._check_stopping()
                for start in range(0, len(piece), CHECK_BYTES):
                    for line in splitter.push(piece[start : start + CHECK_BYTES]):
                        yield line
                    await asyncio.sleep(0)
        for line in splitter.flush():
            yield line

    async def _request(self, batch: StoredBatch, span: Span) -> LineRequest:
        line = await self._files.read(batch.input_file_id, span.at, span.num_bytes)
        return jsonl.parse_line(line, batch.endpoint)

    # --- answers

    async def _answer_lines(self, batch: StoredBatch) -> None:
        """Run lines until none remains, the window ends, or the client cancels."""
        tenant = Tenant(batch.key_name, bytes.fromhex(batch.tenant), batch.salt)
        working = asyncio.create_task(self._work(batch, tenant), name=batch.id)
        cancelling = asyncio.create_task(self.cancelling.wait())
        remaining_s = max(0.0, batch.expires_at - time.time())
        try:
            await asyncio.wait(
                (working, cancelling), timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED
            )
            if working.done():
                working.result()
        finally:
            working.cancel()
            cancelling.cancel()
            await asyncio.gather(working, cancelling, return_exceptions=True)

    async def _work(self, batch: StoredBatch, tenant: Tenant) -> None:
        """Run all lines. Lines of absent models do not block others: they run when one of their
        models appears."""
        while True:
            self._set_aside.clear()
            await self._answer_each(batch, tenant)
            self._check_stopping()
            if not self._set_aside:
                return
            await self._wait_for_a_model(batch, tenant)

    async def _wait_for_a_model(self, batch: StoredBatch, tenant: Tenant) -> None:
        """Try one line of each absent model repeatedly, until a model appears or its wait ends."""
        pause_s = FIRST_PAUSE_S
        self.waits = True
        try:
            while True:
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                for model, span in list(self._set_aside.items()):
                    del self._set_aside[model]
                    await self._send_once(batch, tenant, span)
                    if model not in self._set_aside:
                        return
        finally:
            self.waits = False

    async def _answer_each(self, batch: StoredBatch, tenant: Tenant) -> None:
        """Run each line until it has a result or is set aside, or until soon after `stopping` is
        set."""
        spans = self._spans()
        spans_lock = asyncio.Lock()

        async def worker() -> None:
            with suppress(_Stopped):  # lines of other workers may finish
                while True:
                    self._check_stopping()
                    async with spans_lock:
                        span = await anext(spans, None)
                    if span is None:
                        return
                    await self._answer_line(batch, tenant, span)

        try:
            async with aclosing(spans), asyncio.TaskGroup() as group:
                for _ in range(self._slots.max_running):
                    group.create_task(worker())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _spans(self) -> AsyncGenerator[Span, None]:
        """The lines without a result, in order."""
        last = 0
        while page := await self._owned.lines(last, PAGE):
            for span in page:
                yield span
            last = page[-1].number

    async def _answer_line(self, batch: StoredBatch, tenant: Tenant, span: Span) -> None:
        """Retry a line until it has a result or is set aside."""
        pause_s = FIRST_PAUSE_S
        while busy := await self._send_once(batch, tenant, span):
            await self._pause(max(busy.retry_after_s, pause_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _send_once(
        self, batch: StoredBatch, tenant: Tenant, span: Span
    ) -> LineResponse | None:
        """Run a line once, unless its model is known to be absent: then it is set aside. Returns a
        response that is not a result. Everything is held in memory only during the line's turn."""
        async with self._slots.turn(tenant.id):
            self._check_stopping()
            request = await self._request(batch, span)
            model = str(request.body.get("model"))[:MAX_NAME]
            if model in self._set_aside:
                return None
            body = to_json(request.body)
            response = await self._send(batch.endpoint, body, tenant, batch.id)
            if response.status in RETRIED_STATUSES:
                return response
            if response.status != NOT_FOUND:
                self._absent.found(model)
            elif not await self._absent.gives_up(model, asyncio.get_running_loop().time()):
                self._set_aside.setdefault(model, span)
                return None
            line = jsonl.answered(
                response.request_id, request.custom_id, response.status, response.body
            )
            await self._owned.add_result(span.number, line, response.status == 200)
            return None

    async def _pause(self, min_s: float) -> None:
        """Sleep for 1 to 1.5 times `min_s`; ends early when `stopping` is set."""
        await _wait_for(self.stopping, min_s * random.uniform(1.0, 1.5))

    # --- lines that are not run

    async def _give_up(self, batch: StoredBatch, code: str) -> None:
        while page := await self._owned.lines(0, LINES_AT_ONCE):
            self._check_stopping()
            results = []
            for span in page:
                request = await self._request(batch, span)
                line = jsonl.not_run(uuid.uuid4().hex, request.custom_id, code, REASONS[code])
                results.append((span.number, line))
            await self._owned.add_not_run(results)


async def _wait_for(event: asyncio.Event, wait_s: float) -> None:
    """Wait until the event is set or the time is over."""
    waiting: asyncio.Task[Any] = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((waiting,), timeout=wait_s)
    finally:
        waiting.cancel()
