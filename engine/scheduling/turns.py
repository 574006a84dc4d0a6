"""Tenants take turns at computing prompts; pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """Counts the prompt tokens of each tenant that has some to compute, so that the one with the
    fewest comes first. A tenant that comes anew begins with as many as the least of the others."""

    def __init__(self) -> None:
        self._computed: dict[bytes, int] = {}

    def order(self, entries: Sequence[T], tenant: Callable[[T], bytes]) -> Sequence[T]:
        """The first entry of each tenant, then the second of each, and so on. With one tenant all
        stays as it is."""
        tenants = {tenant(entry) for entry in entries}
        if len(tenants) < 2:
            self._computed.clear()
            return entries
        least = min((n for name, n in self._computed.items() if name in tenants), default=0)
        self._computed = {name: self._computed.get(name, least) for name in tenants}
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
