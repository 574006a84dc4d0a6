"""Block chains that the attempts of this router bring to decode workers; pure.

From its Admit on, the KV of an attempt's prompt is at the worker or on its way, but prefix events
report it only later. Workers decide by their own knowledge: this only says which to try first.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence


class PromisedChains:
    """Chain hashes by worker, counted over the live attempts."""

    def __init__(self) -> None:
        self._counts: dict[bytes, Counter[bytes]] = {}  # by boot id of the worker
        self._boots: dict[bytes, set[bytes]] = {}  # of workers, by the first link of a chain
        self._attempts: dict[bytes, tuple[bytes, Sequence[bytes]]] = {}

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._attempts)

    def add(self, attempt: bytes, boot: bytes, chain: Sequence[bytes]) -> None:
        """Add an attempt that began at a worker. `chain`: hashes of its prompt's full blocks."""
        self._attempts[attempt] = boot, chain
        self._counts.setdefault(boot, Counter()).update(chain)
        if chain:
            self._boots.setdefault(chain[0], set()).add(boot)

    def drop(self, attempt: bytes) -> None:
        """Drop an attempt that is over; no effect if it is not present."""
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
        """Return the number of leading blocks of a chain that are promised, by boot id of each
        worker with any."""
        num_blocks = {}
        for boot in self._boots.get(chain[0], ()) if chain else ():
            counts = self._counts[boot]
            # A link is promised with all links before it, so the promised ones come first.
            num_blocks[boot] = bisect_left(chain, True, key=lambda link: link not in counts)
        return num_blocks
