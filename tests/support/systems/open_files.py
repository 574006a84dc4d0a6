"""Which files and sockets this process has open, to find those that are left behind."""

import os
from contextlib import suppress


def open_files() -> set[tuple[str, str]]:
    """Number and target of each; the target of a socket or pipe is its own. Compare by `-`: what an
    earlier test left to the garbage collector may be closed meanwhile."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
