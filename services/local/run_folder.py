"""A temporary folder that a process owns while it lives.

A lock on the folder says that its owner is alive; what a killed owner left behind is removed by the
next one.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "pdserve-up-"
CONFIG_FILE = "config.yaml"  # the options in force, without secrets


@contextmanager
def run_dir(parent: Path | None = None) -> Iterator[Path]:
    """Yields a private folder and removes it at the end."""
    base = parent or Path(tempfile.gettempdir())
    sweep(base)
    path, lock = _locked_folder(base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def run_dirs(base: Path | None = None) -> list[Path]:
    """This user's folders, also those that a killed owner has left."""
    own = []
    for path in sorted((base or Path(tempfile.gettempdir())).glob(PREFIX + "*")):
        with suppress(FileNotFoundError):  # its owner has just ended
            if path.lstat().st_uid == os.getuid() and not path.is_symlink():
                own.append(path)
    return own


def _locked_folder(base: Path) -> tuple[Path, int]:
    """A new folder and its lock. Before it is locked another process may sweep it away."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def sweep(base: Path) -> None:
    """Removes this user's folders whose owner has died."""
    for path in base.glob(PREFIX + "*"):
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
