"""What the cuda_ipc transport needs of a device; cuda_ipc/device_cupy.py is the one with CuPy.

Ownership: decode owns windows and their signals for the life of its process; prefill opens them.
Only decode copies into decode's pool.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from pdserve.engine.kv.pages import Pages
from pdserve.kernels.copy_hash import TAG_BYTES

HANDLE_BYTES = 64  # of cudaIpcMemHandle_t and cudaIpcEventHandle_t
ALIGN_BYTES = 256  # a slot begins at a multiple of it
TAIL_BYTES = ALIGN_BYTES  # behind a slot's payload: its tag, and room
assert TAG_BYTES <= TAIL_BYTES


class DeviceError(Exception):
    """The device did not do what it was told; the text says what, `reason` is a word for it."""

    def __init__(self, text: str, reason: str = "no_device") -> None:
        super().__init__(text)
        self.reason = reason


class Copy(Protocol):
    """A copy that the device has been given. `Device.copy_*` returns before it is done."""

    def done(self) -> bool:
        """Raises DeviceError if the device has failed."""

    def wait(self) -> None:
        """Until it is done. Raises DeviceError."""

    @property
    def intact(self) -> bool:
        """Out of a slot, once done: the copied bytes have the tag that lies in the slot."""


class Memory(Protocol):
    """Device memory of this process, or of another one opened here."""

    address: int
    size: int

    def handle(self) -> bytes:
        """HANDLE_BYTES by which another process opens it."""

    def close(self) -> None: ...


class Signal(Protocol):
    """An interprocess event: recorded by prefill behind a copy, looked at by decode."""

    def handle(self) -> bytes:
        """HANDLE_BYTES by which another process opens it."""

    def done(self) -> bool:
        """What was before the newest record is done. Never waits."""

    def close(self) -> None: ...


class CopyStream(Protocol):
    """The order in which the copies of a connection run."""

    def close(self) -> None:
        """Its connection copies no more."""


@dataclass(slots=True)
class Slot:
    """A slot of a window, as this process sees it; its tag lies behind `capacity` bytes."""

    address: int
    capacity: int
    signal: Signal
    stream: CopyStream | None = None  # of its copies; None: that of what is waited for at once
    newest: Copy | None = None  # the memory stays until it is done
    scratch: Any = None  # the device's own, of the slot's one copy at a time


class Device(Protocol):
    """Thread-safe. Everything runs beside the engine; only `Pages.ready` and waiting for a copy put
    it in order with what the engine computes."""

    uuid: bytes  # 16
    name: str

    def unreachable(self, uuid: bytes) -> tuple[str, str] | None:
        """Why memory of that device cannot be opened here: (reason, text); None: it can."""

    def allocate(self, size: int) -> Memory:
        """Zeroed memory that can be exported. Raises DeviceError."""

    def open_memory(self, handle: bytes, size: int) -> Memory:
        """Raises DeviceError."""

    def make_signal(self) -> Signal: ...

    def open_signal(self, handle: bytes) -> Signal:
        """Raises DeviceError."""

    def share_stream(self) -> CopyStream:
        """One for a connection; a bounded number of them serves all. Raises DeviceError."""

    def copy_out(self, pages: Pages, slot: Slot, key: bytes) -> Copy:
        """Pool to slot behind `pages.ready`, with its tag; the slot's signal is recorded when
        this returns. Raises DeviceError."""

    def copy_in(self, pages: Pages, slot: Slot, key: bytes) -> Copy:
        """Slot to pool behind `pages.ready`; the tag is of the bytes that were copied. Raises
        DeviceError."""

    def release(self, slot: Slot) -> None:
        """Its copies are done, and there will be no more."""

    def put(self, address: int, data: bytes) -> None:
        """Host to device memory, done on return."""

    def get(self, address: int, size: int) -> bytes:
        """Device memory to host, done on return."""
