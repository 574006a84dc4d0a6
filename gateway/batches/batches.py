"""The database transactions on batches: `Batches` has those for clients and for claiming leases,
`OwnedBatch` those of the gateway that runs a batch.

Invariant: each line of an input file is either a row of `batch_lines` (it has no result yet) or in
the batch's output or error file. It moves there in one transaction, which fails unless the gateway
still owns the batch.
"""

import math
import secrets
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import CursorResult, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from pdserve.gateway.batches.files import OPEN, Page, Standstill, now_us, remove_files, rows_of
from pdserve.gateway.batches.jsonl import Span
from pdserve.gateway.batches.tables import MAX_ID, BatchLine, FilePiece, StoredBatch, StoredFile
from pdserve.gateway.storage import may_be_id
from pdserve.gateway.storage.database import Database, in_own_task
from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.tenants import Tenant

MAX_OPEN = 100  # open batches of a tenant
SALT_BYTES = 16
REMOVED_AT_ONCE = 100  # batches removed per query
OUTPUT, ERRORS = "output", "errors"


LEASE_S = 5.0  # time without a beat after which an owner counts as dead
BEAT_S = 1.0  # between two beats of a live owner


class BatchLease(NamedTuple):
    """The lease of a batch: the id of the gateway that runs it ("" if none does), and a counter
    that this gateway increments with each renewal."""

    batch_id: str
    owner: str
    beat: int


class LeaseWatch:
    """Detects leases whose gateway has died: their counter stops increasing."""

    def __init__(self) -> None:
        self._beats = Standstill()

    def free(self, leases: Sequence[BatchLease], now: float) -> list[BatchLease]:
        """Return the leases that a gateway may claim, in order: those without an owner, and those
        not renewed for LEASE_S. `leases` must be the leases of all open batches; `now` is in
        seconds of a monotonic clock."""
        dead = self._beats.unchanged({lease.batch_id: lease for lease in leases}, LEASE_S, now)
        return [lease for lease in leases if not lease.owner or lease.batch_id in dead]


class LeaseLost(Exception):
    """This gateway no longer owns a batch: another gateway runs it now, or the batch has ended."""


class OpenBatch(NamedTuple):
    """The facts about an open (not ended) batch by which a gateway decides whether to run it."""

    lease: BatchLease
    tenant: str
    key_name: str
    expires_at: int
    cancelling: bool


