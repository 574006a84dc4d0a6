"""The routes that need a database: /v1/files, /v1/batches and /v1/usage. A key sees only its own
data.

The times in usage reports are in seconds since the epoch. Usage is summed by the hour, so that a
bucket of a report is one hour or one day (UTC).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator
from pydantic_core import to_json
from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse
from starlette.routing import Route

from pdserve.gateway.batches import (
    PIECE_BYTES,
    Batches,
    Files,
    Page,
    Stored,
    StoredBatch,
    StoredFile,
)
from pdserve.gateway.http.api import (
    ErrorFormat,
    HttpApi,
    HttpError,
    HttpLimits,
    JsonPieces,
    array_json,
    error_response,
    list_json,
    object_json,
)
from pdserve.gateway.http.body import FILE, BodyReader, FileForm
from pdserve.gateway.http.docs import describe
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.http.responses import PieceStream, Reply
from pdserve.gateway.metrics.usage_log import UsageLog, UsageQuery
from pdserve.gateway.openai.objects import list_page, page_query, whole_number
from pdserve.gateway.openai.request_models import Body, parse
from pdserve.gateway.openai.response_models import (
    MAX_LISTED_FILES,
    BatchList,
    BatchObject,
    FileDeleted,
    FileList,
    FileObject,
    FilesQuery,
    FileUpload,
    PageQuery,
    UsagePage,
    UsageReportQuery,
)
from pdserve.gateway.sampling import refuse
from pdserve.gateway.storage import check_text
from pdserve.services.common.errors import ServiceError, quoted
from pdserve.services.common.fairness import FairShare


def list_reply(
    rows: Sequence[Stored] | None, page: Page, as_object: Callable[[Stored], dict[str, Any]]
) -> Response:
    """Return one page of a list as a response. `rows` has one row more than the page if further
    pages follow; None means that the object `page.after` does not exist, for which ServiceError is
    raised."""
    if rows is None:
        raise refuse("after", f"after: the object {quoted(page.after)} does not exist")
    data = [as_object(row) for row in rows[: page.limit]]
    page_json = to_json(list_page(data, has_more=len(rows) > page.limit))
    return Response(page_json, media_type="application/json")


def not_found(api: HttpApi, kind: str, object_id: str) -> Response:
    """Return the error response 404 for an object that does not exist or belongs to another key;
    `kind` is its type, such as file."""
    error = HttpError(404, f"no such {kind}: {quoted(object_id)}", "not_found", param="id")
    return error_response(api, error)


PURPOSE = "batch"
MAX_UPLOADS = 64  # at once, over all keys
MAX_DOWNLOADS = 64


class _Bytes(Response):
    """Response class of file downloads, which gives the media type for the OpenAPI document."""

    media_type = "application/octet-stream"  # no browser runs it, whatever its content


def add_file_routes(app: APIRouter, api: HttpApi, files: Files, limits: HttpLimits) -> None:
    uploads, downloads = FairShare(MAX_UPLOADS), FairShare(MAX_DOWNLOADS)

    @app.post("/v1/files", **describe(form=FileUpload, response=FileObject))
    async def upload(request: Request) -> Response:
        """Upload a file with requests for a batch."""
        form = FileForm(request, files.limits.max_file_bytes, limits.body_timeout_s)
        owner = caller_of(request).tenant.id
        with uploads.holding(owner, 1, "uploads"):
            return JSONResponse(_file_object(await _store(files, owner.hex(), form)))

    @app.get("/v1/files", **describe(response=FileList, query=FilesQuery))
    async def list_files(request: Request) -> Response:
        """List the files of this key."""
        page = Page(*page_query(request, MAX_LISTED_FILES, MAX_LISTED_FILES))
        purpose = request.query_params.get("purpose", "")
        check_text(purpose, "purpose")
        rows = await files.page(_tenant(request), page, purpose)
        return list_reply(rows, page, _file_object)

    @app.get("/v1/files/{file_id}", **describe(response=FileObject))
    async def get_file(request: Request, file_id: str) -> Response:
        """Get the properties of a file, such as its name and size."""
        file = await files.find(_tenant(request), file_id)
        if file is None:
            return not_found(api, "file", file_id)
        return JSONResponse(_file_object(file))

    @app.get("/v1/files/{file_id}/content", response_class=_Bytes)
    async def content(request: Request, file_id: str) -> Response:
        """Download a file."""
        file = await files.find(_tenant(request), file_id)
        if file is None:
            return not_found(api, "file", file_id)
        caller = caller_of(request)
        caller.at_end.enter_context(downloads.holding(caller.tenant.id, 1, "downloads"))
        pieces = files.pieces(file.id)
        return PieceStream(pieces, file.num_bytes, _Bytes.media_type)

    @app.delete("/v1/files/{file_id}", **describe(response=FileDeleted))
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file."""
        if not await files.delete(_tenant(request), file_id):
            return not_found(api, "file", file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def _tenant(request: Request) -> str:
    return caller_of(request).tenant.id.hex()


async def _store(files: Files, tenant: str, form: FileForm) -> StoredFile:
    """Receive the file of a form and store it. Raises ServiceError or HTTPException; then nothing
    remains stored."""
    file_id = await files.begin(tenant)
    try:
        number = 0
        async with aclosing(form.pieces(PIECE_BYTES)) as pieces:
            async for piece in pieces:
                _check_form(form.fields)
                await files.append(tenant, file_id, number, piece)
                number += 1
        _check_form(form.fields)
        if PURPOSE not in form.fields.values():
            raise refuse("purpose", "purpose is required")
        return await files.finish(file_id, form.filename or FILE, PURPOSE)
    except BaseException:
        with suppress(ServiceError):  # the database is away; the upload is removed later
            await asyncio.shield(files.abandon(file_id))
        raise


def _check_form(fields: dict[str, str]) -> None:
    """Check the form fields that have been received so far: the purpose must be `batch`, and there
    must be no other field. Raises ServiceError."""
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


ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ENDS = ("completed_at", "failed_at", "expired_at", "cancelled_at")
WINDOW, WINDOW_S = "24h", 24 * 3600
MAX_LISTED_BATCHES, LISTED_BATCHES = 100, 20
MAX_TAGS, MAX_TAG_NAME, MAX_TAG = 16, 64, 512


def _tags(metadata: dict[str, str] | None) -> dict[str, str] | None:
    tags = metadata or {}
    if len(tags) > MAX_TAGS:
        raise ValueError(f"at most {MAX_TAGS} entries, not {len(tags)}")
    for name, value in tags.items():
        if len(name) > MAX_TAG_NAME or len(value) > MAX_TAG:
            limits = f"{MAX_TAG_NAME} characters per name and {MAX_TAG} per value"
            raise ValueError(f"at most {limits}")
        check_text(name + value, "metadata")
    return metadata


class BatchBody(Body):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str] | None, AfterValidator(_tags)] = None
    output_expires_after: None = None  # not served: files stay until they are deleted


