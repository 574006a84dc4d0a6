"""The ASGI layer before every route: request ids in and out, API keys, Host and Origin, turns.

A browser sends requests for any page it shows. On a server that only this machine reaches, and that
needs no key, such a request must not pass as its user's: the names under which a browser knows the
server (Host) and the page (Origin) must be this machine's.

One request enters in each pass of the event loop, and keys take turns: otherwise all that a flood
has sent would be computed before another key's requests go on. Open paths take turns separately.

Invariants: with keys set, a request without one reaches only the open routes; a server that only
this machine reaches, without keys, answers no page of another origin.
"""

import asyncio
import ipaddress
import re
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import REQUEST_ID, HttpApi, HttpError, api_of, error_response
from pdserve.services.common.fairness import FairSemaphore
from pdserve.services.common.tenants import EVERYBODY, ApiKeys, Tenant
from pdserve.services.common.tracing import TraceContext

MAX_NAME = 253  # characters of a host name
API_KEY = "x-api-key"  # used without an Authorization header
SESSION_ID = "x-session-id"
_GOOD_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def is_loopback(host: str) -> bool:
    """Return whether a host name or address always means this machine."""
    return len(host) <= MAX_NAME and _is_loopback(host)


@lru_cache(256)
def _is_loopback(host: str) -> bool:
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def foreign(headers: Headers, allowed_origins: Collection[str]) -> str:
    """Return why a request to a loopback server is refused; empty if it is from this machine or
    from an allowed origin."""
    if not is_loopback(_host_of(f"//{headers.get('host', '')}")):
        return "this server accepts only requests to localhost; set an API key to allow others"
    origin = headers.get("origin")
    if origin is None or "*" in allowed_origins or origin in allowed_origins:
        return ""
    if is_loopback(_host_of(origin)):
        return ""
    return "web pages of other origins cannot call this server; allow them with --allow-origin"


def _host_of(url: str) -> str:
    """Return the host of a URL; empty if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


class Guard:
    """ASGI application that checks a request before it calls another one.

    `open_paths` need no key. `local`: only this machine reaches the server, so that without keys
    only pages of `allowed_origins` and of this machine may call it.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        open_paths: Collection[str],
        apis: Sequence[HttpApi],
        local: bool,
        allowed_origins: Collection[str],
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._apis = apis
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

        api = api_of(self._apis, scope["path"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                outgoing = MutableHeaders(scope=message)
                for name in {REQUEST_ID, api.request_id_header}:
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
            denial = error_response(api, error)
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
