"""The ASGI layer before every route: request ids in and out, API keys, Host and Origin, turns.

One request enters in each pass of the event loop, and keys take turns: otherwise all that a flood
has sent would be computed before another key's requests go on. Open paths take turns separately.

Invariants: with keys set, a request without one reaches only the open routes; a server that only
this machine reaches, without keys, answers no page of another origin.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.gateway.http.dialect import (
    REQUEST_ID,
    Dialect,
    HttpError,
    dialect_of,
    error_response,
)
from pdserve.gateway.http.origin import foreign
from pdserve.gateway.requests.caller import Caller
from pdserve.services.host.tenants.fair_semaphore import FairSemaphore
from pdserve.services.host.tenants.keys import EVERYBODY, ApiKeys, Tenant
from pdserve.services.host.tracing import TraceContext

API_KEY = "x-api-key"  # used without an Authorization header
SESSION_ID = "x-session-id"
_GOOD_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Guard:
    """Wrapper of the application; `open_paths` need no key. `local`: only this machine reaches it,
    so that without keys only `allowed_origins` and this machine's origins may call it."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        open_paths: Collection[str],
        dialects: Sequence[Dialect],
        local: bool,
        allowed_origins: Collection[str],
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._dialects = dialects
        self._local = local
        self._allowed_origins = frozenset(allowed_origins)
        self._entering = FairSemaphore(1)
        self._probing = FairSemaphore(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        received = time.monotonic()
        headers = Headers(scope=scope)
        extra_headers: dict[str, str] = {}
        generated_id = uuid.uuid4().hex
        client_id = headers.get(REQUEST_ID, "")
        if not _GOOD_ID.fullmatch(client_id):
            client_id = ""

        dialect = dialect_of(self._dialects, scope["path"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                outgoing = MutableHeaders(scope=message)
                for name in {REQUEST_ID, dialect.request_id_header}:
                    outgoing[name] = client_id or generated_id
                outgoing.update(extra_headers)
            await send(message)

        shown_key = headers.get("authorization") or f"Bearer {headers.get(API_KEY, '')}"
        tenant = self._keys.tenant(shown_key)
        probe = scope["path"] in self._open_paths  # waits only for other probes
        async with (self._probing if probe else self._entering).turn((tenant or EVERYBODY).id):
            await asyncio.sleep(0)  # lets requests that entered before go on
        if error := self._refusal(scope, headers, tenant):
            error = replace(error, request_id=client_id or generated_id)
            denial = error_response(dialect, error)
            await denial(scope, receive, send_with_id)
            return
        tenant = tenant or EVERYBODY
        with ExitStack() as at_end:
            session = headers.get(SESSION_ID, "")
            caller = Caller(
                generated_id,
                client_id,
                tenant,
                extra_headers,
                at_end,
                session if _GOOD_ID.fullmatch(session) else "",
                header_id=generated_id,
                received=received,
                trace=TraceContext(headers.get("traceparent", ""), headers.get("tracestate", "")),
            )
            scope.setdefault("state", {}).update(caller=caller)
            await self._app(scope, receive, send_with_id)

    def _refusal(self, scope: Scope, headers: Headers, tenant: Tenant | None) -> HttpError | None:
        """Return why the request reaches no route; None if it does."""
        if self._local and not self._keys.required:
            reason = foreign(headers, self._allowed_origins)
            return HttpError(403, reason, "forbidden") if reason else None
        if tenant is not None or scope["path"] in self._open_paths:
            return None
        return HttpError(
            401,
            "missing or wrong API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            "unauthenticated",
            headers={"www-authenticate": "Bearer"},
        )


def caller_of(request: Request) -> Caller:
    """Return the caller of a request that the Guard has let in."""
    caller: Caller = request.state.caller
    return caller
