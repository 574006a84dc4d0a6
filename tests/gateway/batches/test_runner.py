"""Which batches a gateway runs: keys take turns, and cancelled or expired ones end at once."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.batches import (
    Batches,
    BatchRunner,
    FileLimits,
    Files,
    LineResponse,
    LineSlots,
    run,
    runner,
)
from pdserve.gateway.batches.batches import BatchLease
from pdserve.gateway.batches.runner import MAX_RUNS_OF_TENANT
from pdserve.gateway.storage.database import Database
from pdserve.services.common.tenants import Tenant

pytestmark = pytest.mark.anyio
URL = "/v1/completions"


class World:
    """A runner, the lines it has requested, and the revoked keys; answers wait for `answers`."""

    def __init__(self, database: Database, batches: Batches) -> None:
        self.batches = batches
        self.requests: list[str] = []
        self.num_missing = 0
        self.used: set[str] = set()  # models from which a key has had answers
        self.come = False  # whether the model "missing" is served
        self.revoked: set[str] = set()
        self.answers = asyncio.Event()
        self._files = Files(database, FileLimits(1 << 30, 1 << 30, 1000))
        slots = LineSlots(2, lambda: 0)
        self.runner = BatchRunner(
            database,
            self._files,
            batches,
            slots,
            lambda name: name not in self.revoked,
            1 << 20,
            self.was_used,
        )

    async def was_used(self, tenant: str, model: str) -> bool:
        return model in self.used

    async def ask(self, endpoint: str, body: bytes, tenant: Tenant, session: str) -> LineResponse:
        self.requests.append(tenant.name)
        await asyncio.sleep(0.01)
        await self.answers.wait()
        missing = b"missing" in body and not self.come
        self.num_missing += missing
        return LineResponse("request", 404 if missing else 200, b"{}")

    async def make(
        self, tenant: Tenant, count: int, window_s: int = 86400, models: tuple[str, ...] = ("a",)
    ) -> str:
        """Create a batch whose given number of lines request the models in turn; returns its id."""
        owner = tenant.id.hex()
        file_id = await self._files.begin(owner)
        lines = [
            json.dumps(
                {
                    "custom_id": f"{n}",
                    "method": "POST",
                    "url": URL,
                    "body": {"model": models[n % len(models)]},
                }
            ).encode()
            for n in range(count)
        ]
        await self._files.append(owner, file_id, 0, b"\n".join(lines))
        await self._files.finish(file_id, "in.jsonl", "batch")
        made = await self.batches.create(tenant, URL, file_id, "24h", window_s, None)
        self.runner.wake()
        return made.id

    async def owner(self, batch_id: str) -> str:
        found = {o.lease.batch_id: o.lease.owner for o in await self.batches.leases()}
        return found[batch_id]

    async def has_status(self, tenant: Tenant, batch_id: str, status: str) -> None:
        async def reached() -> bool:
            found = await self.batches.find(tenant.id.hex(), batch_id)
            assert found is not None
            return found.status == status

        await eventually(reached)


class GatedBatches(Batches):
    """Batches whose claim is committed but not yet returned."""

    claimed: asyncio.Event | None = None
    heard = asyncio.Event()

    async def claim(self, lease: BatchLease, owner: str) -> bool:
        done = await super().claim(lease, owner)
        if self.claimed is not None:
            self.claimed.set()
            await self.heard.wait()
        return done


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[World]:
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    await database.start()
    made = World(database, GatedBatches(database))
    made.batches.heard = asyncio.Event()
    yield made
    await made.runner.close()
    await database.close()


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gateway count as started long ago."""
    monkeypatch.setattr(runner, "STARTING_S", 0.0)


@pytest.fixture
async def running(world: World) -> AsyncIterator[World]:
    task = asyncio.create_task(world.runner.run(world.ask))
    yield world
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def key(number: int) -> Tenant:
    return Tenant(f"key-{number}", bytes([number]) * 8, b"")


async def test_long_batches_of_some_keys_do_not_delay_another_key(world):
    long = [await world.make(key(n), 2000) for n in range(4) for _ in range(MAX_RUNS_OF_TENANT)]
    world.answers.set()
    task = asyncio.create_task(world.runner.run(world.ask))
    try:
        for batch_id in long:
            await eventually(lambda batch_id=batch_id: world.owner(batch_id))
        last = await world.make(key(4), 1)
        await world.has_status(key(4), last, "completed")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_batch_that_has_not_started_is_cancelled_at_once(world):
    batch_id = await world.make(key(0), 3)
    batch = await world.batches.cancel(key(0).id.hex(), batch_id)
    assert batch is not None
    assert batch.status == "cancelled"
    assert batch.ended_at == batch.cancelling_at
    assert await world.batches.leases() == []


