"""Copies KV from pool to pool on one host, through a window of decode's device memory (CUDA IPC).

Prefill's kernel copies blocks into a slot of the window and appends a keyed hash of what it copied;
the frame's record follows on the socket once the slot's event has been recorded. Decode polls the
event (its streams never wait for another process) and copies the slot into its blocks, concurrently
with the engine's work, with a kernel that hashes what it copies. It accepts the frame only if the
hashes agree. So a writer that is frozen or dies can spoil the window, and nothing else.
handshake.py has the messages before the first record; windows.py tracks who may write into which
window.

Payloads never pass the host's memory, so both processes must run on one host, in one PID and one
IPC namespace, on one GPU or on two with peer access.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from pdserve.engine.transport.base import (
    SLOTS,
    KvTransport,
    Listener,
    Target,
    TransportOptions,
    TransportRefused,
    Wire,
    WireClosed,
)
from pdserve.engine.transport.cuda_ipc.handshake import PROBE_BYTES, Probes
from pdserve.engine.transport.cuda_ipc.windows import DeviceWindow, DeviceWindows
from pdserve.engine.transport.cuda_ipc.wires import CudaReader, CudaWriter, slot_stride
from pdserve.engine.transport.device import Device, DeviceError, Memory, Slot
from pdserve.engine.transport.unix_socket import dial_unix, listen_unix, socket_path


class CudaIpcTransport(KvTransport):
    """The cuda_ipc transport. Both processes must share a directory of unix sockets and the PID and
    IPC namespaces, and prefill must be able to open decode's device memory."""

    name = "cuda_ipc"
    preference = 5

    def __init__(self, options: TransportOptions) -> None:
        super().__init__(options)
        self._lock = threading.Lock()
        self._device: Device | None = None
        self._sources: list[Memory] = []  # prefill's 4 KiB buffers that no handshake uses

    @classmethod
    def applies(cls, options: TransportOptions) -> bool:
        return options.device is not None

    def check(self) -> None:
        self._open_device()

    def listen(self, incarnation: bytes, accept: Callable[[Wire], None]) -> Listener:
        path = socket_path(self.options.shm_dir, incarnation, ".cuda.sock")
        device, size = self._open_device(), self.options.device_slot_bytes
        windows = DeviceWindows(lambda: make_window(device, size))
        try:
            windows.prepare()
            probes = Probes(device)
        except DeviceError as err:
            windows.close()
            raise TransportRefused(f"window_memory: {err}") from None

        def cleanup() -> None:
            windows.close()
            probes.close()

        def accepted(peer: socket.socket) -> None:
            accept(CudaReader(peer, size, device, windows, probes))

        try:
            return listen_unix(path, accepted, cleanup)
        except TransportRefused:
            cleanup()
            raise

    def dial(self, target: Target, timeout_s: float) -> Wire:
        path = socket_path(self.options.shm_dir, target.incarnation, ".cuda.sock")
        deadline = time.monotonic() + timeout_s
        device = self._open_device()
        wire = CudaWriter(dial_unix(path, timeout_s), self.options.device_slot_bytes, device)
        wire.deadline = deadline
        try:
            source = self._source(device)
            try:
                wire.introduce(source)
            finally:
                with self._lock:
                    self._sources.append(source)
        except TransportRefused:
            wire.close()
            raise
        except (WireClosed, ValueError) as err:
            wire.close()
            raise TransportRefused(f"the cuda_ipc handshake failed: {err}") from None
        except DeviceError as err:
            wire.close()
            raise TransportRefused(f"no_device: {err}") from None
        return wire

    def close(self) -> None:
        with self._lock:
            sources, self._sources = self._sources, []
        for source in sources:
            source.close()

    def _open_device(self) -> Device:
        if self.options.device is None:
            raise TransportRefused("no_device: the KV pool is not on a CUDA device")
        with self._lock:
            if self._device is None:
                try:
                    self._device = self.options.device()
                except DeviceError as err:
                    raise TransportRefused(f"{err.reason}: {err}") from None
            return self._device

    def _source(self, device: Device) -> Memory:
        with self._lock:
            if self._sources:
                return self._sources.pop()
        return device.allocate(PROBE_BYTES)


def make_window(device: Device, slot_bytes: int) -> DeviceWindow:
    """Allocate a window in device memory: SLOTS adjacent slots, each followed by room for its tag.
    Raises DeviceError."""
    slots = []
    with ExitStack() as cleanup:
        memory = device.allocate(SLOTS * slot_stride(slot_bytes))
        cleanup.callback(memory.close)
        stream = device.share_stream()
        cleanup.callback(stream.close)
        for address in range(memory.address, memory.address + memory.size, slot_stride(slot_bytes)):
            signal = device.make_signal()
            cleanup.callback(signal.close)
            slots.append(Slot(address, slot_bytes, signal, stream))
        cleanup.pop_all()
    return DeviceWindow(memory, slots, stream)
