"""The shared parts of lists of files and batches: their query, and one page in OpenAI's format."""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from pdserve.gateway.batches import Page, Stored
from pdserve.gateway.http import Dialect, HttpError, error_response
from pdserve.gateway.sampling import refuse
from pdserve.services.common.errors import quoted

ORDERS = ("asc", "desc")


def page_of(request: Request, default_limit: int, max_limit: int) -> Page:
    """Return the page that a query requests. Raises ServiceError naming what is wrong."""
    query = request.query_params
    limit = whole_number(query.get("limit", str(default_limit)), "limit", 1, max_limit)
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise refuse("order", "order must be 'asc' or 'desc'")
    return Page(query.get("after", ""), limit, order == "desc")


def whole_number(text: str, name: str, low: int, high: int) -> int:
    """Parse a whole number. Raises ServiceError naming the parameter."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and low <= int(text) <= high):
        raise refuse(name, f"{name} must be a whole number from {low} to {high}")
    return int(text)


def list_reply(
    rows: Sequence[Stored] | None, page: Page, as_object: Callable[[Stored], dict[str, Any]]
) -> Response:
    """Return a page of `rows` (see `rows_of`). Raises ServiceError without a row to begin after."""
    if rows is None:
        raise refuse("after", f"after: {quoted(page.after)} does not exist")
    page_rows = rows[: page.limit]
    result = {
        "object": "list",
        "data": [as_object(row) for row in page_rows],
        "first_id": page_rows[0].id if page_rows else None,
        "last_id": page_rows[-1].id if page_rows else None,
        "has_more": len(rows) > page.limit,
    }
    return Response(to_json(result), media_type="application/json")


def not_found(dialect: Dialect, kind: str, object_id: str) -> Response:
    """Return the error for an id that does not exist, or is another key's."""
    error = HttpError(404, f"no such {kind}: {quoted(object_id)}", "not_found", param="id")
    return error_response(dialect, error)
