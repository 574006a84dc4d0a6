"""The database of a gateway: SQLite in a file, or PostgreSQL.

It owns the connections. Each module that stores data has its own table, a class on `Base`. Several
gateways may use one database. SQLite's file has a write-ahead log: readers never wait, and writers
take turns, those of this process in order of arrival. A cancelled statement may leave its
connection with SQLite's lock, so each transaction runs `in_own_task`.
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
    """Base class of every table of the gateway."""


def _ended(task: asyncio.Task[Any]) -> None:
    _own_tasks.discard(task)
    if not task.cancelled():
        task.exception()  # mark as retrieved: perhaps no caller awaits it any more


def in_own_task(
    work: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a coroutine function with transactions so that it runs to its end even if its caller
    is cancelled. The function must be short, and wait only for the database."""

    @functools.wraps(work)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.create_task(work(*args, **kwargs), name=work.__qualname__)
        _own_tasks.add(task)
        task.add_done_callback(_ended)
        return await asyncio.shield(task)

    return run


class Database:
    """A database and its connections, opened by `start`. `changing` and `reading` are transactions;
    use them in functions that are decorated with `in_own_task`."""

    def __init__(self, url: str) -> None:
        """`url` as SQLAlchemy reads it: "sqlite:///file.db", "postgresql://host/name". Raises
        ValueError if it cannot be used."""
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
        """The same database for work that can wait: at most `max_transactions` of its transactions
        run at once, which leaves connections to others. Opened and closed with this one."""
        share = copy.copy(self)
        share._turns = asyncio.Semaphore(max_transactions)
        return share

    @property
    def is_file(self) -> bool:
        """Whether the database is SQLite, which needs no network."""
        return self._url.get_backend_name() == "sqlite"

    async def start(self) -> None:
        """Create missing tables. Raises OSError if the database cannot be opened."""
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
            raise OSError(f"--database-url {public_url}: {_reason(error)}") from error

    def _make_file(self) -> None:
        """Create the file privately; SQLite would make it readable for all. SQLite's files beside
        it inherit its permissions."""
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
        """Seconds since the epoch by the database's clock, which gateways on all hosts share."""
        clock = "strftime('%s', 'now')" if self.is_file else "extract(epoch FROM now())"
        return int(await session.scalar(text(f"SELECT {clock}")))

    async def close(self) -> None:
        """Close the connections, after running transactions or at most CLOSE_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._open:
                    await asyncio.wait(tuple(self._open))
        await self._engine.dispose()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[AsyncSession]:
        """A transaction that writes. Raises ServiceError UNAVAILABLE if the database cannot be
        used, IntegrityError if a row already exists."""
        async with (
            self._share_turn(),
            self._write_turn(),
            self._transaction(self._writing) as session,
        ):
            yield session

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A transaction that only reads: it sees one state, and waits for no writer. Raises
        ServiceError UNAVAILABLE if the database cannot be used."""
        async with self._share_turn(), self._transaction(self._reading) as session:
            yield session

    @asynccontextmanager
    async def _share_turn(self) -> AsyncIterator[None]:
        """Wait until this share may begin a transaction. `close` waits for the turn, too."""
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
        """Wait until this process has no other writer. Raises ServiceError UNAVAILABLE after
        BUSY_S."""
        async with AsyncExitStack() as turn:
            with _service_errors():
                try:
                    async with asyncio.timeout(BUSY_S):
                        await turn.enter_async_context(self._write_turns)
                except TimeoutError:
                    raise OSError(f"other writers kept the database busy for {BUSY_S} s") from None
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
        log.warning("database error: %s", _reason(error))
        raise ServiceError(
            UNAVAILABLE, "the server's database is unavailable", retry_after_s=2.0
        ) from error


def _reason(error: Exception) -> str:
    """The error without its statement and values, which are a client's data."""
    return str(getattr(error, "orig", None) or error)[:MAX_QUOTED]


def _parse(text: str) -> URL:
    """The URL with its driver. Raises ValueError whose text omits the URL, since any part of it may
    be a password."""
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
    raise ValueError(f"{message}; write @ in a password as %40")


def _make_private(path: str) -> None:
    """Remove other users' permissions from a file that this user owns. The file must not be opened:
    closing it would drop SQLite's locks on it in this process."""
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
    """Begin a transaction, with the write lock unless it only reads: a transaction that reads first
    and writes later would fail if another wrote in between."""
    reads = connection.get_execution_options().get("reads_only")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
