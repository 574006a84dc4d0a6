"""Finds open batches and runs them: those that are new, and those whose gateway has died.

Invariant: a batch is run here only while its lease is this gateway's, which each transaction of a
run checks once more.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from time import time

from pdserve.gateway.batches.batches import Batches, LeaseLost, OwnedBatch
from pdserve.gateway.batches.files import Files
from pdserve.gateway.batches.jsonl import ENVELOPE_BYTES
from pdserve.gateway.batches.leases import BEAT_S, BatchLease, LeaseWatch
from pdserve.gateway.batches.run import Ask, BatchRun
from pdserve.gateway.batches.slots import LineSlots
from pdserve.gateway.storage.database import Database
from pdserve.services.host.errors import ServiceError

log = logging.getLogger("pdserve.gateway.batches")

MAX_RUNS = 16  # batches that one gateway runs at once
MAX_RUNS_OF_TENANT = 4
REST_S = 10.0  # after a run that has failed
SWEEP_S = 60.0  # between two looks for uploads that have stopped
CLOSE_S = 3.0  # to give leases back at the end


class BatchRunner:
    """Runs batches of one database; `run` is its task, `wake` makes it look at once."""

    def __init__(
        self,
        database: Database,
        files: Files,
        batches: Batches,
        slots: LineSlots,
        accepts_key: Callable[[str], bool],
        max_body_bytes: int,
    ) -> None:
        """`accepts_key`: whether a key of that name may still ask; its batches wait otherwise."""
        self._db = database
        self._files = files
        self._batches = batches
        self._slots = slots
        self._accepts_key = accepts_key
        self._max_line_bytes = max_body_bytes + ENVELOPE_BYTES
        self._owner = secrets.token_hex(8)
        self._watch = LeaseWatch()
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._tenants: dict[str, str] = {}  # of the runs
        self._rests: dict[str, float] = {}  # batches whose run has failed, until when
        self._wake = asyncio.Event()
        self._stopping = False

    def wake(self) -> None:
        """A batch is new, or is to be cancelled."""
        self._wake.set()

    async def run(self, ask: Ask) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        swept = -SWEEP_S
        while True:
            try:
                await self._renew()
                if not self._stopping:
                    await self._claim(ask)
                    if loop.time() - swept >= SWEEP_S:
                        swept = loop.time()
                        await self._files.remove_stopped()
            except ServiceError as error:
                log.warning("batches wait: %s", error.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._wake.wait()
            self._wake.clear()

    async def drain(self) -> None:
        """Begins no more lines; returns when those that run have ended and the leases are free."""
        self._stopping = True
        for run, _ in self._runs.values():
            run.stopping.set()
        await asyncio.gather(*(task for _, task in self._runs.values()), return_exceptions=True)

    async def close(self) -> None:
        """Ends everything at once, and gives the leases back if the database answers."""
        self._stopping = True
        tasks = [task for _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    async def _renew(self) -> None:
        held = await self._batches.renew(self._owner) if self._runs else {}
        for batch_id, (run, task) in self._runs.items():
            if batch_id not in held:
                task.cancel()  # it has ended, or another gateway has taken it
            elif held[batch_id] == "cancelling":
                run.cancelling.set()

    async def _claim(self, ask: Ask) -> None:
        found = await self._batches.leases()
        now = asyncio.get_running_loop().time()
        free = {lease.batch_id for lease in self._watch.free((o.lease for o in found), now)}
        for opened in found:
            lease = opened.lease
            if len(self._runs) >= MAX_RUNS:
                return
            if lease.batch_id in self._runs or self._rests.get(lease.batch_id, 0.0) > now:
                continue
            if lease.batch_id not in free and lease.owner != self._owner:
                continue
            if Counter(self._tenants.values())[opened.tenant] >= MAX_RUNS_OF_TENANT:
                continue
            if not self._accepts_key(opened.key_name) and opened.expires_at > time():
                continue
            if await self._batches.claim(lease, self._owner):
                self._start(lease, opened.tenant, ask)

    def _start(self, lease: BatchLease, tenant: str, ask: Ask) -> None:
        if lease.owner:
            log.info("%s goes on here", lease.batch_id)
        owned = OwnedBatch(self._db, lease.batch_id, self._owner)
        run = BatchRun(owned, self._files, ask, self._slots, self._max_line_bytes)
        task = asyncio.create_task(self._run_one(lease.batch_id, run), name=lease.batch_id)
        self._runs[lease.batch_id] = run, task
        self._tenants[lease.batch_id] = tenant

    async def _run_one(self, batch_id: str, run: BatchRun) -> None:
        try:
            await run.run()
        except LeaseLost:
            log.info("%s goes on elsewhere", batch_id)
        except ServiceError as error:
            self._rest(batch_id)
            log.warning("%s waits: %s", batch_id, error.message)
        except Exception:
            self._rest(batch_id)
            log.exception("%s has failed, and is tried again", batch_id)
        finally:
            try:
                with suppress(ServiceError):
                    await self._batches.release(self._owner, batch_id)
            finally:
                del self._runs[batch_id], self._tenants[batch_id]
                self._wake.set()

    def _rest(self, batch_id: str) -> None:
        now = asyncio.get_running_loop().time()
        self._rests = {b: until for b, until in self._rests.items() if until > now}
        self._rests[batch_id] = now + REST_S
