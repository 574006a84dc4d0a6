"""Detects changes of files while a process runs: keys, certificates."""

import os

LOOK_AGAIN_S = 2.0  # between two checks of a file


def stamp(path: str) -> tuple[int, int, int]:
    """A value that changes with the file; zeros if the file is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino
