"""The uploaded files and batch results of tenants, in the database. They are written and read in
pieces and never held in memory as a whole.

Invariant: a client never sees an incomplete file; an upload without progress is removed.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    CursorResult,
    Row,
    Select,
    delete,
    func,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession

from pdserve.gateway.batches.tables import (
    MAX_ID,
    PIECE_BYTES,
    FilePiece,
    StoredBatch,
    StoredFile,
)
from pdserve.gateway.storage import may_be_id
from pdserve.gateway.storage.database import Database, in_own_task
from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.common.errors import ServiceError

PAGE_BYTES = PIECE_BYTES  # approximate size of the pieces that are read at once
MAX_PAGE = 256  # pieces
STOPPED_S = 600.0  # an upload without a piece for so long is aborted
TOO_SLOW = "the upload took too long"
Stored = TypeVar("Stored", StoredFile, StoredBatch)

OPEN = ("validating", "in_progress", "finalizing", "cancelling")  # batches that have not ended


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of uploads: bytes of one file, and the total bytes and number of the files of one
    tenant."""

    max_file_bytes: int
    max_bytes: int
    max_files: int


@dataclass(frozen=True, slots=True)
class Page:
    """The requested part of a list: `limit` rows that follow the row with the id `after`, or the
    first ones if `after` is empty."""

    after: str = ""
    limit: int = 20
    descending: bool = True


