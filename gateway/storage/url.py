"""Checks the URL of a database before SQLAlchemy, which is slow to import."""

import os
from importlib.util import find_spec
from pathlib import Path

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
