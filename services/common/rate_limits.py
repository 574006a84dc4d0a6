"""Limits what each API key may use per minute: requests, tokens, and seconds that the server spends
on preparing its texts (chat template, tokenizer, grammar).

Minutes are fixed windows. The tokens of a response and the seconds of preparing a text are known
only afterwards and counted then, so one request may exceed a limit, and the next one is refused.
Refused requests are not counted.

Counts are kept in this process, or in an SQLite file or a Redis that several processes share. A
query of the SQLite file takes some tens of microseconds in the page cache, so it runs on the event
loop. The file's counts do not survive a power failure; they would expire within a minute anyway.
"""

import asyncio
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from limits.aio.storage import Storage

from pdserve.protos.common_pb2 import OVERLOADED
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.options import PublicSettings

OPEN_S = 10.0  # wait for other processes that open it at the same time
LOCKED_S = 0.05  # wait for another process's write; blocks the event loop
log = logging.getLogger(__name__)
T = TypeVar("T")
MEMORY_STORAGE = "memory://"
FILE_STORAGE = "sqlite:///"
MILLI = 1000  # seconds are counted in milliseconds
STORAGE_S = 0.5  # timeout of the storage
SKIP_S = 5.0  # pause of counting after the storage fails


class CountsFile(Storage):
    """A storage for the `limits` library: keeps its counts in an SQLite file that several processes
    of one host share. Raises ValueError if the file cannot be used."""

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
        """Return the count of a key in the current minute, and the Unix time at which that minute
        ends; 0 and the present time if nothing is counted."""
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
    """Switch the SQLite database to a write-ahead log. Retries for OPEN_S while another process
    switches the same file, because SQLite itself does not wait for this."""
    deadline = time.monotonic() + OPEN_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(0.005)


class RateSettings(NamedTuple):
    """Limits of each API key per minute: requests, tokens, and seconds of preparing texts; 0: no
    limit. `storage` is where counts are kept: memory://, sqlite:///file or redis://host:port."""

    requests: int = 0
    tokens: int = 0
    text_s: float = 0.0
    storage: str = MEMORY_STORAGE