class Batches:
    """Transactions on the batches of all tenants: create, find and cancel for clients; leases for
    gateways that look for batches to run."""

    def __init__(self, database: Database) -> None:
        self._db = database

    # --- clients

    @in_own_task
    async def create(
        self,
        tenant: Tenant,
        endpoint: str,
        input_file_id: str,
        window: str,
        window_s: int,
        tags: dict[str, str] | None,
    ) -> StoredBatch:
        """Create a batch from an uploaded file. Raises ServiceError INVALID_ARGUMENT if the input
        file does not exist or its purpose is not "batch", or if the tenant has MAX_OPEN open
        batches already."""
        owner = tenant.id.hex()
        async with self._db.changing() as session:
            file = None
            if may_be_id(input_file_id, MAX_ID):
                file = await session.get(StoredFile, input_file_id, with_for_update=True)
            if file is None or not file.complete or file.tenant != owner:
                text = f"the file {input_file_id[:MAX_ID]!r} does not exist"
                raise ServiceError(INVALID_ARGUMENT, text, param="input_file_id")
            if file.purpose != "batch":
                text = f"the file has the purpose {file.purpose!r}, not 'batch'"
                raise ServiceError(INVALID_ARGUMENT, text, param="input_file_id")
            is_open = (StoredBatch.tenant == owner, StoredBatch.status.in_(OPEN))
            num_open = await session.scalar(select(func.count()).where(*is_open))
            if (num_open or 0) >= MAX_OPEN:
                text = f"{MAX_OPEN} of your batches are open, the maximum; cancel one or wait"
                raise ServiceError(INVALID_ARGUMENT, text)
            created = now_us()
            batch = StoredBatch(
                id=f"batch_{uuid.uuid4().hex}",
                tenant=owner,
                key_name=tenant.name,
                # The key's own salt would tell a reader of the database what the key has cached.
                salt=secrets.token_bytes(SALT_BYTES) if tenant.salt else b"",
                endpoint=endpoint,
                input_file_id=file.id,
                window=window,
                tags=tags,
                status="validating",
                created_us=created,
                expires_at=math.ceil(created / 1e6) + window_s,
            )
            session.add(batch)
        return batch

    @in_own_task
    async def find(self, tenant: str, batch_id: str) -> StoredBatch | None:
        if not may_be_id(batch_id, MAX_ID):
            return None
        async with self._db.reading() as session:
            batch = await session.get(StoredBatch, batch_id)
        return batch if batch is not None and batch.tenant == tenant else None

    @in_own_task
    async def page(self, tenant: str, page: Page) -> list[StoredBatch] | None:
        """List a tenant's batches by creation time: at most `page.limit` rows and one more, which
        shows that another page follows. Returns None if the tenant has no batch with the id
        `page.after`."""
        async with self._db.reading() as session:
            return await rows_of(session, StoredBatch, [StoredBatch.tenant == tenant], page)

    @in_own_task
    async def cancel(self, tenant: str, batch_id: str) -> StoredBatch | None:
        """Cancel a batch and return it, or None if the tenant has no such batch. A batch that no
        gateway has begun is "cancelled" at once; otherwise it is "cancelling" until its gateway
        ends it. Raises ServiceError INVALID_ARGUMENT if it has already ended."""
        if not may_be_id(batch_id, MAX_ID):
            return None
        async with self._db.changing() as session:
            batch = await session.get(StoredBatch, batch_id, with_for_update=True)
            if batch is None or batch.tenant != tenant:
                return None
            if batch.status in ("validating", "in_progress"):
                now = int(time.time())
                batch.status, batch.cancelling_at = "cancelling", now
                if not batch.owner and batch.in_progress_at is None:
                    batch.status, batch.ended_at = "cancelled", now
                    await session.execute(delete(BatchLine).where(BatchLine.batch_id == batch_id))
            elif batch.status != "cancelling":
                text = f"a batch whose status is {batch.status!r} cannot be cancelled"
                raise ServiceError(INVALID_ARGUMENT, text)
            return batch

    # --- age

    async def remove_ended(self, keep_s: int) -> None:
        """Remove batches that ended more than `keep_s` seconds ago, with their input, output and
        error files. An input file that several batches use is removed with the last of them.
        Several gateways may run this at once. Raises ServiceError if the database cannot be
        used."""
        while batch_ids := await self._ended_before(keep_s):
            for batch_id in batch_ids:
                await self._remove(batch_id)

    @in_own_task
    async def _ended_before(self, keep_s: int) -> Sequence[str]:
        async with self._db.reading() as session:
            cutoff_s = await self._db.now_s(session) - keep_s
            ended = select(StoredBatch.id).where(StoredBatch.ended_at < cutoff_s)
            return (await session.scalars(ended.limit(REMOVED_AT_ONCE))).all()

    @in_own_task
    async def _remove(self, batch_id: str) -> None:
        async with self._db.changing() as session:
            batch = await session.get(StoredBatch, batch_id, with_for_update=True)
            if batch is None:
                return
            await session.execute(delete(StoredBatch).where(StoredBatch.id == batch_id))
            file_ids = [result_file_id(batch_id, kind) for kind in (OUTPUT, ERRORS)]
            # A concurrent `create` with this file holds its row, or waits for this transaction.
            await session.get(StoredFile, batch.input_file_id, with_for_update=True)
            others = select(StoredBatch.id).where(StoredBatch.input_file_id == batch.input_file_id)
            if await session.scalar(others.limit(1)) is None:
                file_ids.append(batch.input_file_id)
            await remove_files(session, file_ids)

    # --- leases

    @in_own_task
    async def leases(self) -> list[OpenBatch]:
        """Return all open batches of all tenants with their leases, oldest first."""
        query = (
            select(StoredBatch)
            .where(StoredBatch.status.in_(OPEN))
            .order_by(StoredBatch.created_us, StoredBatch.id)
        )
        async with self._db.reading() as session:
            rows = (await session.scalars(query)).all()
        return [
            OpenBatch(
                BatchLease(b.id, b.owner, b.beat),
                b.tenant,
                b.key_name,
                b.expires_at,
                b.status == "cancelling",
            )
            for b in rows
        ]

    async def claim(self, lease: BatchLease, owner: str) -> bool:
        """Make the gateway `owner` the owner of a batch; return whether it succeeded. It fails if
        another gateway has claimed or renewed the lease since `lease` was read."""
        same = (StoredBatch.owner == lease.owner, StoredBatch.beat == lease.beat)
        return await self._change(lease.batch_id, *same, owner=owner, beat=lease.beat + 1)

    @in_own_task
    async def renew(self, owner: str) -> dict[str, str]:
        """Renew the leases of all open batches that the gateway `owner` holds; return the statuses
        of these batches by id."""
        is_held = (StoredBatch.owner == owner, StoredBatch.status.in_(OPEN))
        async with self._db.changing() as session:
            await session.execute(
                update(StoredBatch).where(*is_held).values(beat=StoredBatch.beat + 1)
            )
            rows = await session.execute(select(StoredBatch.id, StoredBatch.status).where(*is_held))
            return {row.id: row.status for row in rows}

    async def release(self, owner: str, batch_id: str) -> None:
        """Give up the lease of a batch that the gateway `owner` holds, so that any gateway may
        claim it without waiting for the lease to expire."""
        await self._change(batch_id, StoredBatch.owner == owner, owner="")

    @in_own_task
    async def _change(self, batch_id: str, *conditions: Any, **values: Any) -> bool:
        async with self._db.changing() as session:
            return await _changed(session, batch_id, *conditions, **values)