class Standstill:
    """Detects named values that have stopped changing, such as the lease counter of a dead
    gateway."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Hashable, float]] = {}

    def unchanged(self, values: Mapping[str, Hashable], for_s: float, now: float) -> set[str]:
        """Return the names whose value has been the same for at least `for_s` seconds over the last
        calls. Pass all values in each call, since a name left out is forgotten; `now` is in seconds
        of a monotonic clock."""
        previous, self._seen = self._seen, {}
        for name, value in values.items():
            previous_value, since = previous.get(name, (value, now))
            self._seen[name] = value, since if previous_value == value else now
        return {name for name, (_, since) in self._seen.items() if now - since >= for_s}


class Files:
    """Transactions on the files of all tenants; the argument `tenant` is a tenant's id in
    hexadecimal."""

    def __init__(self, database: Database, limits: FileLimits) -> None:
        self._db = database
        self.limits = limits
        self._uploads = Standstill()

    @in_own_task
    async def begin(self, tenant: str) -> str:
        """Create an empty, incomplete file and return its id. Raises ServiceError INVALID_ARGUMENT
        if the tenant already has the maximum number of files."""
        file_id = f"file-{uuid.uuid4().hex}"
        now = now_us()
        async with self._db.changing() as session:
            num_files = select(func.count()).where(StoredFile.tenant == tenant)
            if (await session.scalar(num_files) or 0) >= self.limits.max_files:
                text = f"you have {self.limits.max_files} files, the maximum; delete some"
                raise ServiceError(INVALID_ARGUMENT, text, param="file")
            session.add(
                StoredFile(
                    id=file_id,
                    tenant=tenant,
                    filename="",
                    purpose="",
                    num_bytes=0,
                    created_us=now,
                    touched_us=now,
                    complete=False,
                )
            )
        return file_id

    @in_own_task
    async def append(self, tenant: str, file_id: str, number: int, data: bytes) -> None:
        """Store piece `number` of an upload. Raises ServiceError INVALID_ARGUMENT if the tenant's
        files exceed their total size limit with it, or if the upload was removed because it stood
        still for STOPPED_S."""
        statement = (
            update(StoredFile)
            .where(StoredFile.id == file_id, StoredFile.complete.is_(False))
            .values(num_bytes=StoredFile.num_bytes + len(data), touched_us=now_us())
        )
        async with self._db.changing() as session:
            result: CursorResult[Any] = await session.execute(statement)  # type: ignore[assignment]
            if not result.rowcount:
                raise ServiceError(INVALID_ARGUMENT, TOO_SLOW, param="file")
            session.add(FilePiece(file_id=file_id, number=number, data=data))
            total_bytes = select(func.sum(StoredFile.num_bytes)).where(StoredFile.tenant == tenant)
            if int(await session.scalar(total_bytes) or 0) > self.limits.max_bytes:
                text = f"your files may have at most {self.limits.max_bytes} bytes in total"
                raise ServiceError(
                    INVALID_ARGUMENT, f"the upload is refused: {text}; delete some", param="file"
                )

    @in_own_task
    async def finish(self, file_id: str, filename: str, purpose: str) -> StoredFile:
        """Mark an uploaded file as complete, which makes it visible, and return it. Raises
        ServiceError INVALID_ARGUMENT if the upload was removed because it stood still for
        STOPPED_S."""
        async with self._db.changing() as session:
            file = await session.get(StoredFile, file_id)
            if file is None:
                raise ServiceError(INVALID_ARGUMENT, TOO_SLOW, param="file")
            file.filename, file.purpose, file.complete = filename, purpose, True
            return file

    @in_own_task
    async def abandon(self, file_id: str) -> None:
        """Delete the incomplete file of a failed upload."""
        async with self._db.changing() as session:
            await remove_files(session, [file_id])

    @in_own_task
    async def remove_stopped(self) -> None:
        """Delete incomplete files that have had no new piece for STOPPED_S, e.g. because the
        gateway that received them has died."""
        uploads = select(StoredFile.id, StoredFile.touched_us).where(StoredFile.complete.is_(False))
        async with self._db.changing() as session:
            touched = {row.id: row.touched_us for row in await session.execute(uploads)}
            now = asyncio.get_running_loop().time()
            await remove_files(session, sorted(self._uploads.unchanged(touched, STOPPED_S, now)))

    @in_own_task
    async def find(self, tenant: str, file_id: str) -> StoredFile | None:
        if not may_be_id(file_id, MAX_ID):
            return None
        async with self._db.reading() as session:
            file = await session.get(StoredFile, file_id)
        visible = file is not None and file.complete and file.tenant == tenant
        return file if visible else None

    @in_own_task
    async def page(self, tenant: str, page: Page, purpose: str = "") -> list[StoredFile] | None:
        """List a tenant's complete files, of one purpose unless `purpose` is empty, by creation
        time: at most `page.limit` rows and one more, which shows that another page follows. Returns
        None if no such file has the id `page.after`."""
        conditions = [StoredFile.tenant == tenant, StoredFile.complete.is_(True)]
        if purpose:
            conditions.append(StoredFile.purpose == purpose)
        async with self._db.reading() as session:
            return await rows_of(session, StoredFile, conditions, page)

    @in_own_task
    async def delete(self, tenant: str, file_id: str) -> bool:
        """Delete a tenant's file; return whether it existed. Raises ServiceError INVALID_ARGUMENT
        if the file is the input of a batch that has not ended."""
        if not may_be_id(file_id, MAX_ID):
            return False
        async with self._db.changing() as session:
            # A concurrent creation of a batch holds the file's row, or waits for this transaction.
            file = await session.get(StoredFile, file_id, with_for_update=True)
            if file is None or not file.complete or file.tenant != tenant:
                return False
            reader = select(StoredBatch.id).where(
                StoredBatch.input_file_id == file_id, StoredBatch.status.in_(OPEN)
            )
            if batch := await session.scalar(reader.limit(1)):
                text = f"the batch {batch} still reads this file; cancel it first"
                raise ServiceError(INVALID_ARGUMENT, text, param="file_id")
            await remove_files(session, [file_id])
        return True

    async def pieces(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file in chunks of about PAGE_BYTES. No transaction is open between
        two chunks, so a slow caller blocks no other."""
        last, largest = -1, PIECE_BYTES
        while True:
            limit = max(1, min(MAX_PAGE, PAGE_BYTES // max(1, largest)))
            query = (
                select(FilePiece.number, FilePiece.data)
                .where(FilePiece.file_id == file_id, FilePiece.number > last)
                .order_by(FilePiece.number)
                .limit(limit)
            )
            rows = await self._rows(query)
            if not rows:
                return
            last = rows[-1].number
            largest = max(len(piece.data) for piece in rows)
            data = b"".join(piece.data for piece in rows)
            del rows  # the caller may take long
            yield data

    @in_own_task
    async def _rows(self, query: Select[int, bytes]) -> Sequence[Row[int, bytes]]:
        async with self._db.reading() as session:
            return (await session.execute(query)).all()

    @in_own_task
    async def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        """Return `num_bytes` of an uploaded file from byte `offset` on."""
        first, last = offset // PIECE_BYTES, (offset + max(1, num_bytes) - 1) // PIECE_BYTES
        query = (
            select(FilePiece.data)
            .where(FilePiece.file_id == file_id, FilePiece.number.between(first, last))
            .order_by(FilePiece.number)
        )
        async with self._db.reading() as session:
            data = b"".join((await session.scalars(query)).all())
        start = offset - first * PIECE_BYTES
        return data[start : start + num_bytes]


async def rows_of(
    session: AsyncSession,
    table: type[Stored],
    conditions: Sequence[ColumnElement[bool]],
    page: Page,
) -> list[Stored] | None:
    """Return a page of the rows that match `conditions`, ordered by creation time: at most
    `page.limit` rows and one more, which shows that another page follows. Returns None if no
    matching row has the id `page.after`."""
    key = tuple_(table.created_us, table.id)
    query = select(table).where(*conditions)
    if page.after:
        if not may_be_id(page.after, MAX_ID):
            return None
        row = await session.scalar(query.where(table.id == page.after))
        if row is None:
            return None
        mark = tuple_(row.created_us, row.id)
        query = query.where(key < mark if page.descending else key > mark)
    for column in (table.created_us, table.id):
        query = query.order_by(column.desc() if page.descending else column)
    return list((await session.scalars(query.limit(page.limit + 1))).all())


async def remove_files(session: AsyncSession, file_ids: Sequence[str]) -> None:
    """Delete files and then their pieces. The file's row goes first, so that of this transaction
    and a concurrent `append` to the same file, the later one waits until the other has ended."""
    await session.execute(delete(StoredFile).where(StoredFile.id.in_(file_ids)))
    await session.execute(delete(FilePiece).where(FilePiece.file_id.in_(file_ids)))


def now_us() -> int:
    return time.time_ns() // 1000
