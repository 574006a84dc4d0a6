"""What the lists of files and batches share: their query, and one page as OpenAI writes it."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pdserve.gateway.batches.files import Page, Stored
from pdserve.gateway.http.dialect import Dialect, HttpError, error_response
from pdserve.gateway.sampling import refuse
from pdserve.services.host.errors import quoted

ORDERS = ("asc", "desc")


def page_of(request: Request, default_limit: int, max_limit: int) -> Page:
    """The page that a query asks for. Raises ServiceError naming what is wrong."""
    query = request.query_params
    limit = whole_number(query.get("limit", str(default_limit)), "limit", 1, max_limit)
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise refuse("order", "order must be 'asc' or 'desc'")
    return Page(query.get("after", ""), limit, order == "desc")


def whole_number(text: str, name: str, low: int, high: int) -> int:
    """Raises ServiceError naming the parameter."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and low <= int(text) <= high):
        raise refuse(name, f"{name} must be a whole number from {low} to {high}")
    return int(text)


def list_reply(
    rows: Sequence[Stored] | None, page: Page, as_object: Callable[[Stored], dict[str, Any]]
) -> Response:
    """`rows` as `rows_of` gives them. Raises ServiceError if there is no row to begin after."""
    if rows is None:
        raise refuse("after", f"there is no {quoted(page.after)} to begin after")
    shown = rows[: page.limit]
    return JSONResponse(
        {
            "object": "list",
            "data": [as_object(row) for row in shown],
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": len(rows) > page.limit,
        }
    )


def not_found(dialect: Dialect, what: str, name: str) -> Response:
    """There is none of that id, or it is another key's."""
    error = HttpError(404, f"no such {what}: {quoted(name)}", "not_found", param="id")
    return error_response(dialect, error)
