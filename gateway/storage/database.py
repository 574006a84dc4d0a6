"""The database of a gateway: SQLite in a file, or PostgreSQL.

It owns the connections. What is kept there is each module's own table on `Base`. Several gateways
may use one: SQLite's file has a write-ahead log, so that readers wait for nobody, and a transaction
that writes takes its turn when it begins.
"""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase

from pdserve.gateway.storage.url import DRIVERS, check_folder
from pdserve.protos.common_pb2 import UNAVAILABLE
from pdserve.services.host.errors import MAX_QUOTED, ServiceError

log = logging.getLogger("pdserve.gateway.database")

BUSY_S = 10  # that a transaction waits for those of other processes
MAKING_TABLES = 7_291_445  # of Postgres's advisory locks: gateways that start together


class Base(DeclarativeBase):
    """Every table of the gateway."""


class Database:
    """Opened by `start`; `sessions` gives transactions: `async with db.sessions.begin() as s`."""

    def __init__(self, url: str) -> None:
        """`url` as SQLAlchemy reads it: "sqlite:///file.db", "postgresql://host/name". Raises
        ValueError for one that cannot be used."""
        try:
            self._url = _with_driver(make_url(url))
            if self._url.get_backend_name() not in DRIVERS:
                raise ValueError("it must begin with sqlite:/// or postgresql://")
            self._engine = create_async_engine(self._url, pool_pre_ping=not self.is_file)
        except (SQLAlchemyError, ImportError, ValueError) as error:
            raise ValueError(f"--database-url: {error}") from None
        if self.is_file:
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)
        self.sessions: async_sessionmaker[AsyncSession] = async_sessionmaker(
            self._engine, expire_on_commit=False
        )
        self._reading: async_sessionmaker[AsyncSession] = async_sessionmaker(
            self._engine.execution_options(reads_only=True), expire_on_commit=False
        )

    @property
    def is_file(self) -> bool:
        """SQLite, which no network is in the way of."""
        return self._url.get_backend_name() == "sqlite"

    async def start(self) -> None:
        """Makes the tables that are not there yet. Raises OSError if it cannot be opened."""
        if self.is_file:
            check_folder(self._url.database or "")
        try:
            async with self._engine.begin() as connection:
                if not self.is_file:
                    await connection.execute(text(f"SELECT pg_advisory_xact_lock({MAKING_TABLES})"))
                await connection.run_sync(Base.metadata.create_all)
        except (SQLAlchemyError, OSError) as error:
            await self._engine.dispose()
            shown = self._url.render_as_string(hide_password=True)
            raise OSError(f"--database-url {shown}: {_reason(error)}") from error

    async def close(self) -> None:
        await self._engine.dispose()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[AsyncSession]:
        """A transaction that writes. Raises ServiceError UNAVAILABLE if the database cannot be
        used, IntegrityError for a row that is there already."""
        with _service_errors():
            async with self.sessions.begin() as session:
                yield session

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A transaction that only reads: it sees one state, and waits for no writer. Raises
        ServiceError UNAVAILABLE."""
        with _service_errors():
            async with self._reading.begin() as session:
                yield session


@contextmanager
def _service_errors() -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise
    except (SQLAlchemyError, OSError) as error:
        log.warning("the database: %s", _reason(error))
        raise ServiceError(
            UNAVAILABLE, "the server's database cannot be used", retry_after_s=2.0
        ) from error


def _reason(error: Exception) -> str:
    """Without the statement and its values, which are a client's."""
    return str(getattr(error, "orig", None) or error)[:MAX_QUOTED]


def _with_driver(url: URL) -> URL:
    driver = DRIVERS.get(url.drivername)
    if driver is None:
        return url
    backend = "sqlite" if url.drivername == "sqlite" else "postgresql"
    return url.set(drivername=f"{backend}+{driver}")


def _prepare_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # transactions begin below, not where the driver guesses
    cursor = connection.cursor()
    for pragma in (f"busy_timeout={BUSY_S * 1000}", "journal_mode=WAL", "synchronous=NORMAL"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    """A transaction that reads first and writes later would fail if another had written between."""
    reads = connection.get_execution_options().get("reads_only")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
