"""Stores the responses of /v1/responses in a table of the gateway's database.

Invariants: a tenant sees only its own responses; the number and total bytes of a tenant's responses
are limited, and the oldest are removed first; an expired response is never returned.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Index, String, Text, delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from pdserve.gateway.storage.database import Base, Database, in_own_task
from pdserve.gateway.storage.interface import KeptResponse, may_be_id

MAX_ID = 200  # characters
PRUNED_AT_ONCE = 32  # rows


class ResponseRow(Base):
    """A row per stored response, with the input items that it answers."""

    __tablename__ = "responses"
    __table_args__ = (Index("responses_of_tenant", "tenant", "created"),)

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)  # hex
    id: Mapped[str] = mapped_column(String(MAX_ID), primary_key=True)
    created: Mapped[float] = mapped_column(index=True)  # seconds since 1970
    num_bytes: Mapped[int]
    response: Mapped[str] = mapped_column(Text)  # JSON
    items: Mapped[str] = mapped_column(Text)  # JSON


@dataclass(frozen=True, slots=True)
class ResponseBounds:
    """Limits of the responses that are stored for one tenant: number, bytes, and time in
    seconds."""

    max_bytes: int = 1 << 20  # of one response and its items
    max_rows: int = 1000
    max_total_bytes: int = 64 << 20
    keep_s: float = 30 * 86400.0


class DatabaseResponses:
    """A ResponseStore in the database, shared by all gateways that use the same database.

    All methods raise ServiceError UNAVAILABLE if the database cannot be used.
    """

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        bounds: ResponseBounds = ResponseBounds(),
    ) -> None:
        """`clock` returns the time in seconds since 1970."""
        self._database = database
        self._clock = clock
        self._bounds = bounds

    @in_own_task
    async def save(self, tenant: bytes, record: KeptResponse) -> bool:
        """Store a response of a tenant; return False, without storing it, if it exceeds the size
        limit. Also removes expired responses, and the tenant's oldest ones beyond its limits."""
        now, owner, num_bytes = self._clock(), tenant.hex(), record.num_bytes
        if num_bytes > min(self._bounds.max_bytes, self._bounds.max_total_bytes):
            return False
        row = ResponseRow(
            tenant=owner,
            id=record.id,
            created=now,
            num_bytes=num_bytes,
            response=record.response,
            items=record.items,
        )
        expired = delete(ResponseRow).where(ResponseRow.created <= now - self._bounds.keep_s)
        async with self._database.changing() as session:
            session.add(row)
            await session.flush()
            await session.execute(expired)
            await self._prune(session, owner)
        return True

    @in_own_task
    async def find(self, tenant: bytes, name: str) -> KeptResponse | None:
        if not may_be_id(name, MAX_ID):
            return None
        query = select(ResponseRow).where(
            ResponseRow.tenant == tenant.hex(),
            ResponseRow.id == name,
            ResponseRow.created > self._clock() - self._bounds.keep_s,
        )
        async with self._database.reading() as session:
            row = await session.scalar(query)
        return None if row is None else KeptResponse(row.id, row.response, row.items)

    @in_own_task
    async def remove(self, tenant: bytes, name: str) -> bool:
        """Delete a response of a tenant; return whether it existed."""
        if not may_be_id(name, MAX_ID):
            return False
        statement = (
            delete(ResponseRow)
            .where(ResponseRow.tenant == tenant.hex(), ResponseRow.id == name)
            .returning(ResponseRow.id)
        )
        async with self._database.changing() as session:
            return await session.scalar(statement) is not None

    async def _prune(self, session: AsyncSession, owner: str) -> None:
        """Delete the oldest responses of a tenant until their number and total bytes are within its
        limits."""
        is_owned = ResponseRow.tenant == owner
        sums = select(func.count(), func.coalesce(func.sum(ResponseRow.num_bytes), 0)).where(
            is_owned
        )
        oldest = (
            select(ResponseRow.id, ResponseRow.num_bytes)
            .where(is_owned)
            .order_by(ResponseRow.created, ResponseRow.id)
            .limit(PRUNED_AT_ONCE)
        )
        count, total = (await session.execute(sums)).one()
        while count > self._bounds.max_rows or total > self._bounds.max_total_bytes:
            removed = []
            for name, num_bytes in (await session.execute(oldest)).all():
                if count <= self._bounds.max_rows and total <= self._bounds.max_total_bytes:
                    break
                removed.append(name)
                count, total = count - 1, total - num_bytes
            await session.execute(delete(ResponseRow).where(is_owned, ResponseRow.id.in_(removed)))
