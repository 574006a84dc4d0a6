"""The database of a gateway: SQLite in a file, or PostgreSQL.

This module owns the connections. Each module that stores data declares its own tables, as
subclasses of `Base`. Several gateways may use one database. SQLite uses a write-ahead log: readers
never wait, and writers take turns, those of one process in order of arrival. A cancelled statement
could leave its connection holding SQLite's lock, so functions with transactions are decorated with
`in_own_task`.
"""

import asyncio
import copy
import functools
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import event, text
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase

from pdserve.gateway.storage.interface import DRIVERS, check_folder
from pdserve.protos.common_pb2 import UNAVAILABLE
from pdserve.services.common.errors import MAX_QUOTED, ServiceError

log = logging.getLogger("pdserve.gateway.database")

BUSY_S = 10  # how long a transaction waits for those of other processes
_DIALECTS = {
    scheme: f"{'sqlite' if scheme == 'sqlite' else 'postgresql'}+{package}"
    for scheme, package in DRIVERS.items()
}
CLOSE_S = 5.0  # wait for running transactions
MAKING_TABLES = 7_291_445  # key of Postgres's advisory lock, for gateways that start together


P = ParamSpec("P")
T = TypeVar("T")

_own_tasks: set[asyncio.Task[Any]] = set()  # running tasks; keeps those alive that no caller awaits


class Base(DeclarativeBase):
    """The base class of all tables in the gateway's database."""


def _ended(task: asyncio.Task[Any]) -> None:
    _own_tasks.discard(task)
    if not task.cancelled():
        task.exception()  # mark as retrieved: perhaps no caller awaits it any more


