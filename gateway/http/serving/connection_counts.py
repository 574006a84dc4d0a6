"""Connection counts of several gateway processes that accept from one socket.

The process with the fewest connections accepts the next one, so that even a few long connections
are spread. The counts are in memory shared through a file; each process writes only its own.
"""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

UNREADY = 1 << 20  # more than a process can hold: the others go first
_ITEM_BYTES = 4


class ConnectionCounts:
    """The counts as process `index` of `num` uses them; it is unready at first. Raises OSError."""

    def __init__(self, path: Path, index: int, num: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(file, num * _ITEM_BYTES)  # keeps what the others have written
            self._all = memoryview(mmap.mmap(file, num * _ITEM_BYTES)).cast("i")
        finally:
            os.close(file)
        self._index = index
        self._all[index] = UNREADY

    def set_ready(self) -> None:
        """Let the process accept connections from now on."""
        self._all[self._index] -= UNREADY

    def set_unready(self) -> None:
        """Let the process accept no more, although it still holds some."""
        self._all[self._index] += UNREADY

    def add(self, num: int) -> None:
        """Add `num` connections; `num` may be negative."""
        self._all[self._index] += num

    def fewer(self) -> dict[int, int]:
        """Return the counts of the processes with fewer connections than this one, by index."""
        own = self._all[self._index]
        return {index: count for index, count in enumerate(self._all) if count < own}

    def have_changed(self, counts: Mapping[int, int]) -> bool:
        """Return whether any of these processes has another count now, which shows that it is
        alive. `counts`: earlier counts by index."""
        return any(self._all[index] != count for index, count in counts.items())
