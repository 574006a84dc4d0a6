"""The interface of a device for the cuda_ipc transport; cuda_ipc/device_cupy.py implements it.

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
    """Raised if a device operation failed; the text says what, `reason` is a word for it."""

    def __init__(self, text: str, reason: str = "no_device") -> None:
        super().__init__(text)
        self.reason = reason


class Copy(Protocol):
    """A copy that is queued on the device. `Device.copy_*` returns before it is done."""

    def done(self) -> bool:
        """Return whether the copy is done. Raises DeviceError if the device has failed."""

    def wait(self) -> None:
        """Wait until the copy is done. Raises DeviceError."""

    @property
    def intact(self) -> bool:
        """For a finished copy out of a slot: whether the copied bytes match the tag in the slot."""


class Memory(Protocol):
    """Device memory of this process, or of another process and opened here."""

    address: int
    size: int

    def handle(self) -> bytes:
        """Return the HANDLE_BYTES by which another process opens the memory."""

    def close(self) -> None: ...


class Signal(Protocol):
    """An interprocess event that prefill records after a copy and decode polls."""

    def handle(self) -> bytes:
        """Return the HANDLE_BYTES by which another process opens the signal."""

    def done(self) -> bool:
        """Return whether everything before the newest record is done. Never waits."""

    def close(self) -> None: ...


class CopyStream(Protocol):
    """The stream on which the copies of a connection run in order."""

    def close(self) -> None:
        """Leave the stream: the connection copies no more."""


@dataclass(slots=True)
class Slot:
    """A slot of a window, as this process sees it; its tag follows `capacity` bytes of payload."""

    address: int
    capacity: int
    signal: Signal
    stream: CopyStream | None = None  # of its copies; None: that of blocking operations
    newest: Copy | None = None  # the memory stays until it is done
    scratch: Any = None  # of the device, for the slot's one copy at a time


class Device(Protocol):
    """A device; thread-safe. Its work runs beside the engine, and is ordered with the engine's work
    only by `Pages.ready` and by waiting for a copy."""

    uuid: bytes  # 16 bytes
    name: str

    def unreachable(self, uuid: bytes) -> tuple[str, str] | None:
        """Return why that device's memory cannot be opened here: (reason, text); None if it can."""

    def allocate(self, size: int) -> Memory:
        """Allocate zeroed memory that can be exported. Raises DeviceError."""

    def open_memory(self, handle: bytes, size: int) -> Memory:
        """Open memory of another process. Raises DeviceError."""

    def make_signal(self) -> Signal: ...

    def open_signal(self, handle: bytes) -> Signal:
        """Open a signal of another process. Raises DeviceError."""

    def share_stream(self) -> CopyStream:
        """Return a connection's stream, of a bounded number. Raises DeviceError."""

    def copy_out(self, pages: Pages, slot: Slot, key: bytes) -> Copy:
        """Begin a copy from pool to slot after `pages.ready`, with its tag; the slot's signal is
        recorded when this returns. Raises DeviceError."""

    def copy_in(self, pages: Pages, slot: Slot, key: bytes) -> Copy:
        """Begin a copy from slot to pool after `pages.ready`; the tag is computed from the copied
        bytes. Raises DeviceError."""

    def release(self, slot: Slot) -> None:
        """Release the slot's scratch memory: its copies are done, and no more will follow."""

    def put(self, address: int, data: bytes) -> None:
        """Copy host to device memory; done on return."""

    def get(self, address: int, size: int) -> bytes:
        """Copy device memory to the host; done on return."""
