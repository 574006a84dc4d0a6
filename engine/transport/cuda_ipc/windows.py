"""Decode's windows on its device, and which processes may still write into each.

Ownership: a window is spare, lent to one writer (a process), or left by writers that may still
write, since they are frozen or their copies are in flight. A left window is lent again to the same
process, whose late writes can only spoil its frames, or to any process once all its writers have
reported that they closed it or have exited. Only then is it freed, at `close`; a window that
another process still has open stays until this process ends.
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
    """A process that has a window open."""

    pid: int

    def gone(self) -> bool:
        """Return whether the process reported that it closed the window, or has exited."""

    def close(self) -> None: ...


@dataclass(slots=True)
class DeviceWindow:
    memory: Memory
    slots: list[Slot] = field(repr=False)
    stream: CopyStream
    writers: list[Writer] = field(default_factory=list)  # may have it open; newest last

    def handles(self) -> bytes:
        """Return what prefill opens: the memory's handle, then one signal handle per slot."""
        return self.memory.handle() + b"".join(slot.signal.handle() for slot in self.slots)

    def is_unused(self) -> bool:
        """Drop processes that have exited or closed it; return whether none has it open."""
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
    """Lends windows to prefill processes; thread-safe. `make` allocates one; its errors pass
    through."""

    def __init__(self, make: Callable[[], DeviceWindow]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._spare: list[DeviceWindow] = []
        self._abandoned: list[DeviceWindow] = []
        self._end: float | None = None  # once closed: deadline of the wait for writers

    def prepare(self) -> None:
        """Ensure that a spare window exists for the next writer."""
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
        """Take back a window whose connection has ended; its writer may still be alive."""
        with self._lock:
            if self._end is None:
                self._abandoned.append(window)
                return
        self._free(window)

    def close(self) -> None:
        """Free all windows that are not lent now, and the others when they are given back."""
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
                    "processes %s still have a window open; it stays allocated until this one ends",
                    pids,
                )
                for writer in window.writers:
                    writer.close()
                return
            time.sleep(_POLL_S)
        window.close()

    def _reclaim(self) -> bool:
        """Make windows that no process has open spare again; return whether a spare one exists."""
        free = [window for window in self._abandoned if window.is_unused()]
        self._abandoned = [window for window in self._abandoned if window.writers]
        self._spare += free
        return bool(self._spare)
