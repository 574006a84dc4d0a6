"""The open files and sockets of this process, to find leaked ones."""

import os
from contextlib import suppress


def open_files() -> set[tuple[str, str]]:
    """Return number and target of each; the target of a socket or pipe is unique. Compare by `-`:
    files that an earlier test left to the garbage collector may be closed meanwhile.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
