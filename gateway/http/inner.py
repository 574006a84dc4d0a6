"""Calls the application from within: same routes, bodies, bounds and errors as for a client.

Requests bypass the Guard: the caller provides their tenant.
"""

import asyncio
import uuid
from contextlib import ExitStack, suppress
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from pdserve.gateway.caller import Caller
from pdserve.services.common.tenants import Tenant


class InnerReply(NamedTuple):
    """A whole response."""

    request_id: str
    status: int
    headers: Headers
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, tenant: Tenant, session: str) -> InnerReply:
    """Return the response to a JSON body; `app` has the routes, without a Guard. The request runs
    in the background (Caller)."""
    request_id = uuid.uuid4().hex
    pending = [body]
    start: Message = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        await asyncio.Event().wait()  # this client never leaves; the waiter is cancelled
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    with ExitStack() as at_end, suppress(Exception):  # the error is answered, and logged, by then
        caller = Caller(request_id, tenant=tenant, at_end=at_end, session=session, background=True)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": None,
            "server": None,
            "state": {"caller": caller},
        }
        await app(scope, receive, send)
    headers = Headers(raw=start.get("headers", []))
    return InnerReply(request_id, start.get("status", 500), headers, b"".join(parts))
