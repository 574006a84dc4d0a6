"""The database: a cancelled caller does not cut off a transaction, and other users cannot read the
file."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import aiosqlite
import pytest
from sqlalchemy import text
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.batches import FileLimits, Files
from pdserve.gateway.caller import Caller
from pdserve.gateway.metrics import RequestUsage
from pdserve.gateway.metrics.usage_log import UsageLog
from pdserve.gateway.storage import KeptResponse
from pdserve.gateway.storage import database as database_module
from pdserve.gateway.storage.database import Database, in_own_task
from pdserve.gateway.storage.responses import DatabaseResponses
from pdserve.services.common.errors import ServiceError

pytestmark = pytest.mark.anyio


DRIVER = (
    (aiosqlite.Cursor, "execute"),
    (aiosqlite.Cursor, "executemany"),
    (aiosqlite.Cursor, "fetchall"),
    (aiosqlite.Cursor, "close"),
    (aiosqlite.Connection, "commit"),
    (aiosqlite.Connection, "rollback"),
)


class Cuts:
    """Cancel a task at its n-th call of the driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._steps, self._at = 0, 0
        self._task: asyncio.Task[object] | None = None
        for owner, name in DRIVER:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, step):
        async def counted(*args, **kwargs):
            self._steps += 1
            if self._steps == self._at and self._task is not None:
                asyncio.get_running_loop().call_soon(self._task.cancel)
            return await step(*args, **kwargs)

        return counted

    async def run(self, work, at: int) -> bool:
        """Run the work, cancelled at step `at`; returns whether it had that many steps."""
        self._steps, self._at = 0, at
        self._task = asyncio.create_task(work)
        await asyncio.wait((self._task,))
        self._task = None
        return self._steps >= at


@pytest.fixture
def cuts(monkeypatch) -> Cuts:
    return Cuts(monkeypatch)


@pytest.fixture
async def database(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Database]:
    made = Database(f"sqlite:///{tmp_path}/gateway.db")
    await made.start()
    yield made
    await made.close()


