"""Files that may change while a process runs: keys, certificates."""

import os

LOOK_AGAIN_S = 2.0  # between two looks at a file


def stamp(path: str) -> tuple[int, int, int]:
    """Differs after a change of the file; of a missing one it is zeros."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino
