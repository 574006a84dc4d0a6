"""/v1/batches: many requests in a file, answered while the server has free capacity."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator
from starlette.responses import JSONResponse
from starlette.routing import Route

from pdserve.gateway.batches import Batches, StoredBatch
from pdserve.gateway.http import BodyReader, Dialect, caller_of, described
from pdserve.gateway.openai.request_models import Body, parse
from pdserve.gateway.openai.stored.lists import list_reply, not_found, page_of
from pdserve.gateway.openai.stored.response_models import BatchesQuery, BatchList, BatchObject
from pdserve.gateway.sampling import refuse
from pdserve.gateway.storage import check_text

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ENDS = ("completed_at", "failed_at", "expired_at", "cancelled_at")
WINDOW, WINDOW_S = "24h", 24 * 3600
MAX_LISTED, LISTED = 100, 20
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
    app: APIRouter, dialect: Dialect, batches: Batches, bodies: BodyReader, wake: Callable[[], None]
) -> None:
    """Add the routes; `wake` is called when there is work for the runner."""

    @app.post("/v1/batches", **described(BatchBody, answer=BatchObject))
    async def create(request: Request) -> Response:
        """Create a batch from a file of requests. It runs while the server has free capacity."""
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

    @app.get("/v1/batches", **described(answer=BatchList, query=BatchesQuery))
    async def list_batches(request: Request) -> Response:
        """List the batches of this key."""
        page = page_of(request, LISTED, MAX_LISTED)
        return list_reply(await batches.page(_tenant(request), page), page, _batch_object)

    @app.get("/v1/batches/{batch_id}", **described(answer=BatchObject))
    async def get_batch(request: Request, batch_id: str) -> Response:
        """Get a batch and its progress."""
        batch = await batches.find(_tenant(request), batch_id)
        if batch is None:
            return not_found(dialect, "batch", batch_id)
        return JSONResponse(_batch_object(batch))

    @app.post("/v1/batches/{batch_id}/cancel", **described(answer=BatchObject))
    async def cancel(request: Request, batch_id: str) -> Response:
        """Cancel a batch: no further request of it is started."""
        batch = await batches.cancel(_tenant(request), batch_id)
        if batch is None:
            return not_found(dialect, "batch", batch_id)
        wake()
        return JSONResponse(_batch_object(batch))


def _tenant(request: Request) -> str:
    return caller_of(request).tenant.id.hex()


def _batch_object(batch: StoredBatch) -> dict[str, Any]:
    ends: dict[str, int | None] = {
        f"{s}_at": None for s in ("completed", "failed", "expired", "cancelled")
    }
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
