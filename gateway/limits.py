"""How much work the gateway takes at once: bounds on open requests and on unanswered ones.

Invariant: an admitted request is counted until its `with` block ends, and given back once.
"""

import asyncio
from types import TracebackType

from pdserve.protos.common_pb2 import OVERLOADED, UNAVAILABLE
from pdserve.services.host.errors import ServiceError


class AdmittedRequest:
    """One request within the limits: it waits for its first token, then is answered."""

    def __init__(self, limits: "AdmissionLimits") -> None:
        self._limits = limits
        self._waiting = True

    def __enter__(self) -> "AdmittedRequest":
        self._limits.entered()
        return self

    def first_token(self) -> None:
        """It is no longer without a token; may be called again."""
        if self._waiting:
            self._waiting = False
            self._limits.answered()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.first_token()
        self._limits.left()


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
        """Admit no more; `idle` is set when the last request has ended."""
        self._closed = True

    def admit(self) -> AdmittedRequest:
        """One more request; enter its block at once.

        Raises ServiceError OVERLOADED at a limit, UNAVAILABLE when closed.
        """
        if self._closed:
            raise ServiceError(UNAVAILABLE, "the server is shutting down", retry_after_s=1.0)
        if self.open >= self._max_requests:
            raise ServiceError(OVERLOADED, "too many requests are open", retry_after_s=1.0)
        if self.waiting >= self._max_unanswered:
            raise ServiceError(OVERLOADED, "too many requests are waiting", retry_after_s=1.0)
        return AdmittedRequest(self)

    # called by AdmittedRequest only

    def entered(self) -> None:
        """A request is open, without a token."""
        self.idle.clear()
        self.open += 1
        self.waiting += 1

    def answered(self) -> None:
        """An open request has its first token, or ends without one."""
        self.waiting -= 1

    def left(self) -> None:
        """A request is no longer open."""
        self.open -= 1
        if not self.open:
            self.idle.set()
