"""/v1/files: the files that batches read and write. A key sees only its own files."""

import asyncio
from contextlib import aclosing, suppress
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from pdserve.gateway.batches import PIECE_BYTES, Files, StoredFile
from pdserve.gateway.http import (
    FILE,
    Dialect,
    FileForm,
    HttpLimits,
    PieceStream,
    caller_of,
    described,
)
from pdserve.gateway.openai.stored.lists import list_reply, not_found, page_of
from pdserve.gateway.openai.stored.response_models import (
    FileDeleted,
    FileList,
    FileObject,
    FilesQuery,
    FileUpload,
)
from pdserve.gateway.sampling import refuse
from pdserve.gateway.storage import check_text
from pdserve.services.common.errors import ServiceError, quoted
from pdserve.services.common.fairness import FairShare

PURPOSE = "batch"
MAX_UPLOADS = 64  # at once, over all keys
MAX_DOWNLOADS = 64
MAX_LISTED = 1000


class _Bytes(Response):
    """A response type for the API description."""

    media_type = "application/octet-stream"  # no browser runs it, whatever its content


def add_file_routes(app: APIRouter, dialect: Dialect, files: Files, limits: HttpLimits) -> None:
    uploads, downloads = FairShare(MAX_UPLOADS), FairShare(MAX_DOWNLOADS)

    @app.post("/v1/files", **described(form=FileUpload, answer=FileObject))
    async def upload(request: Request) -> Response:
        """Upload a file with the requests of a batch."""
        form = FileForm(request, files.limits.max_file_bytes, limits.body_timeout_s)
        owner = caller_of(request).tenant.id
        with uploads.holding(owner, 1, "uploads"):
            return JSONResponse(_file_object(await _store(files, owner.hex(), form)))

    @app.get("/v1/files", **described(answer=FileList, query=FilesQuery))
    async def list_files(request: Request) -> Response:
        """List the files of this key."""
        page = page_of(request, MAX_LISTED, MAX_LISTED)
        purpose = request.query_params.get("purpose", "")
        check_text(purpose, "purpose")
        rows = await files.page(_tenant(request), page, purpose)
        return list_reply(rows, page, _file_object)

    @app.get("/v1/files/{file_id}", **described(answer=FileObject))
    async def get_file(request: Request, file_id: str) -> Response:
        """Get the properties of a file."""
        file = await files.find(_tenant(request), file_id)
        if file is None:
            return not_found(dialect, "file", file_id)
        return JSONResponse(_file_object(file))

    @app.get("/v1/files/{file_id}/content", response_class=_Bytes)
    async def content(request: Request, file_id: str) -> Response:
        """Download a file."""
        file = await files.find(_tenant(request), file_id)
        if file is None:
            return not_found(dialect, "file", file_id)
        caller = caller_of(request)
        caller.at_end.enter_context(downloads.holding(caller.tenant.id, 1, "downloads"))
        pieces = files.pieces(file.id)
        return PieceStream(pieces, file.num_bytes, _Bytes.media_type)

    @app.delete("/v1/files/{file_id}", **described(answer=FileDeleted))
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file."""
        if not await files.delete(_tenant(request), file_id):
            return not_found(dialect, "file", file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def _tenant(request: Request) -> str:
    return caller_of(request).tenant.id.hex()


async def _store(files: Files, tenant: str, form: FileForm) -> StoredFile:
    """Store a form's file. Raises ServiceError and HTTPException; an error leaves nothing."""
    file_id = await files.begin(tenant)
    try:
        number = 0
        async with aclosing(form.pieces(PIECE_BYTES)) as pieces:
            async for piece in pieces:
                _check(form.fields)
                await files.append(tenant, file_id, number, piece)
                number += 1
        _check(form.fields)
        if PURPOSE not in form.fields.values():
            raise refuse("purpose", "purpose is required")
        return await files.finish(file_id, form.filename or FILE, PURPOSE)
    except BaseException:
        with suppress(ServiceError):  # the database is away; the upload is removed later
            await asyncio.shield(files.abandon(file_id))
        raise


def _check(fields: dict[str, str]) -> None:
    """Check the fields that have come so far, if possible before the file."""
    for name, value in fields.items():
        if name != "purpose":
            raise refuse(name, f"{quoted(name)} is not supported by this server")
        if value != PURPOSE:
            raise refuse(name, f"purpose must be {PURPOSE!r}, not {quoted(value)}")


def _file_object(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_us // 1_000_000,
        "expires_at": None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
