"""The interface of a GPU, as the cuda_ipc transport uses it; cuda_ipc/device_cupy.py implements it.

Ownership: decode owns windows and their signals for the life of its process; prefill opens them.
Only decode copies into decode's pool.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from pdserve.engine.kv import Pages
from pdserve.kernels.copy_hash import TAG_BYTES

HANDLE_BYTES = 64  # of cudaIpcMemHandle_t and cudaIpcEventHandle_t
ALIGN_BYTES = 256  # a slot begins at a multiple of this
TAIL_BYTES = ALIGN_BYTES  # after a slot's payload: its tag and padding
assert TAG_BYTES <= TAIL_BYTES


class DeviceError(Exception):
    """Raised if an operation of a device failed. The text says what; `reason` is a word for it, a
    key of the handshake's REASONS."""

    def __init__(self, text: str, reason: str = "no_device") -> None:
        super().__init__(text)
        self.reason = reason


class Copy(Protocol):
    """A copy that is queued on the device; `Device.copy_out` and `copy_in` return before it is
    done."""

    def done(self) -> bool:
        """Return whether the copy is done. Raises DeviceError if the device has failed."""

    def wait(self) -> None:
        """Wait until the copy is done. Raises DeviceError."""

    @property
    def intact(self) -> bool:
        """Whether the bytes of a finished copy out of a slot match the tag in the slot."""


class Memory(Protocol):
    """Device memory: allocated by this process, or by another process and opened in this one."""

    address: int
    size: int

    def handle(self) -> bytes:
        """Return the HANDLE_BYTES with which another process can open this memory."""

    def close(self) -> None: ...


class Signal(Protocol):
    """An event that two processes share: prefill records it after a copy, and decode polls it."""

    def handle(self) -> bytes:
        """Return the HANDLE_BYTES with which another process can open this signal."""

    def done(self) -> bool:
        """Return whether all work that was queued before the signal's newest record is done. Never
        waits."""

    def close(self) -> None: ...


class CopyStream(Protocol):
    """A device stream, on which the copies of a connection run in order."""

    def close(self) -> None:
        """Give the stream up: the connection queues no more copies."""


@dataclass(slots=True)
class Slot:
    """A slot of a window, as this process sees it: `capacity` bytes of payload, then their tag."""

    address: int
    capacity: int
    signal: Signal
    stream: CopyStream | None = None  # of its copies; None: that of blocking operations
    newest: Copy | None = None  # the memory stays until it is done
    scratch: Any = None  # of the device, for the slot's one copy at a time


class Device(Protocol):
    """A GPU; thread-safe. Its copies run concurrently with the engine's work and are ordered with
    it only by `Pages.ready` and by waiting for a copy."""

    uuid: bytes  # 16 bytes
    name: str

    def unreachable(self, uuid: bytes) -> tuple[str, str] | None:
        """Return (reason, text) why this process cannot open memory of the GPU with this UUID; None
        if it can."""

    def allocate(self, size: int) -> Memory:
        """Allocate `size` bytes of zeroed memory that other processes can open. Raises
        DeviceError."""

    def open_memory(self, handle: bytes, size: int) -> Memory:
        """Open memory that another process allocated, by its handle. Raises DeviceError."""

    def make_signal(self) -> Signal: ...

    def open_signal(self, handle: bytes) -> Signal:
        """Open a signal that another process made, by its handle. Raises DeviceError."""

    def share_stream(self) -> CopyStream:
        """Return a stream for the copies of a connection; beyond a fixed number of streams,
        connections share them. Raises DeviceError."""

    def copy_out(self, pages: Pages, slot: Slot, key: bytes) -> Copy:
        """Begin a copy from pages of the pool to a slot, after `pages.ready`, and write its tag.
        When this returns, the slot's signal has been recorded after the copy. Raises
        DeviceError."""

    def copy_in(self, pages: Pages, slot: Slot, key: bytes) -> Copy:
        """Begin a copy from a slot to pages of the pool, after `pages.ready`; its hash is compared
        with the slot's tag (`Copy.intact`). Raises DeviceError."""

    def release(self, slot: Slot) -> None:
        """Release the slot's scratch memory; the slot's copies are done, and no more may follow."""

    def put(self, address: int, data: bytes) -> None:
        """Copy bytes from the host to device memory; the copy is done when this returns."""

    def get(self, address: int, size: int) -> bytes:
        """Copy bytes from device memory to the host; the copy is done when this returns."""
