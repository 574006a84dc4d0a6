"""The requests that are open in this gateway, and those that ended last.

Ownership: the Service alone adds and ends requests; whoever reads gets copies.
"""

from collections import deque
from itertools import islice

from pdserve.gateway.observability.meter import Meter, MeteredRequest

MAX_ENDED = 1000  # about 1 KB each, at most 8: ids, attempts and finish reasons are bounded
MAX_SHOWN = 200  # on the page, of those that are open and of those that have ended


class RequestLog:
    """Bounded: open requests by the AdmissionLimits, ended ones by MAX_ENDED. Beyond it the tenant
    that has most of these loses its oldest."""

    def __init__(self) -> None:
        self._open: dict[int, Meter] = {}  # in the order of arrival
        self._ended: dict[bytes, deque[MeteredRequest]] = {}  # by tenant; none is empty
        self._num_ended = 0

    def began(self, meter: Meter) -> None:
        """A request was admitted."""
        self._open[id(meter)] = meter

    def ended(self, meter: Meter) -> None:
        """Its meter is closed. One that was not admitted is ignored."""
        if self._open.pop(id(meter), None) is None:
            return
        self._ended.setdefault(meter.tenant, deque()).append(meter.state())
        self._num_ended += 1
        if self._num_ended > MAX_ENDED:
            most, states = max(self._ended.items(), key=lambda item: len(item[1]))
            states.popleft()
            self._num_ended -= 1
            if not states:
                del self._ended[most]

    def find(self, tenant: bytes, id_: str) -> MeteredRequest | None:
        """The tenant's latest request with one of its ids."""
        for meter in reversed(self._open.values()):  # one that is open came last
            if meter.tenant == tenant and id_ in meter.ids:
                return meter.state()
        mine = reversed(self._ended.get(tenant, ()))
        return next((state for state in mine if id_ in state.ids), None)

    def open_of(self, tenant: bytes) -> list[MeteredRequest]:
        """The open requests of one tenant, oldest first."""
        return [meter.state() for meter in self._open.values() if meter.tenant == tenant]

    def ended_of(self, tenant: bytes) -> list[MeteredRequest]:
        """The last MAX_SHOWN of those that were the tenant's, latest first."""
        return list(islice(reversed(self._ended.get(tenant, ())), MAX_SHOWN))
