"""The database of a gateway: SQLite in a file, or any that SQLAlchemy has an async driver for.

It owns the connections. What is kept there is each module's own table on `Base`.
"""

from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase


class Base(DeclarativeBase):
    """Every table of the gateway."""


class Database:
    """Opened by `start`; `sessions` gives transactions: `async with db.sessions.begin() as s`."""

    def __init__(self, url: str) -> None:
        """`url` as SQLAlchemy reads it, with an async driver: "sqlite+aiosqlite:///file.db",
        "postgresql+asyncpg://host/name". Raises ValueError for one that it cannot read."""
        self._engine = create_async_engine(make_url(url))
        self.sessions: async_sessionmaker[AsyncSession] = async_sessionmaker(
            self._engine, expire_on_commit=False
        )

    async def start(self) -> None:
        """Makes the tables that are not there yet."""
        async with self._engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)

    async def close(self) -> None:
        await self._engine.dispose()
