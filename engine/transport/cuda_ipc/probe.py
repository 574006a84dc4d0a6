"""Decode's 4 KiB cells, into which a peer proves that its copies arrive before it gets a window.

A peer that has proven nothing costs at most a cell and two tiny copies: cells are allocated once
and lent for one handshake each, and a key is used for one handshake only.
"""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pdserve.engine.kv import Pages
from pdserve.engine.transport.cuda_ipc.handshake import PROBE_BYTES, HandshakeOffer, Refusal
from pdserve.engine.transport.device import TAIL_BYTES, Device, DeviceError, Memory, Slot
from pdserve.kernels.copy_hash import KEY_BYTES

MAX_PROBES = 16  # concurrent handshakes
SPIN_S = 0.0002  # between two polls of the peer's copy
_CELL_BYTES = 2 * PROBE_BYTES + TAIL_BYTES  # prefill's bytes, their tag, decode's copy of the bytes


def probe_pages(address: int) -> Pages:
    """Return 4 KiB at `address` as one block."""
    return Pages(address, PROBE_BYTES, PROBE_BYTES, range(1), (0,))


@dataclass(slots=True)
class Cell:
    """The memory of one handshake."""

    memory: Memory
    offset: int
    slot: Slot
    key: bytes

    @property
    def copy_address(self) -> int:
        return self.slot.address + PROBE_BYTES + TAIL_BYTES

    def offer(self) -> HandshakeOffer:
        return HandshakeOffer(
            self.memory.handle(), self.memory.size, self.offset, self.slot.signal.handle(), self.key
        )

    def verify(self, device: Device, deadline: float) -> Refusal:
        """Wait for the peer's copy until `deadline` (time.monotonic), then copy it out and check
        its tag."""
        try:
            while not self.slot.signal.done():
                if time.monotonic() > deadline:
                    return Refusal("copy_timeout", "prefill's copy did not end in time")
                time.sleep(SPIN_S)
            copy = device.copy_in(probe_pages(self.copy_address), self.slot, self.key)
            copy.wait()
        except DeviceError as err:
            return Refusal("no_device", str(err))
        if not copy.intact:
            return Refusal("copy_check", f"{PROBE_BYTES} bytes did not arrive as they were sent")
        return Refusal()


class Probes:
    """All cells of a process. Raises DeviceError."""

    def __init__(self, device: Device) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._slots: list[tuple[int, Slot]] = []
        with ExitStack() as cleanup:
            self._memory = device.allocate(MAX_PROBES * _CELL_BYTES)
            cleanup.callback(self._memory.close)
            for offset in range(0, MAX_PROBES * _CELL_BYTES, _CELL_BYTES):
                signal = device.make_signal()
                cleanup.callback(signal.close)
                self._slots.append(
                    (offset, Slot(self._memory.address + offset, PROBE_BYTES, signal))
                )
            cleanup.pop_all()
        self._free = list(self._slots)

    @contextmanager
    def lend(self) -> Iterator[Cell | None]:
        """Yield a cell with a fresh key; None if all are lent."""
        with self._lock:
            lent = self._free.pop() if self._free and not self._closed else None
        try:
            yield (
                None if lent is None else Cell(self._memory, *lent, secrets.token_bytes(KEY_BYTES))
            )
        finally:
            if lent is not None:
                with self._lock:
                    self._free.append(lent)
                    self._release_if_over()

    def close(self) -> None:
        """Free the cells, or let the last handshake free them."""
        with self._lock:
            self._closed = True
            self._release_if_over()

    def _release_if_over(self) -> None:
        if not self._closed or len(self._free) < len(self._slots) or not self._slots:
            return
        for _, slot in self._slots:
            slot.signal.close()
        self._memory.close()
        self._slots.clear()
        self._free.clear()
