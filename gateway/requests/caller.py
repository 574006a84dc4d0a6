"""A Caller says whose a request is, and which ids it has."""

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from pdserve.services.host.tenants.keys import EVERYBODY, Tenant
from pdserve.services.host.tracing import NOWHERE, TraceContext

MAX_SESSION = 128  # characters of what usage is counted under


class Acceptance:
    """When the prompt of a request was accepted, by time.monotonic; None: it is not yet."""

    at: float | None = None

    def note(self) -> None:
        self.at = monotonic()


@dataclass(frozen=True, slots=True)
class Caller:
    """`request_id` names a request everywhere, `client_id` is what its client calls it, if it
    does. `session` is what its usage is counted under, `background` says that nobody waits for it.
    `headers` are added to the response, `at_end` is run when it is complete. `header_id` is the id
    that the response's head has without a client's, `received` when the request's head had come (a
    reading of time.monotonic), `trace` the span of the client that it belongs to."""

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
    acceptance: Acceptance = field(default_factory=Acceptance, compare=False)

    def of_body(self, request_id: str, session_id: str | None, user: Any) -> "Caller":
        """The caller of a body, which has an id of its own: its session counts before that of the
        header, and its user where there is none, if it is a text. That of a batch is the batch,
        whatever its lines say."""
        session = self.session
        if not self.background:
            session = session_id or session or (_of_user(user) if isinstance(user, str) else "")
        return replace(self, request_id=request_id, session=session)

    @property
    def ids(self) -> tuple[str, ...]:
        """All by which its client may know it."""
        every = (self.client_id, self.header_id, self.request_id)
        return tuple(dict.fromkeys(one for one in every if one))

    @property
    def shown_id(self) -> str:
        """The id that the response has."""
        return self.client_id or self.request_id


def _of_user(user: str) -> str:
    """A long one by its hash: it is no field of sessions, and clients may put several ids in it."""
    if len(user) <= MAX_SESSION:
        return user
    return f"sha256:{hashlib.sha256(user.encode()).hexdigest()}"