def in_own_task(
    work: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a coroutine function that uses transactions, so that it runs to its end even if its
    caller is cancelled. The function must be short and wait only for the database."""

    @functools.wraps(work)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.create_task(work(*args, **kwargs), name=work.__qualname__)
        _own_tasks.add(task)
        task.add_done_callback(_ended)
        return await asyncio.shield(task)

    return run


class Database:
    """A database and its connections. Call `start` first. `changing` and `reading` open
    transactions; use them only in functions that are decorated with `in_own_task`."""

    def __init__(self, url: str) -> None:
        """`url` is in SQLAlchemy's form: "sqlite:///file.db" or
        "postgresql://user:password@host/name". Raises ValueError if the URL is invalid or its
        driver is missing."""
        self._url = _parse(url)
        try:
            self._engine = create_async_engine(self._url, pool_pre_ping=not self.is_file)
        except (SQLAlchemyError, ImportError, ValueError) as error:
            raise ValueError(f"--database-url: {error}") from None
        if self.is_file:
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)
        self._writing: async_sessionmaker[AsyncSession] = async_sessionmaker(
            self._engine, expire_on_commit=False
        )
        self._reading: async_sessionmaker[AsyncSession] = async_sessionmaker(
            self._engine.execution_options(reads_only=True), expire_on_commit=False
        )
        self._open: set[asyncio.Task[Any]] = set()  # tasks with a transaction, or waiting for one
        self._turns: AbstractAsyncContextManager[Any] = nullcontext()
        # SQLite alone would let writers sleep and retry, in no order.
        self._write_turns: AbstractAsyncContextManager[Any] = (
            asyncio.Lock() if self.is_file else nullcontext()
        )

    def share(self, max_transactions: int) -> "Database":
        """Return a view of this database for work of low priority: at most `max_transactions` of
        its transactions run at once, so that connections remain free for other work. Do not start
        or close the view; it is opened and closed together with this database."""
        share = copy.copy(self)
        share._turns = asyncio.Semaphore(max_transactions)
        return share

    @property
    def is_file(self) -> bool:
        """Whether the database is SQLite (a local file) and not PostgreSQL."""
        return self._url.get_backend_name() == "sqlite"

    async def start(self) -> None:
        """Connect to the database and create missing tables. Raises OSError if it cannot be
        opened."""
        self._make_file()
        try:
            async with self._engine.begin() as connection:
                if not self.is_file:
                    await connection.execute(text(f"SELECT pg_advisory_xact_lock({MAKING_TABLES})"))
                await connection.run_sync(Base.metadata.create_all)
        except (SQLAlchemyError, OSError) as error:
            await self._engine.dispose()
            # The URL's query may contain a password, too.
            public_url = self._url.set(query={}).render_as_string(hide_password=True)
            raise OSError(
                f"--database-url {public_url}: cannot open the database: {_reason(error)}"
            ) from error

    def _make_file(self) -> None:
        """Create SQLite's file with permissions for this user only, or restrict those of an
        existing file. SQLite itself would create a file that all users can read; the files that it
        adds get the permissions of this one."""
        path = self._url.database or ""
        if not self.is_file or path in ("", ":memory:"):
            return
        check_folder(path)
        try:
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            for name in (path, f"{path}-wal", f"{path}-shm"):
                with suppress(FileNotFoundError):
                    _make_private(name)
        except OSError as error:
            raise OSError(f"--database-url: {error.filename}: {error.strerror}") from error

    async def now_s(self, session: AsyncSession) -> int:
        """Return the time in seconds since the epoch by the database's clock, which is the same for
        gateways on different hosts."""
        clock = "strftime('%s', 'now')" if self.is_file else "extract(epoch FROM now())"
        return int(await session.scalar(text(f"SELECT {clock}")))

    async def close(self) -> None:
        """Wait at most CLOSE_S for running transactions, then close all connections."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._open:
                    await asyncio.wait(tuple(self._open))
        await self._engine.dispose()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[AsyncSession]:
        """Open a transaction that may write, for the `async with` block. Raises ServiceError
        UNAVAILABLE if the database cannot be used, IntegrityError if a row with the same key
        already exists."""
        async with (
            self._share_turn(),
            self._write_turn(),
            self._transaction(self._writing) as session,
        ):
            yield session

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """Open a transaction that only reads, for the `async with` block: it sees one consistent
        state and never waits for writers. Raises ServiceError UNAVAILABLE if the database cannot be
        used."""
        async with self._share_turn(), self._transaction(self._reading) as session:
            yield session

    @asynccontextmanager
    async def _share_turn(self) -> AsyncIterator[None]:
        """Wait until a transaction may begin within this share's limit of concurrent transactions.
        `close` also waits for a task that waits here."""
        task = asyncio.current_task()
        if task is None or task not in _own_tasks:
            raise RuntimeError("a transaction must run in a function decorated with in_own_task")
        self._open.add(task)
        try:
            async with self._turns:
                yield
        finally:
            self._open.discard(task)

    @asynccontextmanager
    async def _write_turn(self) -> AsyncIterator[None]:
        """Wait until no other task of this process writes to SQLite, then hold that right for the
        block. Raises ServiceError UNAVAILABLE after BUSY_S."""
        async with AsyncExitStack() as turn:
            with _service_errors():
                try:
                    async with asyncio.timeout(BUSY_S):
                        await turn.enter_async_context(self._write_turns)
                except TimeoutError:
                    raise OSError(
                        f"no write in {BUSY_S} s: other writers keep the database busy"
                    ) from None
            yield

    @asynccontextmanager
    async def _transaction(
        self, sessions: async_sessionmaker[AsyncSession]
    ) -> AsyncIterator[AsyncSession]:
        with _service_errors():
            async with sessions.begin() as session:
                yield session


@contextmanager
def _service_errors() -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise
    except (SQLAlchemyError, OSError) as error:
        log.warning("a database transaction failed: %s", _reason(error))
        raise ServiceError(
            UNAVAILABLE, "the server's database is unavailable", retry_after_s=2.0
        ) from error


def _reason(error: Exception) -> str:
    """Return the text of a database error without its SQL statement and values, which are clients'
    data."""
    return str(getattr(error, "orig", None) or error)[:MAX_QUOTED]


def _parse(text: str) -> URL:
    """Parse a database URL and add the driver to it. The ValueError that an invalid URL raises does
    not quote the URL, since any part of it may be a password."""
    message = "--database-url must be sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME"
    try:
        url = make_url(text)
        url = url.set(drivername=_DIALECTS.get(url.drivername, url.drivername))
        if url.get_backend_name() in DRIVERS and (
            url.get_backend_name() == "sqlite" or "@" not in f"{url.host}{url.database}"
        ):
            return url
    except (SQLAlchemyError, ValueError):
        pass
    raise ValueError(f"invalid database URL: {message}; write @ in a password as %40")


def _make_private(path: str) -> None:
    """Remove the permissions of other users from a file that this user owns. Must not open the
    file: closing it would release the locks that SQLite holds on it in this process."""
    status = os.stat(path)
    if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
        os.chmod(path, 0o600)


def _prepare_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # _begin_sqlite begins transactions
    cursor = connection.cursor()
    for pragma in (f"busy_timeout={BUSY_S * 1000}", "journal_mode=WAL", "synchronous=NORMAL"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    """Begin a transaction in SQLite, with the write lock at once unless it only reads. A
    transaction that reads first and takes the lock later would fail if another one wrote in
    between."""
    reads = connection.get_execution_options().get("reads_only")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
