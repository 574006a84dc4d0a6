"""Decode's windows of device memory, and which prefill processes may still write into each.

Ownership: a window is spare, lent to one writer (a prefill process), or abandoned while former
writers may still write into it, since they are frozen or their copies are in flight. An abandoned
window is lent again to the same process, whose late writes can only spoil its own frames, or to any
process once all its writers have reported that they closed it or have exited. Windows are freed
only at `close`; a window that another process still has open is not freed before this process ends.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.engine.transport.device import HANDLE_BYTES, CopyStream, Memory, Slot

log = logging.getLogger(__name__)

CLOSE_S = 2.0  # total wait for writers that close their windows when their connections end
_POLL_S = 0.005


class Writer(Protocol):
    """A prefill process that has a window open."""

    pid: int

    def gone(self) -> bool:
        """Return whether the process has reported that it closed the window, or has exited."""

    def close(self) -> None: ...


@dataclass(slots=True)
class DeviceWindow:
    memory: Memory
    slots: list[Slot] = field(repr=False)
    stream: CopyStream
    writers: list[Writer] = field(default_factory=list)  # may have it open; newest last

    def handles(self) -> bytes:
        """Return the data with which prefill opens the window: the handle of its memory, then one
        signal handle per slot."""
        return self.memory.handle() + b"".join(slot.signal.handle() for slot in self.slots)

    def is_unused(self) -> bool:
        """Forget writers that have closed the window or exited; return whether no process has it
        open."""
        for writer in [writer for writer in self.writers if writer.gone()]:
            self.writers.remove(writer)
            writer.close()
        return not self.writers

    def close(self) -> None:
        for slot in self.slots:
            slot.signal.close()
        self.stream.close()
        self.memory.close()


def handles_bytes(num_slots: int) -> int:
    return HANDLE_BYTES * (1 + num_slots)


class DeviceWindows:
    """Lends windows of device memory to prefill processes; thread-safe. `make` allocates one; what
    it raises is passed on."""

    def __init__(self, make: Callable[[], DeviceWindow]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._spare: list[DeviceWindow] = []
        self._abandoned: list[DeviceWindow] = []
        self._end: float | None = None  # once closed: deadline of the wait for writers

    def prepare(self) -> None:
        """Ensure that a window is ready to be lent, and allocate one if needed."""
        with self._lock:
            if self._end is None and not self._spare and not self._reclaim():
                self._spare.append(self._make())

    def take(self, writer: Writer) -> DeviceWindow:
        with self._lock:
            if not self._reclaim():
                same_process = [
                    window for window in self._abandoned if window.writers[-1].pid == writer.pid
                ]
                if same_process:
                    self._abandoned.remove(same_process[0])
                self._spare.append(same_process[0] if same_process else self._make())
            window = self._spare.pop()
            window.writers.append(writer)
            return window

    def give_back(self, window: DeviceWindow) -> None:
        """Take back a window whose connection has ended. Its writer may still write into it, so
        another process gets it, or it is freed, only when no process has it open."""
        with self._lock:
            if self._end is None:
                self._abandoned.append(window)
                return
        self._free(window)

    def close(self) -> None:
        """Free the windows that are not lent, and each of the others when it is given back."""
        with self._lock:
            self._end = time.monotonic() + CLOSE_S
            windows = self._spare + self._abandoned
            self._spare, self._abandoned = [], []
        for window in windows:
            self._free(window)

    def _free(self, window: DeviceWindow) -> None:
        while not window.is_unused():
            if self._end is None or time.monotonic() > self._end:
                pids = [writer.pid for writer in window.writers]
                log.warning(
                    "processes %s still have a window open; "
                    "its memory stays allocated until this process ends",
                    pids,
                )
                for writer in window.writers:
                    writer.close()
                return
            time.sleep(_POLL_S)
        window.close()

    def _reclaim(self) -> bool:
        """Make abandoned windows that no process has open spare again; return whether a spare
        window exists."""
        free = [window for window in self._abandoned if window.is_unused()]
        self._abandoned = [window for window in self._abandoned if window.writers]
        self._spare += free
        return bool(self._spare)