class OwnedBatch:
    """Transactions on one batch by the gateway that owns it. Methods raise LeaseLost and change
    nothing if this gateway no longer owns the batch."""

    def __init__(self, database: Database, batch_id: str, owner: str) -> None:
        self._db = database
        self._id = batch_id
        self._owner = owner

    @in_own_task
    async def load(self) -> StoredBatch:
        async with self._db.reading() as session:
            batch = await session.get(StoredBatch, self._id)
        if batch is None or batch.owner != self._owner:
            raise LeaseLost
        return batch

    @in_own_task
    async def restart_validation(self) -> None:
        """Delete the rows of input lines that an earlier, interrupted validation has stored."""
        async with self._db.changing() as session:
            await self._lock(session)
            await session.execute(delete(BatchLine).where(BatchLine.batch_id == self._id))

    @in_own_task
    async def add_lines(self, spans: Sequence[Span]) -> None:
        rows = [
            {"batch_id": self._id, "number": s.number, "at": s.at, "num_bytes": s.num_bytes}
            for s in spans
        ]
        async with self._db.changing() as session:
            await self._lock(session)
            await session.execute(insert(BatchLine), rows)

    @in_own_task
    async def fail(self, errors: list[dict[str, Any]]) -> None:
        """End the batch as "failed", with `errors`, because its input file is invalid; also if the
        client is cancelling the batch."""
        async with self._db.changing() as session:
            await self._lock(session, status="failed", ended_at=int(time.time()), errors=errors)
            await session.execute(delete(BatchLine).where(BatchLine.batch_id == self._id))

    @in_own_task
    async def begin(self, total: int) -> None:
        """Record that the input file is valid and has `total` requests: the batch becomes
        "in_progress", unless the client is cancelling it."""
        async with self._db.changing() as session:
            await self._lock(session, total=total)
            status = {"status": "in_progress", "in_progress_at": int(time.time())}
            await _changed(session, self._id, StoredBatch.status == "validating", **status)

    @in_own_task
    async def lines(self, after: int, limit: int) -> list[Span]:
        """Return the positions of the first `limit` input lines that have no result and whose
        number is greater than `after`, in order."""
        query = (
            select(BatchLine)
            .where(BatchLine.batch_id == self._id, BatchLine.number > after)
            .order_by(BatchLine.number)
            .limit(limit)
        )
        async with self._db.reading() as session:
            rows = (await session.scalars(query)).all()
        return [Span(row.number, row.at, row.num_bytes) for row in rows]

    @in_own_task
    async def add_result(self, number: int, data: bytes, ok: bool) -> None:
        """Move input line `number` to the output file (if `ok`) or the error file, with `data` as
        its line there, and increment the batch's count of completed or failed requests."""
        counter = StoredBatch.completed if ok else StoredBatch.failed
        async with self._db.changing() as session:
            await self._lock(session, **{counter.key: counter + 1})
            await self._move(session, number, OUTPUT if ok else ERRORS, data)

    @in_own_task
    async def add_not_run(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """Move input lines that will not run to the error file, as (line number, line of the error
        file). They do not count as failed requests."""
        async with self._db.changing() as session:
            await self._lock(session)
            for number, data in lines:
                await self._move(session, number, ERRORS, data)

    @in_own_task
    async def finalize(self) -> None:
        """Record that every input line has a result: the batch becomes "finalizing", unless the
        client is cancelling it."""
        async with self._db.changing() as session:
            await self._lock(session)
            final = {"status": "finalizing", "finalizing_at": int(time.time())}
            await _changed(session, self._id, StoredBatch.status == "in_progress", **final)

    @in_own_task
    async def end(self, status: str) -> None:
        """End the batch with `status`. Its output and error files become visible to the client,
        each only if it has lines."""
        async with self._db.changing() as session:
            await self._lock(session, status=status, ended_at=int(time.time()))
            batch = await session.get_one(StoredBatch, self._id)
            for kind, column in ((OUTPUT, "output_file_id"), (ERRORS, "error_file_id")):
                file_id = result_file_id(self._id, kind)
                total_bytes = func.sum(func.length(FilePiece.data))
                num_bytes = await session.scalar(
                    select(total_bytes).where(FilePiece.file_id == file_id)
                )
                if num_bytes is None:
                    continue
                now = now_us()
                session.add(
                    StoredFile(
                        id=file_id,
                        tenant=batch.tenant,
                        filename=f"{self._id}_{kind}.jsonl",
                        purpose="batch_output",
                        num_bytes=int(num_bytes),
                        created_us=now,
                        touched_us=now,
                        complete=True,
                    )
                )
                setattr(batch, column, file_id)

    async def _lock(self, session: AsyncSession, **values: Any) -> None:
        """Lock the batch's row and set `values` in it; raise LeaseLost unless this gateway owns the
        batch. Must be the first statement of a transaction, so that other gateways wait until the
        transaction ends."""
        is_owned = (StoredBatch.owner == self._owner, StoredBatch.status.in_(OPEN))
        if not await _changed(session, self._id, *is_owned, **(values or {"owner": self._owner})):
            raise LeaseLost

    async def _move(self, session: AsyncSession, number: int, kind: str, data: bytes) -> None:
        is_line = (BatchLine.batch_id == self._id, BatchLine.number == number)
        deleted: CursorResult[Any] = await session.execute(delete(BatchLine).where(*is_line))  # type: ignore[assignment]
        if deleted.rowcount != 1:
            raise LeaseLost
        file_id = result_file_id(self._id, kind)
        await session.execute(insert(FilePiece).values(file_id=file_id, number=number, data=data))


def result_file_id(batch_id: str, kind: str) -> str:
    """Return the id of a batch's output or error file (`kind`). Lines are stored under this id
    while the batch runs, before the file itself exists."""
    return f"file-{batch_id.removeprefix('batch_')}-{kind}"


async def _changed(session: AsyncSession, batch_id: str, *conditions: Any, **values: Any) -> bool:
    """Set `values` in the row of a batch if it meets the conditions; return whether it did."""
    statement = update(StoredBatch).where(StoredBatch.id == batch_id, *conditions).values(**values)
    result: CursorResult[Any] = await session.execute(statement)  # type: ignore[assignment]
    return result.rowcount == 1
