"""The ASGI layer before every route: request ids in and out, and API keys.

Invariant: with keys set, a request without one reaches no route but the open ones.
"""

import re
import uuid
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.gateway.http.dialect import Dialect, HttpError, dialect_of, error_response
from pdserve.gateway.keys import ApiKeys

REQUEST_ID = "x-request-id"
_GOOD_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Guard:
    """Wraps the application; `open_paths` need no key."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        open_paths: Collection[str],
        dialects: Sequence[Dialect],
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        own_id = uuid.uuid4().hex
        client_id = headers.get(REQUEST_ID, "")
        if not _GOOD_ID.fullmatch(client_id):
            client_id = ""
        scope.setdefault("state", {}).update(request_id=own_id, client_id=client_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = client_id or own_id
            await send(message)

        if scope["path"] not in self._open_paths and not self._keys.admits(
            headers.get("authorization", "")
        ):
            error = HttpError(
                401,
                "missing or wrong API key: send it as 'Authorization: Bearer KEY'",
                "unauthenticated",
                headers={"www-authenticate": "Bearer"},
            )
            denial = error_response(dialect_of(self._dialects, scope["path"]), error)
            await denial(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)
