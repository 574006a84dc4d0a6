"""Decode's windows on its device, and who may still write into each.

Ownership: a window is spare, lent to one writer (a process), or left by a writer that may still
write, since it is frozen or its copies are on their way. A left window is lent again to the same
process, whose late writes can only spoil its own frames, or to anybody once that process has
exited. Memory is never freed before `close`.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.engine.transport.device import HANDLE_BYTES, CopyStream, Memory, Slot


class Writer(Protocol):
    """A process that has a window open."""

    pid: int

    def exited(self) -> bool: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class DeviceWindow:
    memory: Memory
    slots: list[Slot] = field(repr=False)
    stream: CopyStream

    def handles(self) -> bytes:
        """What prefill opens: the memory, then a signal for each slot."""
        return self.memory.handle() + b"".join(slot.signal.handle() for slot in self.slots)

    def close(self) -> None:
        for slot in self.slots:
            slot.signal.close()
        self.stream.close()
        self.memory.close()


def handles_bytes(num_slots: int) -> int:
    return HANDLE_BYTES * (1 + num_slots)


class DeviceWindows:
    """Thread-safe. `make` allocates; what it raises passes through."""

    def __init__(self, make: Callable[[], DeviceWindow]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._spare: list[DeviceWindow] = []
        self._left: list[tuple[DeviceWindow, Writer]] = []
        self._closed = False

    def prepare(self) -> None:
        """A window is there for the next writer."""
        with self._lock:
            if not self._closed and not self._spare and not self._reclaim():
                self._spare.append(self._make())

    def take(self, writer: Writer) -> DeviceWindow:
        with self._lock:
            for at, (window, other) in enumerate(self._left):
                if other.pid == writer.pid and not other.exited():
                    del self._left[at]
                    other.close()
                    return window
            if not self._spare and not self._reclaim():
                self._spare.append(self._make())
            return self._spare.pop()

    def give_back(self, window: DeviceWindow, writer: Writer) -> None:
        """Its connection has ended; the writer may not have."""
        with self._lock:
            if not self._closed:
                self._left.append((window, writer))
                return
        writer.close()
        window.close()

    def close(self) -> None:
        """Free what is not lent; the rest as it comes back."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, []
            left, self._left = self._left, []
        for window in spare:
            window.close()
        for window, writer in left:
            writer.close()
            window.close()

    def _reclaim(self) -> bool:
        """Windows whose writer has exited are spare again; whether there is one now."""
        kept = []
        for window, writer in self._left:
            if writer.exited():
                writer.close()
                self._spare.append(window)
            else:
                kept.append((window, writer))
        self._left = kept
        return bool(self._spare)