def add_batch_routes(
    app: APIRouter, api: HttpApi, batches: Batches, bodies: BodyReader, wake: Callable[[], None]
) -> None:
    """Add the routes of /v1/batches. `wake` is called after a batch is created or cancelled, so
    that the batch runner looks for work."""

    @app.post("/v1/batches", **describe(BatchBody, response=BatchObject))
    async def create(request: Request) -> Response:
        """Create a batch from an uploaded file of requests. The server runs it while it has free
        capacity."""
        body = await bodies.read(request, partial(parse, BatchBody))
        mounted = {route.path for route in request.app.routes if isinstance(route, Route)}
        offered = [endpoint for endpoint in ENDPOINTS if endpoint in mounted]
        if body.endpoint not in offered:
            raise refuse("endpoint", f"endpoint must be one of {', '.join(offered)}")
        batch = await batches.create(
            caller_of(request).tenant,
            body.endpoint,
            body.input_file_id,
            WINDOW,
            WINDOW_S,
            body.metadata,
        )
        wake()
        return JSONResponse(_batch_object(batch))

    @app.get("/v1/batches", **describe(response=BatchList, query=PageQuery))
    async def list_batches(request: Request) -> Response:
        """List the batches of this key."""
        page = Page(*page_query(request, LISTED_BATCHES, MAX_LISTED_BATCHES))
        return list_reply(await batches.page(_tenant(request), page), page, _batch_object)

    @app.get("/v1/batches/{batch_id}", **describe(response=BatchObject))
    async def get_batch(request: Request, batch_id: str) -> Response:
        """Get a batch: its status and the numbers of its completed and failed requests."""
        batch = await batches.find(_tenant(request), batch_id)
        if batch is None:
            return not_found(api, "batch", batch_id)
        return JSONResponse(_batch_object(batch))

    @app.post("/v1/batches/{batch_id}/cancel", **describe(response=BatchObject))
    async def cancel(request: Request, batch_id: str) -> Response:
        """Cancel a batch: no further request of the batch is started."""
        batch = await batches.cancel(_tenant(request), batch_id)
        if batch is None:
            return not_found(api, "batch", batch_id)
        wake()
        return JSONResponse(_batch_object(batch))


def _batch_object(batch: StoredBatch) -> dict[str, Any]:
    ends: dict[str, int | None] = dict.fromkeys(ENDS)
    if batch.ended_at is not None:
        ends[f"{batch.status}_at"] = batch.ended_at
    errors = None if batch.errors is None else {"object": "list", "data": batch.errors}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_us // 1_000_000,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "cancelling_at": batch.cancelling_at,
        **ends,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.tags,
    }


