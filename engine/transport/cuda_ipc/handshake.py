"""The handshake of a cuda_ipc connection: the messages before the first record, and decode's 4 KiB
cells of device memory, into which prefill proves that its copies arrive before it gets a window.

1. prefill sends its ProcessPlace, with an eventfd that it writes when it has closed its window.
2. decode sends an answer (Refusal) and, if it does not refuse, its ProcessPlace and a
   HandshakeOffer of 4 KiB.
3. prefill copies random bytes into the 4 KiB with the transport's kernel, and sends an answer.
4. decode copies them out again, compares, and sends an answer.

The end that refuses gives one of REASONS; both ends log it. A peer that has proven nothing costs at
most a cell and two tiny copies: cells are allocated once and lent for one handshake each, and a key
is used for one handshake only.
"""

import secrets
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pdserve.engine.kv import Pages
from pdserve.engine.transport.device import (
    HANDLE_BYTES,
    TAIL_BYTES,
    Device,
    DeviceError,
    Memory,
    Slot,
)
from pdserve.kernels.copy_hash import KEY_BYTES

VERSION = 1
PROBE_BYTES = 4096
REASONS = {
    "no_device": "the KV pool is not on a CUDA device, or the device or CuPy does not work",
    "encrypted": "payloads on a device cannot be encrypted (--encrypt-kv)",
    "version": "the two ends use different versions of the handshake",
    "pid_namespace": "the processes are in different PID namespaces",
    "ipc_namespace": "the processes are in different IPC namespaces",
    "other_gpu": "decode's GPU is not visible to prefill",
    "no_peer_access": "prefill's GPU cannot access decode's",
    "window_memory": "decode's device has no memory for another window",
    "open_failed": "prefill could not open decode's memory or event",
    "copy_check": "decode did not read the bytes that prefill had copied",
    "copy_timeout": "prefill's copy did not end in time",
    "busy": "too many handshakes run at the same time",
}

_PLACE = struct.Struct("<4sH16sQQQQ")
_ANSWER = struct.Struct("<16s200s")
_OFFER = struct.Struct(f"<{HANDLE_BYTES}sQI{HANDLE_BYTES}s32s")
_MAGIC = b"KCUD"
PLACE_BYTES, ANSWER_BYTES, OFFER_BYTES = _PLACE.size, _ANSWER.size, _OFFER.size


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a process runs: its GPU's UUID, and its PID and IPC namespaces, each as the (device,
    inode) of its file in /proc/self/ns."""

    uuid: bytes
    pid_namespace: tuple[int, int]
    ipc_namespace: tuple[int, int]
    version: int = VERSION

    def pack(self) -> bytes:
        return _PLACE.pack(
            _MAGIC, self.version, self.uuid, *self.pid_namespace, *self.ipc_namespace
        )

    @classmethod
    def unpack(cls, data: bytes) -> "ProcessPlace":
        """Decode the bytes of a peer's ProcessPlace. Raises ValueError."""
        if len(data) != PLACE_BYTES or data[:4] != _MAGIC:
            raise ValueError("the peer did not begin a cuda_ipc handshake")
        _, version, uuid, p0, p1, i0, i1 = _PLACE.unpack(data)
        return cls(uuid, (p0, p1), (i0, i1), version)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer in the handshake: why the sending end refuses, or no reason if the handshake
    continues."""

    reason: str = ""
    text: str = ""

    def pack(self) -> bytes:
        text = self.text.encode()[:200].decode(errors="ignore").encode()
        return _ANSWER.pack(self.reason.encode(), text)

    @classmethod
    def unpack(cls, data: bytes) -> "Refusal":
        """Decode the bytes of a peer's answer. Raises ValueError."""
        if len(data) != ANSWER_BYTES:
            raise ValueError("the peer's handshake answer has a wrong length")
        reason, text = (part.rstrip(b"\0").decode() for part in _ANSWER.unpack(data))
        if reason and reason not in REASONS:
            raise ValueError(f"the peer refused the handshake for an unknown reason: {reason!r}")
        return cls(reason, text)


@dataclass(frozen=True, slots=True)
class HandshakeOffer:
    """Decode's offer to prefill: 4 KiB of device memory to copy into, with the signal and key to
    use."""

    memory: bytes
    memory_bytes: int
    offset: int  # of the 4 KiB, which their tag follows
    signal: bytes
    key: bytes

    def pack(self) -> bytes:
        return _OFFER.pack(self.memory, self.memory_bytes, self.offset, self.signal, self.key)

    @classmethod
    def unpack(cls, data: bytes) -> "HandshakeOffer":
        return cls(*_OFFER.unpack(data))


def namespace_refusal(local: ProcessPlace, remote: ProcessPlace) -> Refusal:
    """Return decode's refusal if handshake version or namespaces of the two processes differ;
    without a reason if they are equal."""
    if local.version != remote.version:
        return Refusal(
            "version", f"handshake version {local.version} at decode, {remote.version} at prefill"
        )
    for name in ("pid_namespace", "ipc_namespace"):
        local_id, remote_id = getattr(local, name), getattr(remote, name)
        if local_id != remote_id:
            label = name.split("_")[0].upper()
            return Refusal(
                name, f"{label} namespace {local_id[1]} at decode, {remote_id[1]} at prefill"
            )
    return Refusal()


MAX_PROBES = 16  # concurrent handshakes
SPIN_S = 0.0002  # between two polls of the peer's copy
_CELL_BYTES = 2 * PROBE_BYTES + TAIL_BYTES  # prefill's bytes, their tag, decode's copy of the bytes


def probe_pages(address: int) -> Pages:
    """Describe the 4 KiB of device memory at `address` as a block to copy."""
    return Pages(address, PROBE_BYTES, PROBE_BYTES, range(1), (0,))


@dataclass(slots=True)
class Cell:
    """Decode's 4 KiB of device memory that the peer copies into during one handshake."""

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
        """Wait for the peer's copy until `deadline` (time.monotonic) and check its tag. Return the
        refusal; without a reason if the copy is intact."""
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
    """All handshake cells of a decode process, allocated at once. Raises DeviceError."""

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
        """Yield a cell with a fresh key for one handshake; None if all cells are in use."""
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
        """Free all cells now, or when the last running handshake returns its cell."""
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
