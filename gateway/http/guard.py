"""The ASGI layer before all routes: assigns request ids, checks API keys and the Host and Origin
headers, and lets keys take turns.

A web page can make its user's browser send requests to a local server. So a server that is
reachable only from this machine, and has no API keys, refuses a request unless its Host and Origin
headers name this machine or an allowed origin.

One request enters in each pass of the event loop, and keys take turns, so that many requests of one
key do not delay those of another key. Requests for open paths take turns separately.

Invariants: with API keys configured, a request without a valid key reaches only the open paths; a
local server without keys answers no web page of an origin that is not allowed.
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
from pdserve.protos.common_pb2 import UNAUTHENTICATED
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.fairness import FairSemaphore
from pdserve.services.common.tenants import EVERYBODY, ApiKeys, Tenant
from pdserve.services.common.tracing import TraceContext

MAX_NAME = 253  # characters of a host name
API_KEY = "x-api-key"  # used without an Authorization header
SESSION_ID = "x-session-id"
_GOOD_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def is_loopback(host: str) -> bool:
    """Return whether a host name or IP address always means this machine, e.g. localhost or
    127.0.0.1."""
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
    """Return the reason why a local server refuses a request with these headers; empty if the Host
    and Origin headers name this machine, or an allowed origin."""
    if not is_loopback(_host_of(f"//{headers.get('host', '')}")):
        return "this server accepts only requests to localhost; set an API key to allow others"
    origin = headers.get("origin")
    if origin is None or "*" in allowed_origins or origin in allowed_origins:
        return ""
    if is_loopback(_host_of(origin)):
        return ""
    return "web pages of other origins cannot call this server; allow them with --allow-origin"


def _host_of(url: str) -> str:
    """Return the host name in a URL; empty if the URL has none or is invalid."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def authorization_of(headers: Headers) -> str:
    """Return the Authorization header, or its equivalent for the key in API_KEY."""
    return headers.get("authorization") or f"Bearer {headers.get(API_KEY, '')}"


class Guard:
    """ASGI application that checks each request before it passes it to the application `app`.

    `open_paths` need no client's API key: health checks, pages, and routes that check a key of
    their own. `local`: the server is reachable only from this machine, so that
    without keys only web pages of this machine and of `allowed_origins` may call it.
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

        tenant = self._keys.tenant(authorization_of(headers))
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
                route=f"{scope['method']} {scope['path']}",
            )
            scope.setdefault("state", {}).update(caller=caller)
            await self._app(scope, receive, send_with_id)

    def _refusal(self, scope: Scope, headers: Headers, tenant: Tenant | None) -> HttpError | None:
        """Return the error with which the request is refused; None if it may reach its route."""
        if self._local and not self._keys.required:
            reason = foreign(headers, self._allowed_origins)
            return HttpError(403, reason, "forbidden") if reason else None
        if tenant is not None or scope["path"] in self._open_paths:
            return None
        text = (
            "missing or wrong API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        )
        return HttpError.of(ServiceError(UNAUTHENTICATED, text))


def caller_of(request: Request) -> Caller:
    """Return the Caller (tenant, request id and trace) that the Guard has attached to the
    request."""
    caller: Caller = request.state.caller
    return caller
