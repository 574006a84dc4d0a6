"""API keys of clients: hashed once at start, compared in constant time.

Invariant: with keys set, no other key is accepted; the keys themselves are not kept.
"""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

_BEARER = "bearer "


class ApiKeys:
    """A set of keys; without any, every request is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Raises ValueError for an empty key."""
        wanted = tuple(keys)
        if not all(wanted):
            raise ValueError("an API key must not be empty")
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in wanted]

    @property
    def required(self) -> bool:
        return bool(self._hashes)

    def admits(self, authorization: str) -> bool:
        """Whether an Authorization header ("Bearer KEY") carries a key; True if none is set."""
        if not self._hashes:
            return True
        given = authorization.strip()
        key = given[len(_BEARER) :].strip() if given[: len(_BEARER)].lower() == _BEARER else ""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        return any(matches)


def read_key_file(path: str) -> tuple[str, ...]:
    """Keys of a file, one a line; blank lines and lines that begin with # are skipped.

    Raises OSError; ValueError if it has none, since everybody would be accepted then.
    """
    lines = (line.strip() for line in Path(path).read_text("utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path} has no API key")
    return keys