def is_free(path: Path) -> bool:
    """Whether another process could write."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=0.0)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
        return True
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()


@pytest.mark.parametrize("what", ["find", "save", "remove", "append"])
async def test_the_lock_is_free_after_a_caller_is_cancelled_anywhere(
    tmp_path, database, cuts, what
):
    responses = DatabaseResponses(database, lambda: 1000.0)
    files = Files(database, FileLimits(1 << 30, 1 << 30, 100))
    file_id = await files.begin("aa")
    await responses.save(b"a", KeptResponse("old", "{}", "[]"))
    for step in count(1):
        work = {
            "find": lambda: responses.find(b"a", "old"),
            "save": lambda step=step: responses.save(b"a", KeptResponse(f"{step}", "{}", "[]")),
            "remove": lambda: responses.remove(b"a", "old"),
            "append": lambda step=step: files.append("aa", file_id, step, b"x" * 1000),
        }[what]
        if not await cuts.run(work(), step):
            break
        await eventually(lambda: is_free(tmp_path / "gateway.db"))
    assert step > 3


async def test_usage_is_never_counted_twice(tmp_path, database, cuts):
    usage = UsageLog(database)
    for step in count(1):
        usage.count(Caller("request"), "tiny", RequestUsage(10, 0, 5))
        cut = await cuts.run(usage.flush(), step)
        await usage.flush()
        with sqlite3.connect(tmp_path / "gateway.db") as found:
            (requests,) = found.execute("SELECT sum(requests) FROM usage").fetchone()
        found.close()
        assert requests == step
        if not cut:
            break
    assert step > 3


async def test_no_data_is_appended_to_an_abandoned_file(tmp_path, database, cuts):
    """Abandon an upload whose client has disconnected, although its last data arrives later."""
    files = Files(database, FileLimits(1 << 30, 1 << 30, 100))
    for step in count(1):
        file_id = await files.begin("aa")
        cut = await cuts.run(files.append("aa", file_id, 0, b"x"), step)
        await files.abandon(file_id)
        if not cut:
            break
    await database.close()
    with sqlite3.connect(tmp_path / "gateway.db") as found:
        (left,) = found.execute("SELECT count(*) FROM file_pieces").fetchone()
    found.close()
    assert left == 0


async def test_a_transaction_in_the_callers_task_is_refused(database):
    with pytest.raises(RuntimeError, match="in_own_task"):
        async with database.changing():
            pass


async def test_only_its_user_may_read_the_file(tmp_path, database):
    def modes() -> set[int]:
        found = list(tmp_path.glob("gateway.db*"))
        assert len(found) == 3  # including its log and its shared memory
        return {path.stat().st_mode & 0o777 for path in found}

    assert modes() == {0o600}
    for path in tmp_path.glob("gateway.db*"):
        path.chmod(0o644)  # as an earlier version wrote it
    again = Database(f"sqlite:///{tmp_path}/gateway.db")
    await again.start()
    assert modes() == {0o600}
    await again.close()


async def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "gateway.db").mkdir()
    with pytest.raises(OSError, match="/gateway"):
        await Database(f"sqlite:///{tmp_path}/gateway.db").start()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:a@s3cret/more@h/db",
        "postgresql://u:a@s3cret:12@h/db",
        "postgresql://u:s3cret#@h:55x/db",
        "mysql://u:s3cret@h/db",
        "s3cret",
    ],
)
def test_an_unreadable_url_is_not_shown(url):
    with pytest.raises(ValueError, match="--database-url must be sqlite") as caught:
        Database(url)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__context__ is None or "s3cret" not in str(caught.value.__context__)


@pytest.mark.parametrize(
    "url", ["postgresql://u:s3cret@{}/db", "postgresql://{}/db?password=s3cret"]
)
async def test_an_unreachable_server_is_named_without_the_password(url):
    pytest.importorskip("asyncpg")
    database = Database(url.format("127.0.0.1:1"))
    with pytest.raises(OSError, match=":1/db") as caught:
        await database.start()
    assert "s3cret" not in str(caught.value)


class Held:
    """Transactions that record when they open, and stay open until `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.open: list[int] = []

    @in_own_task
    async def read(self, database: Database, number: int) -> None:
        async with database.reading() as session:
            await session.execute(text("SELECT 1"))  # starts the transaction
            self.open.append(number)
            await self.go.wait()

    @in_own_task
    async def change(self, database: Database, number: int) -> None:
        async with database.changing() as session:
            await session.execute(text("SELECT 1"))  # starts the transaction
            self.open.append(number)
            await self.go.wait()


async def test_a_share_leaves_connections_for_others(database):
    held, share = Held(), database.share(2)
    reading = [asyncio.create_task(held.read(share, number)) for number in range(30)]
    await eventually(lambda: len(held.open) == 2)
    store = DatabaseResponses(database, lambda: 0.0)
    assert await asyncio.wait_for(store.find(b"", "a"), LIMIT_S) is None
    assert await asyncio.wait_for(store.save(b"", KeptResponse("a", "{}", "[]")), LIMIT_S)
    assert len(held.open) == 2
    held.go.set()
    await asyncio.gather(*reading)
    assert len(held.open) == 30


async def test_writers_run_in_order(database):
    """Keep the order of arrival; SQLite alone would prefer the latest writer, which polls
    soonest."""
    held = Held()
    writing = []
    for number in range(6):
        writing.append(asyncio.create_task(held.change(database, number)))
        await asyncio.sleep(0.2 if number < 3 else 0.01)
    held.go.set()
    await asyncio.gather(*writing)
    assert held.open == list(range(6))


async def test_all_waiting_writers_fail_within_one_timeout(database, monkeypatch):
    monkeypatch.setattr(database_module, "BUSY_S", 0.5)
    held = Held()
    first = asyncio.create_task(held.change(database, 0))
    await eventually(lambda: held.open == [0])
    began = asyncio.get_running_loop().time()
    waiting = [held.change(database, number) for number in range(1, 9)]
    failed = await asyncio.gather(*waiting, return_exceptions=True)
    assert asyncio.get_running_loop().time() - began < 8 * 0.5
    assert all(isinstance(error, ServiceError) for error in failed)
    held.go.set()
    await first
    assert held.open == [0]


async def test_waiting_writers_finish_before_the_database_closes(database):
    held = Held()
    writing = [asyncio.create_task(held.change(database, number)) for number in range(10)]
    await eventually(lambda: held.open == [0])
    asyncio.get_running_loop().call_later(0.1, held.go.set)
    await database.close()
    assert held.open == list(range(10))
    await asyncio.gather(*writing)
