"""A temporary folder that a process owns while it lives.

A lock on the folder marks its owner as alive; the next process removes the folders of killed
owners.
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
    """Yield a private folder and remove it at the end. Also removes the folders of dead owners."""
    base = parent or Path(tempfile.gettempdir())
    sweep(base)
    path, lock = _locked_folder(base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def run_dirs(base: Path | None = None) -> list[Path]:
    """Return this user's folders, including those of killed owners."""
    paths = []
    for path in sorted((base or Path(tempfile.gettempdir())).glob(PREFIX + "*")):
        with suppress(FileNotFoundError):  # the owner has just ended
            if path.lstat().st_uid == os.getuid() and not path.is_symlink():
                paths.append(path)
    return paths


def _locked_folder(base: Path) -> tuple[Path, int]:
    """Create a folder and lock it; retry if another process sweeps it before it is locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def sweep(base: Path) -> None:
    """Remove this user's folders whose owner has died."""
    for path in base.glob(PREFIX + "*"):
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
