"""An LRU cache of compiled grammars, and of the errors of structures that do not compile, by the
digest of the structure.

Invariant: the cached results take at most `max_bytes`.
"""

import math

from pdserve.text.errors import TextError

MAX_BYTES = 4 << 20  # of one model
ENTRY_BYTES = 512  # overhead of an entry beyond its text


class StructureCache:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: dict[bytes, tuple[str | TextError, float]] = {}  # with the expiry time

    def get(self, key: bytes, now_s: float) -> str | TextError | None:
        entry = self._drop(key)
        if entry is None or entry[1] <= now_s:
            return None
        self.put(key, *entry)
        return entry[0]

    def put(self, key: bytes, result: str | TextError, until_s: float = math.inf) -> None:
        """Store a grammar or an error under a digest until the time `until_s`; remove the least
        recently used results while all together exceed `max_bytes`."""
        self._drop(key)
        self._entries[key] = result, until_s
        self._num_bytes += _size(result)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> tuple[str | TextError, float] | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_bytes -= _size(entry[0])
        return entry


def _size(result: str | TextError) -> int:
    """Return an upper bound of a result's size in bytes: a character may take four."""
    return ENTRY_BYTES + (4 * len(result) if isinstance(result, str) else len(str(result)))
