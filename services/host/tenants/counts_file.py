"""Counts of rate limits in an SQLite file, shared by the processes of one host.

A query takes some tens of microseconds in the page cache, so it runs on the event loop. Counts do
not survive a power failure; they would expire within a minute anyway.
"""

import os
import sqlite3
import time

from limits.aio.storage import Storage

OPEN_S = 10.0  # wait for other processes that open it at the same time
LOCKED_S = 0.05  # wait for another process's write; blocks the event loop


class CountsFile(Storage):
    """A storage of the `limits` library. Raises ValueError if the file cannot be used."""

    STORAGE_SCHEME = None  # constructed by path, not by scheme
    base_exceptions = sqlite3.Error

    def __init__(self, path: str) -> None:
        super().__init__()
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(path, timeout=OPEN_S, isolation_level=None)
            _switch_to_wal(self._db)
            self._db.execute("PRAGMA synchronous=OFF")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS counts (key TEXT PRIMARY KEY, count INT, ends REAL)"
            )
            self._db.execute("DELETE FROM counts WHERE ends <= ?", (time.time(),))
            self._db.execute(f"PRAGMA busy_timeout={LOCKED_S * 1000:.0f}")
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"{path}: {error}") from None

    async def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        now = time.time()
        ((count,),) = self._db.execute(
            "INSERT INTO counts VALUES (:key, :amount, :ends) ON CONFLICT (key) DO UPDATE SET"
            " count = CASE WHEN ends <= :now THEN :amount ELSE count + :amount END,"
            " ends = CASE WHEN ends <= :now THEN :ends ELSE ends END RETURNING count",
            {"key": key, "amount": amount, "ends": now + expiry, "now": now},
        ).fetchall()
        return int(count)

    async def get(self, key: str) -> int:
        return self._row(key)[0]

    async def get_expiry(self, key: str) -> float:
        return self._row(key)[1]

    def _row(self, key: str) -> tuple[int, float]:
        """The count, and when it ends."""
        now = time.time()
        row = self._db.execute(
            "SELECT count, ends FROM counts WHERE key = ? AND ends > ?", (key, now)
        ).fetchone()
        return row or (0, now)

    async def check(self) -> bool:
        return True

    async def reset(self) -> int | None:
        return self._db.execute("DELETE FROM counts").rowcount

    async def clear(self, key: str) -> None:
        self._db.execute("DELETE FROM counts WHERE key = ?", (key,))

    def close(self) -> None:
        self._db.close()


def _switch_to_wal(db: sqlite3.Connection) -> None:
    """Switch to WAL; retries, since SQLite itself does not wait for another process that does the
    same."""
    deadline = time.monotonic() + OPEN_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(0.005)
