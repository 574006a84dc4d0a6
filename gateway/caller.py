"""The Caller of a request: its tenant and its ids."""

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from pdserve.services.common.tenants import EVERYBODY, Tenant
from pdserve.services.common.tracing import NOWHERE, TraceContext

MAX_SESSION = 128  # characters of a session, under which usage is counted


class Acceptance:
    """When a request's prompt was accepted, by time.monotonic; None: not yet."""

    at: float | None = None

    def note(self) -> None:
        self.at = monotonic()


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a request.

    `route` is the method and path over HTTP, or the gRPC method.
    `request_id` names it everywhere, `client_id` is the client's name for it, if any. Its usage is
    counted under `session`; `background`: no client waits for it. `headers` are added to the
    response, `at_end` runs when it is complete. `header_id` is the id in the response's head if the
    client sends none, `received` is when the request's head had come (by time.monotonic), `trace`
    is the client's span that it belongs to.
    """

    request_id: str
    client_id: str = ""
    tenant: Tenant = EVERYBODY
    headers: dict[str, str] = field(default_factory=dict, compare=False)
    at_end: ExitStack = field(default_factory=ExitStack, compare=False)
    session: str = ""
    background: bool = False
    header_id: str = ""
    received: float | None = None
    trace: TraceContext = NOWHERE
    route: str = "-"
    acceptance: Acceptance = field(default_factory=Acceptance, compare=False)

    def of_body(self, request_id: str, session_id: str | None, user: Any) -> "Caller":
        """Return the caller of a body that has its own id. The body's session takes precedence over
        the header's; its user, if it is a text, is used without either. A batch keeps its session,
        whatever its lines say.
        """
        session = self.session
        if not self.background:
            session = session_id or session or (_of_user(user) if isinstance(user, str) else "")
        return replace(self, request_id=request_id, session=session)

    @property
    def ids(self) -> tuple[str, ...]:
        """Return all ids by which the client may know the request."""
        ids = (self.client_id, self.header_id, self.request_id)
        return tuple(dict.fromkeys(id for id in ids if id))

    @property
    def shown_id(self) -> str:
        """Return the id in the response."""
        return self.client_id or self.request_id


def _of_user(user: str) -> str:
    """Return the session of a user, hashed if long: it is not a session field, and clients may put
    several ids in it."""
    if len(user) <= MAX_SESSION:
        return user
    return f"sha256:{hashlib.sha256(user.encode()).hexdigest()}"
