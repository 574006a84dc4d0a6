"""The routes of /v1/responses, for new and for kept responses."""

import re
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic_core import from_json, to_json
from starlette.responses import JSONResponse

from pdserve.gateway.http import (
    BodyReader,
    ErrorShape,
    EventStream,
    HttpError,
    HttpLimits,
    Reply,
    caller_of,
    described,
    error_response,
)
from pdserve.gateway.openai.responses.prompt import count_input_tokens
from pdserve.gateway.openai.responses.reply import ResponseReply
from pdserve.gateway.openai.responses.request_model import (
    InputTokensBody,
    ResponsesBody,
    parse_input_tokens,
    parse_responses,
)
from pdserve.gateway.openai.responses.response_models import (
    InputItemList,
    InputItemsQuery,
    InputTokens,
    ResponseDeleted,
    ResponseEvent,
    ResponseObject,
)
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service
from pdserve.gateway.storage import KeptResponse, ResponseStore
from pdserve.services.common.errors import quoted

PAGE = 20  # items, unless the client sets a limit
MAX_PAGE = 100


def add_response_routes(
    app: FastAPI,
    errors: ErrorShape,
    service: Service,
    bodies: BodyReader,
    limits: HttpLimits,
    store: ResponseStore | None,
) -> None:
    """Mount the routes; without a store no response is kept or found."""

    async def on_kept(
        request: Request, name: str, answer: Callable[[KeptResponse], Response]
    ) -> Response:
        """Return what `answer` makes of a kept response, within the limits of its tenant."""
        caller = caller_of(request)
        with service.limits.admit(caller.tenant.id):
            await service.count(caller)
            response = None if store is None else await store.find(caller.tenant.id, name)
        if response is None:
            message = f"response {quoted(name)} was not found"
            return error_response(errors, HttpError(404, message, "response_not_found"))
        return answer(response)

    @app.post(
        "/v1/responses", **described(ResponsesBody, answer=ResponseObject, event=ResponseEvent)
    )
    async def create(request: Request) -> Response:
        """Generate a response to a conversation; the server may store it."""
        body = await bodies.read(request, parse_responses)
        reply = ResponseReply(service, body, caller_of(request), bodies, store)
        if body.stream:
            return EventStream(reply.framed(), reply, limits, ping=reply.ping)
        return Reply(reply.whole(), errors)

    @app.post("/v1/responses/input_tokens", **described(InputTokensBody, answer=InputTokens))
    async def input_tokens(request: Request) -> Response:
        """Count the tokens of a response's prompt."""
        body = await bodies.read(request, parse_input_tokens)
        counting = count_input_tokens(service, body, caller_of(request), bodies, store)
        return Reply(counting, errors)

    @app.get("/v1/responses/{name}", **described(answer=ResponseObject))
    async def retrieve(request: Request, name: str) -> Response:
        """Get a stored response."""
        if request.query_params.get("stream") == "true":
            raise refuse("stream", "stream: a stored response cannot be streamed")
        return await on_kept(request, name, lambda response: _json(response.response))

    @app.delete("/v1/responses/{name}", **described(answer=ResponseDeleted))
    async def remove(request: Request, name: str) -> Response:
        """Delete a stored response."""
        deleted = {"id": name, "object": "response", "deleted": True}
        reply = await on_kept(request, name, lambda response: JSONResponse(deleted))
        if store is not None and reply.status_code == 200:
            await store.remove(caller_of(request).tenant.id, name)
        return reply

    @app.post("/v1/responses/{name}/cancel", **described(answer=ResponseObject))
    async def cancel(request: Request, name: str) -> Response:
        """Cancel a background response. Always fails, as there are no background responses."""

        def too_late(response: KeptResponse) -> Response:
            raise refuse(
                "", "only background responses can be canceled, and this response is not one"
            )

        return await on_kept(request, name, too_late)

    @app.get(
        "/v1/responses/{name}/input_items",
        **described(answer=InputItemList, query=InputItemsQuery),
    )
    async def input_items(request: Request, name: str) -> Response:
        """List the input items of a stored response."""
        page = _page_of(request)
        return await on_kept(request, name, lambda response: _json(to_json(page(response))))


def _json(text: str | bytes) -> Response:
    return Response(text, media_type="application/json")


def _page_of(request: Request) -> Callable[[KeptResponse], dict[str, Any]]:
    """Return the maker of a page with `limit`, `order` and `after`. Raises ServiceError."""
    query = request.query_params
    limit, order, after = (
        query.get("limit", str(PAGE)),
        query.get("order", "desc"),
        query.get("after"),
    )
    if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_PAGE:
        raise refuse("limit", f"limit must be from 1 to {MAX_PAGE}")
    if order not in ("asc", "desc"):
        raise refuse("order", "order must be 'asc' or 'desc'")

    def page(response: KeptResponse) -> dict[str, Any]:
        items = from_json(response.items)
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise refuse("after", f"after: no item has the id {quoted(after)}")
        # Start after the last item with that id: a client may have used one twice.
        start = 0 if after is None else len(ids) - ids[::-1].index(after)
        data = items[start : start + int(limit)]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": start + len(data) < len(items),
        }

    return page
