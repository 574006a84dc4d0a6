"""Tenants take turns at an engine; pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

MOST_PASSED = 8  # steps in a row that compute nothing of a tenant that waits; then it comes first
ACTIVE_S = 1.0  # so long a tenant counts as active after its last request has ended


class Turns:
    """Counts the prompt tokens of each tenant that has some to compute, so that the one with the
    fewest comes first. A tenant that comes anew comes before the others, but behind those that have
    been passed over for more than MOST_PASSED steps."""

    def __init__(self) -> None:
        self._computed: dict[bytes, int] = {}
        self._passed: Counter[bytes] = Counter()  # steps since some of it was computed
        self._active: dict[bytes, float] = {}  # when each tenant last had a request

    def are_shared(self, tenants: Iterable[bytes], now_s: float) -> bool:
        """Whether several tenants are active; `tenants` are those that have requests now."""
        for tenant in set(tenants):
            self._active[tenant] = now_s
        if len(self._active) > 1:
            oldest = now_s - ACTIVE_S
            self._active = {name: at for name, at in self._active.items() if at >= oldest}
        return len(self._active) > 1

    def order(self, entries: Sequence[T], tenant: Callable[[T], bytes]) -> Sequence[T]:
        """The first entry of each tenant, then the second of each, and so on. With one tenant all
        stays as it is."""
        tenants = {tenant(entry) for entry in entries}
        least = min((n for name, n in self._computed.items() if name in tenants), default=0)
        self._computed = {name: self._computed.get(name, least - 1) for name in tenants}
        self._passed = Counter({name: self._passed[name] + 1 for name in tenants})
        if len(tenants) < 2:
            return entries
        before: Counter[bytes] = Counter()
        ranked: list[tuple[int, int, int, T]] = []
        for entry in entries:
            name = tenant(entry)
            overdue = max(0, self._passed[name] - MOST_PASSED)
            ranked.append((before[name], -overdue, self._computed[name], entry))
            before[name] += 1
        ranked.sort(key=lambda found: found[:3])
        return [entry for *_, entry in ranked]

    def computed(self, tenant: bytes, tokens: int) -> None:
        """A step computes so many of its prompt tokens."""
        if tenant in self._computed:
            self._computed[tenant] += tokens
            self._passed[tenant] = 0
