"""Tenants take turns at an engine; pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

ACTIVE_S = 1.0  # so long a tenant counts as active after its last request has ended


class Turns:
    """Counts the prompt tokens of each tenant that has some to compute, so that the one with the
    fewest comes first. A tenant that comes anew comes before the others."""

    def __init__(self) -> None:
        self._computed: dict[bytes, int] = {}
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
        if len(tenants) < 2:
            return entries
        before: Counter[bytes] = Counter()
        ranked: list[tuple[int, int, T]] = []
        for entry in entries:
            name = tenant(entry)
            ranked.append((before[name], self._computed[name], entry))
            before[name] += 1
        ranked.sort(key=lambda found: found[:2])
        return [entry for _, _, entry in ranked]

    def computed(self, tenant: bytes, tokens: int) -> None:
        """A step computes so many of its prompt tokens."""
        if tenant in self._computed:
            self._computed[tenant] += tokens