async def test_expiry_does_not_wait_for_other_batches(running):
    for _ in range(MAX_RUNS_OF_TENANT):
        batch_id = await running.make(key(0), 2)
        await eventually(lambda batch_id=batch_id: running.owner(batch_id))
    waits = await running.make(key(0), 2)
    over = await running.make(key(0), 2, window_s=0)
    await running.has_status(key(0), over, "expired")
    assert await running.owner(waits) == ""


async def test_batches_of_a_revoked_key_stop(running):
    running.answers.set()
    batch_id = await running.make(key(0), 5000)
    await eventually(lambda: running.requests)
    running.revoked.add("key-0")

    async def is_free() -> bool:
        return not await running.owner(batch_id)

    await eventually(is_free)
    count = len(running.requests)
    other = await running.make(key(1), 1)
    await running.has_status(key(1), other, "completed")
    assert running.requests[count:] == ["key-1"]
    assert await running.owner(batch_id) == ""


@pytest.mark.parametrize("end", ["drain", "close"])
async def test_a_claim_in_progress_at_shutdown_is_returned(running, end):
    running.batches.claimed = asyncio.Event()
    batch_id = await running.make(key(0), 2)
    await running.batches.claimed.wait()
    assert await running.owner(batch_id)
    ending = asyncio.create_task(getattr(running.runner, end)())
    await asyncio.sleep(0)
    running.batches.heard.set()
    await ending
    assert await running.owner(batch_id) == ""
    assert running.requests == []


async def test_lines_of_a_served_model_do_not_restart_the_wait_for_a_missing_one(
    running, monkeypatch
):
    """Once the wait for a model is over, request each of its lines once."""
    monkeypatch.setattr(run, "MODEL_WAIT_S", 1.0)
    running.answers.set()
    batch_id = await running.make(key(0), 60, models=("a", "a", "missing"))
    await running.has_status(key(0), batch_id, "completed")
    batch = await running.batches.find(key(0).id.hex(), batch_id)
    assert batch is not None
    assert (batch.completed, batch.failed) == (40, 20)
    assert 20 < running.num_missing < 40


async def test_a_used_model_is_awaited_without_delaying_others(running, monkeypatch):
    """As after a restart, when a small model is ready and a large one takes minutes to load."""
    monkeypatch.setattr(run, "MODEL_WAIT_S", 0.1)
    running.used.add("missing")
    running.answers.set()
    batch_id = await running.make(key(0), 60, models=("missing", "a", "missing"))

    async def counts() -> tuple[int, int]:
        batch = await running.batches.find(key(0).id.hex(), batch_id)
        assert batch is not None
        return batch.completed, batch.failed

    async def others_are_answered() -> bool:
        return await counts() == (20, 0)

    await eventually(others_are_answered)
    await asyncio.sleep(1.0)
    assert await counts() == (20, 0)
    assert running.num_missing < 20  # one line polls for all
    running.come = True
    await running.has_status(key(0), batch_id, "completed")
    assert await counts() == (60, 0)


async def test_a_missing_used_model_is_awaited_until_the_window_ends(running, monkeypatch):
    monkeypatch.setattr(run, "MODEL_WAIT_S", 0.1)
    running.used.add("missing")
    running.answers.set()
    batch_id = await running.make(key(0), 4, window_s=2, models=("missing", "a"))
    await running.has_status(key(0), batch_id, "expired")
    batch = await running.batches.find(key(0).id.hex(), batch_id)
    assert batch is not None
    assert (batch.completed, batch.failed) == (2, 0)


async def test_batches_waiting_for_a_model_do_not_delay_others_of_their_key(running):
    running.used.add("missing")
    running.answers.set()
    waiting = [await running.make(key(0), 2, models=("missing",)) for _ in range(5)]
    other = await running.make(key(0), 2)
    await running.has_status(key(0), other, "completed")
    running.come = True
    for batch_id in waiting:
        await running.has_status(key(0), batch_id, "completed")


async def test_lines_waiting_for_a_model_end_with_the_process(running):
    running.used.add("missing")
    running.answers.set()
    batch_id = await running.make(key(0), 4, models=("missing",))
    await eventually(lambda: running.num_missing)
    await asyncio.wait_for(running.runner.drain(), LIMIT_S)
    assert await running.owner(batch_id) == ""
