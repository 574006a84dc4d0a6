"""Which chains the attempts of this router bring to a decode worker; pure.

From its Admit on the KV of an attempt's prompt is there or on its way, and prefix events tell of it
only later. Workers decide by what they know themselves: this only says where to ask first.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence


class PromisedChains:
    """Chain hashes by worker, counted over the live attempts."""

    def __init__(self) -> None:
        self._counts: dict[bytes, Counter[bytes]] = {}  # by boot of the worker
        self._boots: dict[bytes, set[bytes]] = {}  # by the first link of what comes there
        self._attempts: dict[bytes, tuple[bytes, Sequence[bytes]]] = {}

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._attempts)

    def add(self, attempt: bytes, boot: bytes, chain: Sequence[bytes]) -> None:
        """An attempt began there; `chain`: of its prompt's full blocks."""
        self._attempts[attempt] = boot, chain
        self._counts.setdefault(boot, Counter()).update(chain)
        if chain:
            self._boots.setdefault(chain[0], set()).add(boot)

    def drop(self, attempt: bytes) -> None:
        """It is over; no effect if it never began."""
        boot, chain = self._attempts.pop(attempt, (b"", ()))
        counts = self._counts.get(boot)
        if counts is None:
            return
        for link in chain:
            counts[link] -= 1
            if not counts[link]:
                del counts[link]
        if chain and chain[0] not in counts:
            self._boots[chain[0]].discard(boot)
            if not self._boots[chain[0]]:
                del self._boots[chain[0]]
        if not counts:
            del self._counts[boot]

    def num_promised(self, chain: Sequence[bytes]) -> dict[bytes, int]:
        """How many leading blocks of a chain are promised, by the boot of each worker where any
        is."""
        found = {}
        for boot in self._boots.get(chain[0], ()) if chain else ():
            counts = self._counts[boot]
            # A link is promised with all those before it: those that are come first.
            found[boot] = bisect_left(chain, True, key=lambda link: link not in counts)
        return found
