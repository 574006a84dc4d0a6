"""How much work the gateway takes at once: bounds on open requests and on unanswered ones.

Invariant: a Admission is given back exactly once, when its `with` block ends.
"""

import asyncio
from types import TracebackType

from pdserve.protos.common_pb2 import OVERLOADED, UNAVAILABLE
from pdserve.services.host.errors import ServiceError


class Admission:
    """One request's place: waiting until its first token, then answering, then gone."""

    def __init__(self, limits: "AdmissionLimits") -> None:
        self._limits = limits
        self._waiting = True

    def __enter__(self) -> "Admission":
        self._limits.idle.clear()
        self._limits.open += 1
        self._limits.waiting += 1
        return self

    def answering(self) -> None:
        """It has its first token; may be called again."""
        if self._waiting:
            self._waiting = False
            self._limits.waiting -= 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.answering()
        self._limits.open -= 1
        if not self._limits.open:
            self._limits.idle.set()


class AdmissionLimits:
    """Counts requests: `max_requests` bounds the open ones, `max_unanswered` those of them
    without a token."""

    def __init__(self, max_requests: int, max_unanswered: int) -> None:
        self._max_requests = max_requests
        self._max_unanswered = max_unanswered
        self._closed = False
        self.open = 0
        self.waiting = 0
        self.idle = asyncio.Event()  # no request is open
        self.idle.set()

    def close(self) -> None:
        """Let no more in; `idle` is set when the last one has left."""
        self._closed = True

    def place(self) -> Admission:
        """To be entered at once. Raises ServiceError OVERLOADED, UNAVAILABLE when closed."""
        if self._closed:
            raise ServiceError(UNAVAILABLE, "the server is shutting down", retry_after_s=1.0)
        if self.open >= self._max_requests:
            raise ServiceError(OVERLOADED, "too many requests are open", retry_after_s=1.0)
        if self.waiting >= self._max_unanswered:
            raise ServiceError(OVERLOADED, "too many requests are waiting", retry_after_s=1.0)
        return Admission(self)