# Width -> (seconds, buckets of a page by default, at most)
WIDTHS = {"1h": (3600, 24, 168), "1d": (86400, 7, 31)}
# OpenAI's names of the dimensions that results may be grouped by -> columns
GROUPS = {"model": "model", "api_key_id": "key_name", "session_id": "session"}
KNOWN = (
    "start_time", "end_time", "bucket_width", "group_by", "limit", "page", "models", "session_ids",
)  # fmt: skip
MAX_NAMED = 100  # models or sessions
MAX_RESULTS = 10_000  # of a page
MAX_TIME = 1 << 40


def add_usage_routes(app: APIRouter, errors: ErrorFormat, usage: UsageLog) -> None:
    @app.get("/v1/usage", **describe(response=UsagePage, query=UsageReportQuery))
    async def report(request: Request) -> Response:
        """Report the requests and tokens of this key by hour or day."""
        query, limit_s = _query(request.query_params, int(time.time()))
        return Reply(usage_page(usage, caller_of(request).tenant.id.hex(), query, limit_s), errors)


async def usage_page(usage: UsageLog, tenant: str, query: UsageQuery, limit_s: int) -> JsonPieces:
    """Return the JSON text of one page of a usage report. `limit_s` is the time at which the last
    page ends. Results are converted in small pieces, since all at once would block the event loop.
    Raises ServiceError."""
    rows = await usage.report(tenant, query, MAX_RESULTS + 1)
    if len(rows) > MAX_RESULTS:
        text = f"a page would have more than {MAX_RESULTS} results; lower the limit"
        raise refuse("limit", text)
    by_start: dict[int, list[Any]] = {}
    for row in rows:
        by_start.setdefault(int(row.bucket), []).append(row)
    buckets = [
        object_json(
            {
                "object": "bucket",
                "start_time": start,
                "end_time": start + query.bucket_s,
                "results": await list_json(
                    by_start.get(start, ()), partial(_result, group_by=query.group_by)
                ),
            }
        )
        for start in range(query.start, query.end, query.bucket_s)
    ]
    has_more = query.end < limit_s
    return object_json(
        {
            "object": "page",
            "data": array_json(buckets),
            "has_more": has_more,
            "next_page": str(query.end) if has_more else None,
        }
    )


def _query(params: QueryParams, now: int) -> tuple[UsageQuery, int]:
    """Parse the URL parameters of a usage report. Returns the query of the requested page, and the
    time at which the last page ends. Raises ServiceError for an invalid parameter."""
    params = QueryParams([(n.removesuffix("[]"), v) for n, v in params.multi_items()])
    for name in params:
        if name not in KNOWN:
            raise refuse(name[:40], f"{name[:40]!r} is not a parameter of this report")
    width = params.get("bucket_width", "1d")
    if width not in WIDTHS:
        raise refuse("bucket_width", f"bucket_width must be one of {', '.join(WIDTHS)}")
    bucket_s, default, max_limit = WIDTHS[width]
    limit = whole_number(params.get("limit", str(default)), "limit", 1, max_limit)
    end = whole_number(params.get("end_time", str(now + 1)), "end_time", 1, MAX_TIME)
    last_bucket = (end - 1) // bucket_s * bucket_s
    first = params.get("start_time", str(max(0, last_bucket - (limit - 1) * bucket_s)))
    name, value = ("page", params["page"]) if "page" in params else ("start_time", first)
    start = whole_number(value, name, 0, MAX_TIME - 1)
    if start >= end:
        raise refuse(name, f"{name} must be before end_time")
    groups = params.getlist("group_by")
    for group in groups:
        if group not in GROUPS:
            raise refuse("group_by", f"group_by must be one of {', '.join(GROUPS)}")
    filters = [tuple(params.getlist(name)) for name in ("models", "session_ids")]
    if max(map(len, filters)) > MAX_NAMED:
        raise refuse("models", f"models and session_ids may have at most {MAX_NAMED} values each")
    for name in ("models", "session_ids"):
        for value in params.getlist(name):
            check_text(value, name)
    start -= start % bucket_s
    query = UsageQuery(
        start,
        min(start + limit * bucket_s, end),
        bucket_s,
        tuple(GROUPS[group] for group in dict.fromkeys(groups)),
        *filters,
    )
    return query, end


def _result(row: Any, group_by: tuple[str, ...]) -> dict[str, Any]:
    """Convert a row of sums to a result of a usage report. Dimensions (model, key, session) that
    are not in `group_by` are null."""
    groups = {n: getattr(row, c) if c in group_by else None for n, c in GROUPS.items()}
    return {
        "object": "usage.result",
        "num_model_requests": int(row.requests),
        "input_tokens": int(row.prompt_tokens),
        "input_cached_tokens": int(row.cached_tokens),
        "output_tokens": int(row.completion_tokens),
        **groups,
    }
