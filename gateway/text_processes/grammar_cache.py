"""Grammars that were compiled, and errors of those that cannot be, by the digest of the structure.

Invariant: what is kept has at most MAX_BYTES; what was asked for last goes last.
"""

from pdserve.gateway.text.errors import TextError

MAX_BYTES = 4 << 20  # of one model
ENTRY_BYTES = 512  # that an entry takes beside its text


class GrammarCache:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._found: dict[bytes, str | TextError] = {}

    def get(self, key: bytes) -> str | TextError | None:
        found = self._found.pop(key, None)
        if found is not None:
            self._found[key] = found
        return found

    def put(self, key: bytes, found: str | TextError) -> None:
        if (known := self._found.pop(key, None)) is not None:
            self._held -= _size(known)
        self._found[key] = found
        self._held += _size(found)
        while self._held > self._max_bytes:
            oldest = next(iter(self._found))
            self._held -= _size(self._found.pop(oldest))


def _size(found: str | TextError) -> int:
    """In bytes; a text may have up to four for each character."""
    return ENTRY_BYTES + (4 * len(found) if isinstance(found, str) else len(str(found)))