class RateLimits:
    """Counts what each API key uses, and refuses requests beyond the limits. `owner` in its methods
    is the id of the key's Tenant (services/common/tenants.py)."""

    def __init__(self, settings: RateSettings) -> None:
        """Open the storage of the counts. Raises ValueError if `settings.storage` is unknown or
        cannot be used."""
        amounts = {
            "requests": settings.requests,
            "tokens": settings.tokens,
            "text": round(settings.text_s * MILLI),
        }
        self._items: dict[str, Any] = {}
        self._counting: set[asyncio.Task[bool]] = set()  # the loop keeps weak references only
        self._skip_until = 0.0
        self._close: Callable[[], None] = lambda: None  # closes the storage
        self._pool: Any = None  # the storage's connections, if it is Redis
        if not any(amounts.values()):
            return
        # Few systems have limits, and these imports take a while.
        from limits import RateLimitItemPerMinute
        from limits.aio.strategies import FixedWindowRateLimiter
        from limits.errors import ConfigurationError
        from limits.storage import storage_from_string

        storage: Any
        try:
            if settings.storage.startswith(FILE_STORAGE):
                storage = _counts_file(settings.storage)
                self._close = storage.close
            else:
                pool_options = self._connect(settings.storage)
                storage = storage_from_string(f"async+{settings.storage}", **pool_options)
        except ImportError:
            raise ValueError(
                "--rate-storage redis needs redis-py: pip install 'pdserve[redis]'"
            ) from None
        except ConfigurationError as error:
            # Omit the rest of the address, which may have a password.
            scheme = settings.storage.partition("://")[0]
            reason = str(error).replace(settings.storage, scheme)
            raise ValueError(f"--rate-storage {scheme}: {reason}") from None
        self._limiter = FixedWindowRateLimiter(storage)
        self._items = {
            resource: RateLimitItemPerMinute(amount, namespace=f"pdserve-{resource}")
            for resource, amount in amounts.items()
            if amount
        }

    def _connect(self, storage: str) -> dict[str, Any]:
        """Return options that make the `limits` library use redis-py for a Redis storage, and open
        its connection pool. The library's default, coredis, needs older packages than other
        dependencies do."""
        if not storage.startswith(("redis://", "rediss://")):
            return {}
        from redis.asyncio import ConnectionPool

        self._pool = ConnectionPool.from_url(storage)
        return {"implementation": "redispy", "connection_pool": self._pool}

    async def close(self) -> None:
        """Wait until all pending amounts are counted, then close the storage."""
        await asyncio.gather(*self._counting, return_exceptions=True)
        self._close()
        if self._pool is not None:
            await self._pool.aclose()

    async def count_request(self, owner: bytes) -> None:
        """Count one request of the owner. Raises ServiceError OVERLOADED if it exceeds the limit of
        requests."""
        await self._count("requests", owner, 1)

    async def count_tokens(self, owner: bytes, num: int) -> None:
        """Count the `num` tokens of a prompt. Raises ServiceError OVERLOADED if they exceed the
        limit of tokens."""
        await self._count("tokens", owner, num)

    def tokens_spent(self, owner: bytes, num: int) -> None:
        """Count the `num` tokens of a response; never refuses."""
        self._add("tokens", owner, num)

    async def check_text(self, owner: bytes) -> None:
        """Raise ServiceError OVERLOADED if the owner has used up this minute's seconds of preparing
        texts (chat template, tokenizer, grammar)."""
        if (item := self._items.get("text")) is not None:
            remaining, reset_s = await self._call_storage(
                self._window(item, owner), (item.amount, 0.0)
            )
            if not remaining:
                raise _refused("seconds of preparing texts (template, tokenizer, grammar)", reset_s)

    def text_spent(self, owner: bytes, seconds: float) -> None:
        """Count the seconds that preparing a text of the owner (chat template, tokenizer, grammar)
        has taken; never refuses."""
        self._add("text", owner, math.ceil(seconds * MILLI))

    async def headers(self, owner: bytes) -> dict[str, str]:
        """Return OpenAI's x-ratelimit-* response headers: limit, remaining amount and time until
        reset, for requests and tokens if they are limited."""
        items = {
            resource: self._items[resource]
            for resource in ("requests", "tokens")
            if resource in self._items
        }
        if not items:
            return {}
        calls = (
            self._call_storage(self._window(item, owner), (item.amount, 0.0))
            for item in items.values()
        )
        headers = {}
        windows = await asyncio.gather(*calls)
        for (resource, item), (remaining, reset_s) in zip(items.items(), windows, strict=True):
            headers[f"x-ratelimit-limit-{resource}"] = str(item.amount)
            headers[f"x-ratelimit-remaining-{resource}"] = str(remaining)
            headers[f"x-ratelimit-reset-{resource}"] = f"{reset_s:.3f}s"
        return headers

    async def _count(self, resource: str, owner: bytes, num: int) -> None:
        if (item := self._items.get(resource)) is None:
            return
        refused_s = await self._call_storage(self._hit_if_it_fits(item, owner, num), None)
        if refused_s is not None:
            raise _refused(resource, refused_s)

    async def _hit_if_it_fits(self, item: Any, owner: bytes, num: int) -> float | None:
        """Count `num` if the limit allows it, and return None; otherwise return the seconds until
        the minute ends."""
        if await self._limiter.test(item, owner.hex(), cost=num):
            if await self._limiter.hit(item, owner.hex(), cost=num):
                return None
            # Another process counted in between: undo what exceeds the limit.
            storage = self._limiter.storage
            await storage.incr(item.key_for(owner.hex()), item.get_expiry(), amount=-num)
        return (await self._window(item, owner))[1]

    def _add(self, resource: str, owner: bytes, num: int) -> None:
        if num and (item := self._items.get(resource)) is not None:
            call = self._call_storage(self._limiter.hit(item, owner.hex(), cost=num), True)
            task = asyncio.create_task(call)
            self._counting.add(task)
            task.add_done_callback(self._counting.discard)

    async def _window(self, item: Any, owner: bytes) -> tuple[int, float]:
        """Return how much of the limit remains in this minute, and the seconds until the minute
        ends."""
        reset_at, remaining = await self._limiter.get_window_stats(item, owner.hex())
        return max(0, remaining), max(0.0, reset_at - time.time())

    async def _call_storage(self, call: Coroutine[Any, Any, T], default: T) -> T:
        """Await a call of the storage of counts. If the call fails or takes longer than STORAGE_S,
        return `default`, and do the same without a call for the next SKIP_S, in which no limit
        applies."""
        if time.monotonic() < self._skip_until:
            call.close()
            return default
        try:
            async with asyncio.timeout(STORAGE_S):
                return await call
        except Exception as error:  # each storage has its own exceptions
            if time.monotonic() >= self._skip_until:
                self._skip_until = time.monotonic() + SKIP_S
                reason = str(error) or f"no response within {STORAGE_S:g} s"
                log.warning("rate limits are not enforced for %g s: %s", SKIP_S, reason)
            return default


def make_rate_limits(settings: PublicSettings, text_s: float = 0.0) -> RateLimits:
    """Make the RateLimits that the options configure. Raises ValueError if the storage is unknown
    or cannot be used."""
    return RateLimits(
        RateSettings(
            settings.requests_per_minute, settings.tokens_per_minute, text_s, settings.rate_storage
        )
    )


def _counts_file(storage: str) -> Any:

    try:
        return CountsFile(storage.removeprefix(FILE_STORAGE))
    except ValueError as error:
        raise ValueError(f"--rate-storage {error}") from None


def _refused(resource: str, reset_s: float) -> ServiceError:
    return ServiceError(
        OVERLOADED,
        f"the limit of {resource} per minute is reached",
        retry_after_s=max(1.0, reset_s),
    )
