"""The token usage of API keys by hour, model and session; it is counted in memory and written to
the database once a second.

No request waits for the database. A gateway that is killed loses the usage of at most FLUSH_S; one
that stops gracefully loses none.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    CursorResult,
    Row,
    String,
    delete,
    func,
    literal_column,
    select,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Mapped, mapped_column

from pdserve.gateway.caller import Caller
from pdserve.gateway.metrics.request_metrics import RequestUsage
from pdserve.gateway.storage import may_be_id, without_nul
from pdserve.gateway.storage.database import Base, Database, in_own_task
from pdserve.services.common.errors import ServiceError

log = logging.getLogger("pdserve.gateway.usage")

FLUSH_S = 1.0
HOUR_S = 3600
DAY_S = 86400
MAX_SESSIONS = 10_000  # per key, model and hour; further ones count under no session
MAX_UNWRITTEN = 100_000  # rows held while the database is unavailable
ROWS_AT_ONCE = 500
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


class UsageRow(Base):
    """A row of usage sums: one hour from `start` (seconds since the epoch), one API key, model and
    session."""

    __tablename__ = "usage"
    tenant: Mapped[str] = mapped_column(String(32), primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    model: Mapped[str] = mapped_column(String(512), primary_key=True)
    session: Mapped[str] = mapped_column(String(128), primary_key=True)
    key_name: Mapped[str] = mapped_column(String(64))
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)


class _Key(NamedTuple):
    tenant: str
    start: int
    model: str
    session: str
    key_name: str


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """The parameters of a usage report: the period [start, end) in seconds since the epoch, the
    length `bucket_s` of the intervals to sum over, and the columns of UsageRow to group by.
    `models` and `sessions` select rows; empty selects all."""

    start: int
    end: int
    bucket_s: int
    group_by: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()


class UsageLog:
    """Counts the token usage of requests and reports it. `count` is the gateway's CountUsage; `run`
    is the task that writes the counts to the database."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock
        self._counts: dict[_Key, list[int]] = {}
        self._flushing = asyncio.Lock()
        self._hour = 0
        self._sessions: dict[tuple[str, str], set[str]] = {}  # of this hour, by key and model

    def count(self, caller: Caller, model: str, usage: RequestUsage) -> None:
        """Add the token usage of one request to the counts in memory."""
        tenant, start = caller.tenant.id.hex(), int(self._clock()) // HOUR_S * HOUR_S
        session = self._session_key(start, tenant, model, without_nul(caller.session))
        self._add(
            _Key(tenant, start, model, session, caller.tenant.name),
            (1, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        )

    async def run(self) -> None:
        """Write the counted usage to the database every FLUSH_S, until this task is cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except ServiceError as error:
                log.warning(
                    "token usage could not be written to the database; retrying: %s", error.message
                )

    @in_own_task
    async def flush(self) -> None:
        """Write the usage counted so far to the database. If the caller is cancelled, writing
        continues, and the next call waits for it. Raises ServiceError if the database cannot be
        used; what was not written is kept for the next call."""
        async with self._flushing:
            unwritten, self._counts = self._counts, {}
            rows = list(unwritten.items())
            num_written = 0
            try:
                for start in range(0, len(rows), ROWS_AT_ONCE):
                    await self._write(rows[start : start + ROWS_AT_ONCE])
                    num_written = start + ROWS_AT_ONCE
            finally:
                for key, counts in rows[num_written:]:
                    self._add(key, counts)

    @in_own_task
    async def report(self, tenant: str, query: UsageQuery, limit: int) -> Sequence[Row[Any]]:
        """Return the tenant's usage sums, at most `limit` rows ordered by time: the start of the
        interval (`bucket`), the columns of `group_by`, then the sums."""
        # A literal: with parameters, PostgreSQL would not see that the expressions are equal.
        width: ColumnElement[int] = literal_column(str(int(query.bucket_s)))
        bucket = (UsageRow.start - UsageRow.start % width).label("bucket")
        groups = [bucket, *(getattr(UsageRow, name) for name in query.group_by)]
        sums = [func.sum(getattr(UsageRow, name)).label(name) for name in COUNTS]
        statement = select(*groups, *sums).where(
            UsageRow.tenant == tenant, UsageRow.start >= query.start, UsageRow.start < query.end
        )
        if query.models:
            statement = statement.where(UsageRow.model.in_(query.models))
        if query.sessions:
            statement = statement.where(UsageRow.session.in_(query.sessions))
        async with self._db.reading() as session:
            result = await session.execute(
                statement.group_by(*groups).order_by(*groups).limit(limit)
            )
            return result.all()

    @in_own_task
    async def was_used(self, tenant: str, model: str) -> bool:
        """Return whether the tenant has used the model in about the last day, by the usage in the
        database, which is summed by the hour."""
        if not may_be_id(model, len(model)):
            return False
        since = int(self._clock()) - DAY_S
        query = select(UsageRow.model).where(
            UsageRow.tenant == tenant, UsageRow.start >= since, UsageRow.model == model
        )
        async with self._db.reading() as session:
            return await session.scalar(query.limit(1)) is not None

    async def forget(self, keep_s: int) -> None:
        """Delete usage older than `keep_s` seconds from the database. Several gateways may run this
        at once. Raises ServiceError if the database cannot be used."""
        while await self._forget_some(keep_s):
            pass

    @in_own_task
    async def _forget_some(self, keep_s: int) -> bool:
        """Delete up to ROWS_AT_ONCE rows of usage older than `keep_s` seconds; return whether more
        may follow."""
        keys = (UsageRow.tenant, UsageRow.start, UsageRow.model, UsageRow.session)
        async with self._db.changing() as session:
            cutoff_s = await self._db.now_s(session) - keep_s - HOUR_S
            expired = (
                select(*keys).where(UsageRow.start < cutoff_s).order_by(*keys).limit(ROWS_AT_ONCE)
            )
            # Another gateway may be deleting rows: on PostgreSQL, skip those that it has locked.
            unlocked = expired.with_for_update(skip_locked=True)
            result: CursorResult[Any] = await session.execute(  # type: ignore[assignment]
                delete(UsageRow)
                .where(tuple_(*keys).in_(unlocked))
                .execution_options(synchronize_session=False)
            )
            return result.rowcount == ROWS_AT_ONCE

    def _session_key(self, start: int, tenant: str, model: str, session: str) -> str:
        if start != self._hour:
            self._hour = start
            self._sessions.clear()
        sessions = self._sessions.setdefault((tenant, model), set())
        if session not in sessions and len(sessions) >= MAX_SESSIONS:
            return ""
        sessions.add(session)
        return session

    def _add(self, key: _Key, counts: Sequence[int]) -> None:
        if key not in self._counts and len(self._counts) >= MAX_UNWRITTEN:
            key = key._replace(session="")  # the usage still counts, under no session
        sums = self._counts.setdefault(key, [0] * len(COUNTS))
        for index, count in enumerate(counts):
            sums[index] += count

    async def _write(self, rows: Sequence[tuple[_Key, list[int]]]) -> None:
        # Concurrent gateways lock rows in the same order, so they cannot deadlock.
        values = [{**k._asdict(), **dict(zip(COUNTS, c, strict=True))} for k, c in sorted(rows)]
        insert = (sqlite if self._db.is_file else postgresql).insert(UsageRow)
        added = {name: getattr(UsageRow, name) + insert.excluded[name] for name in COUNTS}
        keys = ["tenant", "start", "model", "session"]
        async with self._db.changing() as session:
            await session.execute(
                insert.on_conflict_do_update(index_elements=keys, set_=added), values
            )
