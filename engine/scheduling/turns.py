"""Turn taking of tenants at an engine. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_PASSED = 8  # steps in a row that pass over a waiting tenant before it comes first
ACTIVE_S = 1.0  # a tenant counts as active this long after its last request has ended


def by_priority(
    entries: Sequence[T], tenant: Callable[[T], bytes], priority: Callable[[T], int]
) -> list[T]:
    """Return each tenant's entries in order of priority, stable within one priority. Each tenant
    keeps the places it had, so none gains against another."""
    by_tenant: dict[bytes, list[T]] = {}
    for entry in entries:
        by_tenant.setdefault(tenant(entry), []).append(entry)
    ordered = {
        name: iter(sorted(tenant_entries, key=priority))
        for name, tenant_entries in by_tenant.items()
    }
    return [next(ordered[tenant(entry)]) for entry in entries]


class Turns:
    """Order of tenants with prompts to compute, the one with the fewest computed tokens first.

    A new tenant comes before those of which something has been computed, and behind earlier
    arrivals and those passed over for more than MAX_PASSED steps.
    """

    def __init__(self) -> None:
        self._computed: dict[bytes, int] = {}
        self._passed: Counter[bytes] = Counter()  # steps since its last tokens or its arrival
        self._begun: set[bytes] = set()  # tenants with computed tokens since their arrival
        self._active: dict[bytes, float] = {}  # when each tenant last had a request

    def are_shared(self, tenants: Iterable[bytes], now_s: float) -> bool:
        """Whether several tenants are active; `tenants` are those that have requests now."""
        for tenant in set(tenants):
            self._active[tenant] = now_s
        if len(self._active) > 1:
            oldest = now_s - ACTIVE_S
            self._active = {
                name: active_s for name, active_s in self._active.items() if active_s >= oldest
            }
        return len(self._active) > 1

    def order(self, entries: Sequence[T], tenant: Callable[[T], bytes]) -> Sequence[T]:
        """Return the first entry of each tenant, then the second of each, and so on. With one
        tenant the order does not change."""
        tenants = {tenant(entry) for entry in entries}
        counts = {name: count for name, count in self._computed.items() if name in tenants}
        self._begun &= tenants
        if self._begun:
            start = min(counts[name] for name in self._begun) - 1
        else:
            start = min(counts.values(), default=0)
        self._computed = dict.fromkeys(tenants, start) | counts
        self._passed = Counter({name: self._passed[name] + 1 for name in tenants})
        if len(tenants) < 2:
            return entries
        num_earlier: Counter[bytes] = Counter()
        ranked: list[tuple[int, int, int, T]] = []
        for entry in entries:
            name = tenant(entry)
            overdue = max(0, self._passed[name] - MAX_PASSED)
            ranked.append((num_earlier[name], -overdue, self._computed[name], entry))
            num_earlier[name] += 1
        ranked.sort(key=lambda item: item[:3])
        return [entry for *_, entry in ranked]

    def computed(self, tenant: bytes, tokens: int) -> None:
        """Count prompt tokens of a tenant that a step computes."""
        if tenant in self._computed:
            self._computed[tenant] += tokens
            self._passed[tenant] = 0
            self._begun.add(tenant)
