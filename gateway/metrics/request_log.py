"""The open requests of this gateway, and those that ended last.

Ownership: only the Service adds and ends requests; readers get snapshots.
"""

from collections import deque
from itertools import islice

from pdserve.gateway.metrics.request_metrics import Meter, MeteredRequest

MAX_ENDED = 1000  # about 1 KB each, at most 8 KB: ids, attempts and finish reasons are bounded
MAX_SHOWN = 200  # on the page, of open requests and of ended requests each


class RequestLog:
    """A bounded log: AdmissionLimits bound the open requests, MAX_ENDED the ended ones. Above
    MAX_ENDED, the oldest ended request of the tenant with the most ended requests is dropped."""

    def __init__(self) -> None:
        self._open: dict[int, Meter] = {}  # in the order of arrival
        self._ended: dict[bytes, deque[MeteredRequest]] = {}  # by tenant; none is empty
        self._num_ended = 0

    def began(self, meter: Meter) -> None:
        """Add an admitted request."""
        self._open[id(meter)] = meter

    def ended(self, meter: Meter) -> None:
        """Move a request with a closed meter to the ended ones; ignores one not admitted."""
        if self._open.pop(id(meter), None) is None:
            return
        self._ended.setdefault(meter.tenant, deque()).append(meter.state())
        self._num_ended += 1
        if self._num_ended > MAX_ENDED:
            tenant, states = max(self._ended.items(), key=lambda item: len(item[1]))
            states.popleft()
            self._num_ended -= 1
            if not states:
                del self._ended[tenant]

    def find(self, tenant: bytes, id_: str) -> MeteredRequest | None:
        """Return the tenant's latest request with this id, or None."""
        for meter in reversed(self._open.values()):  # open requests are later than ended ones
            if meter.tenant == tenant and id_ in meter.ids:
                return meter.state()
        ended = reversed(self._ended.get(tenant, ()))
        return next((state for state in ended if id_ in state.ids), None)

    def open_of(self, tenant: bytes) -> list[MeteredRequest]:
        """Return the open requests of one tenant, oldest first."""
        return [meter.state() for meter in self._open.values() if meter.tenant == tenant]

    def ended_of(self, tenant: bytes) -> list[MeteredRequest]:
        """Return the last MAX_SHOWN ended requests of one tenant, latest first."""
        return list(islice(reversed(self._ended.get(tenant, ())), MAX_SHOWN))
