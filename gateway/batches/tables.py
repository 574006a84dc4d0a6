"""The database tables of uploaded files, batch results and batches.

A file is a sequence of numbered pieces. The pieces of an upload have PIECE_BYTES each, so the piece
of a byte follows from its position. The pieces of an output or error file are the results of a
batch, each under the number of its input line, so no line can be in an output twice.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from pdserve.gateway.storage.database import Base

PIECE_BYTES = 256 << 10
MAX_ID = 64  # characters


class StoredFile(Base):
    """A row per file of a tenant, without its content; `complete` is false during the upload."""

    __tablename__ = "files"
    id: Mapped[str] = mapped_column(String(MAX_ID), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(255))
    purpose: Mapped[str] = mapped_column(String(32))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_us: Mapped[int] = mapped_column(BigInteger)
    touched_us: Mapped[int] = mapped_column(BigInteger)  # when the last piece was added
    complete: Mapped[bool] = mapped_column()
    __table_args__ = (Index("files_of_tenant", "tenant", "created_us", "id"),)


class FilePiece(Base):
    """A row per piece of a file's content, numbered from 0 in an upload, by input line in a result
    file."""

    __tablename__ = "file_pieces"
    file_id: Mapped[str] = mapped_column(String(MAX_ID), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class StoredBatch(Base):
    """A row per batch. The times `..._at` are in seconds since the epoch, as in the API;
    `created_us` is in microseconds.

    `owner` is the id of the gateway that runs the batch and increments `beat` while it lives. Only
    the owner changes the row, except that a client may cancel the batch through any gateway.
    """

    __tablename__ = "batches"
    id: Mapped[str] = mapped_column(String(MAX_ID), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(32))
    key_name: Mapped[str] = mapped_column(String(64))
    salt: Mapped[bytes] = mapped_column(LargeBinary)  # of the prefix cache; unique to the batch
    endpoint: Mapped[str] = mapped_column(String(64))
    input_file_id: Mapped[str] = mapped_column(String(MAX_ID))
    output_file_id: Mapped[str | None] = mapped_column(String(MAX_ID))  # once the file is complete
    error_file_id: Mapped[str | None] = mapped_column(String(MAX_ID))
    window: Mapped[str] = mapped_column("completion_window", String(16))
    tags: Mapped[dict[str, str] | None] = mapped_column("metadata", JSON)
    status: Mapped[str] = mapped_column(String(16))
    created_us: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger)
    in_progress_at: Mapped[int | None] = mapped_column(BigInteger)
    finalizing_at: Mapped[int | None] = mapped_column(BigInteger)
    cancelling_at: Mapped[int | None] = mapped_column(BigInteger)
    ended_at: Mapped[int | None] = mapped_column(BigInteger)  # the end that `status` names
    errors: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON)
    total: Mapped[int] = mapped_column(default=0)
    completed: Mapped[int] = mapped_column(default=0)
    failed: Mapped[int] = mapped_column(default=0)
    owner: Mapped[str] = mapped_column(String(MAX_ID), default="")
    beat: Mapped[int] = mapped_column(BigInteger, default=0)
    __table_args__ = (
        Index("batches_of_tenant", "tenant", "created_us", "id"),
        Index("batches_by_status", "status"),
    )


class BatchLine(Base):
    """A row per input line that has no result yet, with its position in the input file of the
    batch."""

    __tablename__ = "batch_lines"
    batch_id: Mapped[str] = mapped_column(String(MAX_ID), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)  # from 1, as in an editor
    at: Mapped[int] = mapped_column(BigInteger)
    num_bytes: Mapped[int] = mapped_column()
