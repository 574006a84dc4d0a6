"""The parts of the storage that need no SQLAlchemy, which is slow to import: checks of a database's
URL and of clients' texts, and the interface with which /v1/responses stores and finds responses.

PostgreSQL rejects texts with a NUL character, SQLite does not; the checks refuse it for both.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.common.errors import ServiceError

DRIVERS = {"sqlite": "aiosqlite", "postgresql": "asyncpg", "postgres": "asyncpg"}


def check_url(url: str) -> None:
    """Raises ValueError if the URL's database cannot be used, OSError if its file could not be
    written."""
    scheme, separator, rest = url.partition("://")
    backend = scheme.partition("+")[0]
    if not separator or backend not in DRIVERS:
        raise ValueError("--database-url must begin with sqlite:/// or postgresql://")
    if find_spec(DRIVERS[backend]) is None:
        raise ValueError(f"--database-url: {backend} needs the package {DRIVERS[backend]}")
    if backend == "sqlite":
        check_folder(rest.partition("?")[0].removeprefix("/"))


def check_folder(path: str) -> None:
    """Raises OSError if the file's folder is not writable."""
    if path in ("", ":memory:"):
        return
    folder = Path(path).absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"--database-url: {folder} is not a writable folder")


_NUL = "\0"


def may_be_id(text: str, max_len: int) -> bool:
    """Whether a row can have this id, of at most `max_len` characters."""
    return len(text) <= max_len and _NUL not in text


def check_text(text: str, param: str) -> None:
    """Raises ServiceError, naming the parameter, if a text has a NUL character."""
    if _NUL in text:
        raise ServiceError(INVALID_ARGUMENT, f"{param}: a NUL character is not allowed", param)


def without_nul(text: str) -> str:
    """The text without its NUL characters."""
    return text.replace(_NUL, "")


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response object, and the list of all items that it responds to; both are JSON texts."""

    id: str
    response: str
    items: str

    @property
    def num_bytes(self) -> int:
        return len(self.response.encode()) + len(self.items.encode())


class ResponseStore(Protocol):
    """Keeps responses for a while, separately for each tenant. Raises ServiceError UNAVAILABLE if
    the store cannot be reached."""

    async def save(self, tenant: bytes, record: KeptResponse) -> bool:
        """Store a response; False if it is too large."""
        ...

    async def find(self, tenant: bytes, name: str) -> KeptResponse | None: ...

    async def remove(self, tenant: bytes, name: str) -> bool:
        """Remove a response; return whether it existed."""
        ...
