"""Admission limits of the gateway: bounds on open requests and on unanswered ones.

Invariant: an admitted request is counted until its `with` block ends, and released once.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

from pdserve.protos.common_pb2 import OVERLOADED, UNAVAILABLE
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.fairness import FairShare


class AdmittedRequest:
    """One request within the limits: it waits for its first token, then is answered."""

    def __init__(self, limits: "AdmissionLimits", tenant: bytes, background: bool) -> None:
        self._limits = limits
        self._tenant = tenant
        self._background = background
        self._waiting = not background

    def __enter__(self) -> "AdmittedRequest":
        self._limits.entered(self._tenant, self._background)
        return self

    def first_token(self) -> None:
        """Stop counting the request as unanswered; may be called again."""
        if self._waiting:
            self._waiting = False
            self._limits.answered(self._tenant)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.first_token()
        self._limits.left(self._tenant, self._background)


class AdmissionLimits:
    """Counts of requests: `max_requests` bounds the open ones, `max_unanswered` those of them
    without a token. Each tenant has a share of both (fairness.py). Background requests take no
    places; their starter bounds them (gateway/batches/run.py)."""

    def __init__(self, max_requests: int, max_unanswered: int) -> None:
        self.max_requests = max_requests
        self._open = FairShare(max_requests)
        self._waiting = FairShare(max_unanswered)
        self._closed = False
        self.on_change: Callable[[], None] = lambda: None  # called when a count changes
        self.background = 0  # open background requests
        self.idle = asyncio.Event()  # set when no request is open
        self.idle.set()

    @property
    def open(self) -> int:
        return self._open.total

    @property
    def waiting(self) -> int:
        return self._waiting.total

    def close(self) -> None:
        """Admit no more; `idle` is set when the last request has ended."""
        self._closed = True

    def admit(self, tenant: bytes = b"", background: bool = False) -> AdmittedRequest:
        """Admit one more request; enter its block at once.

        Raises ServiceError OVERLOADED at a limit, UNAVAILABLE when closed.
        """
        if self._closed:
            raise ServiceError(UNAVAILABLE, "the server is shutting down", retry_after_s=1.0)
        if background:
            return AdmittedRequest(self, tenant, background)
        if not self._open.has_room(tenant):
            raise ServiceError(OVERLOADED, "too many requests are open", retry_after_s=1.0)
        if not self._waiting.has_room(tenant):
            raise ServiceError(OVERLOADED, "too many requests are waiting", retry_after_s=1.0)
        return AdmittedRequest(self, tenant, background)

    # called by AdmittedRequest only

    def entered(self, tenant: bytes, background: bool) -> None:
        """Count a request that is open, without a token."""
        self.idle.clear()
        if background:
            self.background += 1
        else:
            self._open.take(tenant)
            self._waiting.take(tenant)
        self.on_change()

    def answered(self, tenant: bytes) -> None:
        """Record that an open request has its first token, or ends without one."""
        self._waiting.give_back(tenant)
        self.on_change()

    def left(self, tenant: bytes, background: bool) -> None:
        """Stop counting a request that is no longer open."""
        if background:
            self.background -= 1
        else:
            self._open.give_back(tenant)
        if not self.open and not self.background:
            self.idle.set()
        self.on_change()
