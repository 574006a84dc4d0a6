"""Runs one batch to its end; a run after an interruption continues where the earlier one stopped.

Routers do not know models that workers are still loading, so a model that the API does not find may
appear later. A line that requests such a model waits for it:
- until the batch's completion window ends, if the API key had responses of the model in the last
  day;
- otherwise until STARTING_S after the gateway started, since workers may have started with it;
- and for at least MODEL_WAIT_S.

All state is in the database: an interrupted run loses only responses not yet committed, and the
lines of these run again.
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
    """Limits the lines of all batches that run at once in this gateway to `max_running`; tenants
    take turns. While a client's request waits for its first token (`num_waiting` returns their
    number), a line starts only if no other one runs, so that batches make progress without delaying
    clients."""

    def __init__(self, max_running: int, num_waiting: Callable[[], int]) -> None:
        self.max_running = max_running
        self._num_waiting = num_waiting
        self._turns = FairSemaphore(max_running)
        self.running = 0

    @asynccontextmanager
    async def turn(self, owner: bytes) -> AsyncIterator[None]:
        """Wait for a free slot and hold it for the `async with` block, in which the caller runs one
        line."""
        async with self._turns.turn(owner):
            while self.running and self._num_waiting():  # noqa: ASYNC110  (nothing signals it)
                await asyncio.sleep(PAUSE_S)
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1


class AbsentModels:
    """Models that lines of one batch request and that no worker serves, with the time since
    when."""

    def __init__(self, tenant: str, was_used: WasUsed, starting_until: float) -> None:
        """`starting_until`: end of the time in which workers may still be starting, in seconds on
        the clock whose time `gives_up` gets. `was_used`: whether the tenant has used a model in the
        last day."""
        self._tenant = tenant
        self._was_used = was_used
        self._starting_until = starting_until
        self._since: dict[str, float] = {}
        self._given_up: set[str] = set()

    def found(self, model: str) -> None:
        """Record that a worker serves the model now."""
        self._since.pop(model, None)
        self._given_up.discard(model)

    async def gives_up(self, model: str, now: float) -> bool:
        """Return whether to stop waiting for an absent model, so that "model not found" is the
        result of its lines; if False, these lines keep waiting. Raises ServiceError if the database
        cannot be used."""
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
    """The API's response to the request of a line; `body` is JSON."""

    request_id: str
    status: int
    body: bytes
    retry_after_s: float = 0.0


SendLine = Callable[[str, bytes, Tenant, str], Awaitable[LineResponse]]
"""Sends the request of a line to the API: (endpoint, body, tenant, session)."""


class _Stopped(Exception):
    """Ends a run before its batch has ended, because `BatchRun.stopping` is set."""


class BatchRun:
    """Validates the input file of a batch, runs its lines and ends the batch.

    Set `cancelling` when the client cancels the batch. Set `stopping` when this process ends or no
    longer accepts the batch's key: lines in progress finish, and no further ones start.
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
        """Run the batch until it has ended, or until its lines in progress finish after `stopping`
        is set. Raises LeaseLost if another gateway took the batch over, ServiceError if the
        database cannot be used."""
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
        """Check all lines of the input file and store their positions; return whether all are
        valid. If not, the batch ends as failed."""
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
        """Run the batch's lines until each has a result, the completion window ends, or the client
        cancels the batch."""
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
        """Run all lines of the batch. Lines whose model no worker serves do not block the others:
        they are set aside, and run when such a model appears."""
        while True:
            self._set_aside.clear()
            await self._answer_each(batch, tenant)
            self._check_stopping()
            if not self._set_aside:
                return
            await self._wait_for_a_model(batch, tenant)

    async def _wait_for_a_model(self, batch: StoredBatch, tenant: Tenant) -> None:
        """Send the first line of each absent model repeatedly, with growing pauses, until one of
        the models is served or is no longer waited for."""
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
        """Send each line that has no result, several at a time, until it has a result or is set
        aside because no worker serves its model. Stops early, after the lines in progress, if
        `stopping` is set."""
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
        """Yield the positions of the input lines that have no result, in order."""
        last = 0
        while page := await self._owned.lines(last, PAGE):
            for span in page:
                yield span
            last = page[-1].number

    async def _answer_line(self, batch: StoredBatch, tenant: Tenant, span: Span) -> None:
        """Send a line, again if the server is busy, until it has a result or is set aside because
        no worker serves its model."""
        pause_s = FIRST_PAUSE_S
        while busy := await self._send_once(batch, tenant, span):
            await self._pause(max(busy.retry_after_s, pause_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _send_once(
        self, batch: StoredBatch, tenant: Tenant, span: Span
    ) -> LineResponse | None:
        """Send the request of a line once and store its result. Sets the line aside without a
        result if no worker serves its model. Returns the response if the server is busy, so that
        the caller retries; else None. The line is in memory only while it holds a slot of
        LineSlots."""
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
        """Sleep for a random time of 1 to 1.5 times `min_s`; return early if `stopping` is set."""
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
    """Wait until the event is set, or at most `wait_s` seconds."""
    waiting: asyncio.Task[Any] = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((waiting,), timeout=wait_s)
    finally:
        waiting.cancel()
