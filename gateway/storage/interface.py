"""The parts of the storage that work without SQLAlchemy, which is slow to import: checks of the
database URL and of texts from clients, and the interface of the store of /v1/responses.

PostgreSQL rejects texts with a NUL character and SQLite accepts them; the checks here reject them
for both.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.common.errors import ServiceError

DRIVERS = {"sqlite": "aiosqlite", "postgresql": "asyncpg", "postgres": "asyncpg"}
INSTALLS = {"aiosqlite": "pip install aiosqlite", "asyncpg": "pip install 'pdserve[postgres]'"}


def check_url(url: str) -> None:
    """Check a database URL without connecting. Raises ValueError if its scheme is not supported or
    the driver's package is missing, OSError if SQLite's file would be in a folder that is not
    writable."""
    scheme, separator, rest = url.partition("://")
    backend = scheme.partition("+")[0]
    if not separator or backend not in DRIVERS:
        raise ValueError("--database-url must begin with sqlite:/// or postgresql://")
    driver = DRIVERS[backend]
    if find_spec(driver) is None:
        raise ValueError(f"--database-url: {backend} needs {driver}: {INSTALLS[driver]}")
    if backend == "sqlite":
        check_folder(rest.partition("?")[0].removeprefix("/"))


def check_folder(path: str) -> None:
    """Check that the folder of SQLite's file `path` is writable. Raises OSError if not."""
    if path in ("", ":memory:"):
        return
    folder = Path(path).absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"--database-url: {folder} is not a writable folder")


_NUL = "\0"


def may_be_id(text: str, max_len: int) -> bool:
    """Return whether a text from a client can be the id of a row: at most `max_len` characters,
    none NUL."""
    return len(text) <= max_len and _NUL not in text


def check_text(text: str, param: str) -> None:
    """Check that a text has no NUL character. Raises ServiceError INVALID_ARGUMENT, which names the
    request parameter `param`."""
    if _NUL in text:
        raise ServiceError(INVALID_ARGUMENT, f"{param}: a NUL character is not allowed", param)


def without_nul(text: str) -> str:
    """Return the text with its NUL characters removed."""
    return text.replace(_NUL, "")


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A stored response of /v1/responses: the response object, and the list of all input items that
    it answers, each as JSON text."""

    id: str
    response: str
    items: str

    @property
    def num_bytes(self) -> int:
        return len(self.response.encode()) + len(self.items.encode())


class ResponseStore(Protocol):
    """Stores responses of /v1/responses for a limited time, separately for each tenant. Methods
    raise ServiceError UNAVAILABLE if the store cannot be reached."""

    async def save(self, tenant: bytes, record: KeptResponse) -> bool:
        """Store a response of a tenant; return False, without storing it, if it is too large."""
        ...

    async def find(self, tenant: bytes, name: str) -> KeptResponse | None: ...

    async def remove(self, tenant: bytes, name: str) -> bool:
        """Delete a response of a tenant; return whether it existed."""
        ...
