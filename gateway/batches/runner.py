"""Finds open batches in the database and runs them: new ones, and those of gateways that have died.

Invariant: this gateway runs a batch only while it holds the batch's lease, which each transaction
of the run verifies.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import time

from pdserve.gateway.batches.batches import (
    BEAT_S,
    Batches,
    LeaseLost,
    LeaseWatch,
    OpenBatch,
    OwnedBatch,
)
from pdserve.gateway.batches.files import Files
from pdserve.gateway.batches.jsonl import ENVELOPE_BYTES
from pdserve.gateway.batches.run import (
    STARTING_S,
    AbsentModels,
    BatchRun,
    LineSlots,
    SendLine,
    WasUsed,
)
from pdserve.gateway.storage.database import Database, in_own_task
from pdserve.services.common.errors import ServiceError

log = logging.getLogger("pdserve.gateway.batches")

# No further batch begins while this many run. Batches that wait for a model do not count, and all
# continue when it appears: up to MAX_OPEN of a tenant (batches.py). LineSlots bounds their lines.
MAX_RUNS = 16  # of one gateway; a key without a run may have one more
MAX_RUNS_OF_TENANT = 4
MAX_ENDING = 16  # further batches that only have to end
PAUSE_S = 10.0  # pause after a failed run
SWEEP_S = 60.0  # between two searches for stopped uploads
CLOSE_S = 3.0  # time to release leases at the end


@dataclass(frozen=True, slots=True)
class _Running:
    opened: OpenBatch
    run: BatchRun
    task: asyncio.Task[None]
    ending: bool  # it was cancelled or expired before it began here

    @property
    def counts(self) -> bool:
        """Whether the run counts against the limit of concurrent batches of its key; runs that only
        end a batch or wait for a model do not."""
        return not self.ending and not self.run.waits


class BatchRunner:
    """Runs the batches of one database in this gateway. Run `run` as a task; call `wake` to look
    for new or cancelled batches at once."""

    def __init__(
        self,
        database: Database,
        files: Files,
        batches: Batches,
        slots: LineSlots,
        accepts_key: Callable[[str], bool],
        max_body_bytes: int,
        was_used: WasUsed,
    ) -> None:
        """`accepts_key`: whether an API key of that name is still accepted; batches of other keys
        wait. `was_used`: whether a tenant has used a model in the last day."""
        self._db = database
        self._files = files
        self._batches = batches
        self._slots = slots
        self._accepts_key = accepts_key
        self._max_line_bytes = max_body_bytes + ENVELOPE_BYTES
        self._was_used = was_used
        self._starting_until = 0.0  # until then workers may still load the models of lines
        self._owner = secrets.token_hex(8)
        self._watch = LeaseWatch()
        self._runs: dict[str, _Running] = {}
        self._claiming = asyncio.Lock()
        self._paused_until: dict[
            str, float
        ] = {}  # batches whose run has failed: end of their pause
        self._wake = asyncio.Event()
        self._stopping = False

    def wake(self) -> None:
        """Look for batches at once instead of at the next interval; call it when a batch was
        created or cancelled."""
        self._wake.set()

    async def run(self, send: SendLine) -> None:
        """Claim and run batches, and remove abandoned uploads, until this task is cancelled. `send`
        sends the request of a line to the API."""
        loop = asyncio.get_running_loop()
        self._starting_until = loop.time() + STARTING_S
        swept = -SWEEP_S
        while True:
            try:
                await self._renew()
                if not self._stopping:
                    await self._claim(send)
                    if loop.time() - swept >= SWEEP_S:
                        swept = loop.time()
                        await self._files.remove_stopped()
            except ServiceError as error:
                log.warning("cannot look for batches in the database; retrying: %s", error.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._wake.wait()
            self._wake.clear()

    async def drain(self) -> None:
        """Start no more batches or lines; return when the lines in progress have ended and the
        leases of all batches are released."""
        await self._stop_claiming()
        for running in self._runs.values():
            running.run.stopping.set()
        await asyncio.gather(*(r.task for r in self._runs.values()), return_exceptions=True)

    async def close(self) -> None:
        """Cancel all runs at once, and release their leases if the database responds within
        CLOSE_S."""
        await self._stop_claiming()
        tasks = [running.task for running in self._runs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    async def _stop_claiming(self) -> None:
        self._stopping = True
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S), self._claiming:
                pass

    async def _renew(self) -> None:
        statuses = await self._batches.renew(self._owner) if self._runs else {}
        for batch_id, running in self._runs.items():
            if batch_id not in statuses:
                running.task.cancel()  # it has ended, or another gateway has claimed it
            elif statuses[batch_id] == "cancelling":
                running.run.cancelling.set()
            elif not running.ending and not self._accepts_key(running.opened.key_name):
                running.run.stopping.set()

    async def _claim(self, send: SendLine) -> None:
        """Claim open batches and start them, within the limits MAX_RUNS, MAX_RUNS_OF_TENANT and
        MAX_ENDING. API keys take turns: the next batch is one of a key with the fewest runs in this
        process."""
        open_batches = await self._batches.leases()
        now, wall_now = asyncio.get_running_loop().time(), time()
        free = {lease.batch_id for lease in self._watch.free([o.lease for o in open_batches], now)}
        claimable = [
            opened
            for opened in open_batches
            if (opened.lease.batch_id in free or opened.lease.owner == self._owner)
            and opened.lease.batch_id not in self._runs
            and self._paused_until.get(opened.lease.batch_id, 0.0) <= now
        ]
        endings = [o for o in claimable if o.cancelling or o.expires_at <= wall_now]
        for opened in endings:
            if sum(running.ending for running in self._runs.values()) < MAX_ENDING:
                await self._claim_one(opened, send, ending=True)
        waiting = [o for o in claimable if o not in endings and self._accepts_key(o.key_name)]
        while waiting and not self._stopping:
            num_runs = Counter(r.opened.tenant for r in self._runs.values() if r.counts)
            candidate = min(waiting, key=lambda o: num_runs[o.tenant])
            max_runs = MAX_RUNS_OF_TENANT if num_runs.total() < MAX_RUNS else 1
            if num_runs[candidate.tenant] >= max_runs:
                return
            waiting.remove(candidate)
            await self._claim_one(candidate, send, ending=False)

    @in_own_task
    async def _claim_one(self, opened: OpenBatch, send: SendLine, ending: bool) -> None:
        """Claim a batch and start its run; if this runner began to stop meanwhile, release the
        batch instead."""
        async with self._claiming:
            if self._stopping or not await self._batches.claim(opened.lease, self._owner):
                return
            if self._stopping:
                await self._batches.release(self._owner, opened.lease.batch_id)
            else:
                self._start(opened, send, ending)

    def _start(self, opened: OpenBatch, send: SendLine, ending: bool) -> None:
        batch_id = opened.lease.batch_id
        if opened.lease.owner:
            log.info("%s: this gateway takes the batch over from one that has died", batch_id)
        owned = OwnedBatch(self._db, batch_id, self._owner)
        absent = AbsentModels(opened.tenant, self._was_used, self._starting_until)
        run = BatchRun(owned, self._files, send, self._slots, self._max_line_bytes, absent)
        task = asyncio.create_task(self._run_one(batch_id, run), name=batch_id)
        self._runs[batch_id] = _Running(opened, run, task, ending)

    async def _run_one(self, batch_id: str, run: BatchRun) -> None:
        try:
            await run.run()
        except LeaseLost:
            log.info(
                "%s: this gateway stops running the batch, since it no longer owns it", batch_id
            )
        except ServiceError as error:
            self._pause(batch_id)
            log.warning("%s: the batch is paused and will be retried: %s", batch_id, error.message)
        except Exception:
            self._pause(batch_id)
            log.exception(
                "%s: unexpected error in the batch's run, which will be retried", batch_id
            )
        finally:
            try:
                with suppress(ServiceError):
                    await self._batches.release(self._owner, batch_id)
            finally:
                del self._runs[batch_id]
                self._wake.set()

    def _pause(self, batch_id: str) -> None:
        now = asyncio.get_running_loop().time()
        self._paused_until = {b: until for b, until in self._paused_until.items() if until > now}
        self._paused_until[batch_id] = now + PAUSE_S
