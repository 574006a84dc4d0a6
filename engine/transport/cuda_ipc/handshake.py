"""What the two ends of a cuda_ipc connection tell each other before the first record.

prefill: ProcessPlace, and beside it an eventfd, which it writes when it has closed its window.
decode: Answer, and if it does not refuse, a HandshakeOffer of 4 KiB. prefill copies random bytes
into them with the transport's own kernel: Answer. decode copies them out again and compares:
Answer. Whoever refuses says why with one of REASONS; both ends log it. Pure.
"""

import struct
from dataclasses import dataclass

from pdserve.engine.transport.device import HANDLE_BYTES

VERSION = 1
PROBE_BYTES = 4096
REASONS = {
    "no_device": "the KV pool is not on a CUDA device, or the device or CuPy does not work",
    "encrypted": "--encrypt-kv: payloads cannot be sealed on a device",
    "version": "the two ends speak another handshake",
    "pid_namespace": "the processes are in different PID namespaces",
    "ipc_namespace": "the processes are in different IPC namespaces",
    "other_gpu": "decode's GPU is not visible to prefill",
    "no_peer_access": "prefill's GPU cannot access decode's",
    "window_memory": "decode's device has no memory for another window",
    "open_failed": "prefill could not open decode's memory or event",
    "copy_check": "decode read other bytes than prefill had copied",
    "copy_timeout": "prefill's copy did not end in time",
    "busy": "too many handshakes at once",
}

_PLACE = struct.Struct("<4sH16sQQQQ")
_ANSWER = struct.Struct("<16s200s")
_OFFER = struct.Struct(f"<{HANDLE_BYTES}sQI{HANDLE_BYTES}s32s")
_MAGIC = b"KCUD"
PLACE_BYTES, ANSWER_BYTES, OFFER_BYTES = _PLACE.size, _ANSWER.size, _OFFER.size


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a process runs. A namespace is (device, inode) of its file in /proc/self/ns."""

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
        """Raises ValueError."""
        if len(data) != PLACE_BYTES or data[:4] != _MAGIC:
            raise ValueError("not a cuda_ipc peer")
        _, version, uuid, p0, p1, i0, i1 = _PLACE.unpack(data)
        return cls(uuid, (p0, p1), (i0, i1), version)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not; without a reason: go on."""

    reason: str = ""
    text: str = ""

    def pack(self) -> bytes:
        text = self.text.encode()[:200].decode(errors="ignore").encode()
        return _ANSWER.pack(self.reason.encode(), text)

    @classmethod
    def unpack(cls, data: bytes) -> "Refusal":
        """Raises ValueError."""
        if len(data) != ANSWER_BYTES:
            raise ValueError("not an answer")
        reason, text = (part.rstrip(b"\0").decode() for part in _ANSWER.unpack(data))
        if reason and reason not in REASONS:
            raise ValueError(f"unknown reason {reason!r}")
        return cls(reason, text)


@dataclass(frozen=True, slots=True)
class HandshakeOffer:
    """4 KiB of decode's device memory, and the signal and the key to use for them."""

    memory: bytes
    memory_bytes: int
    offset: int  # of the 4 KiB, whose tag lies behind them
    signal: bytes
    key: bytes

    def pack(self) -> bytes:
        return _OFFER.pack(self.memory, self.memory_bytes, self.offset, self.signal, self.key)

    @classmethod
    def unpack(cls, data: bytes) -> "HandshakeOffer":
        return cls(*_OFFER.unpack(data))


def namespace_refusal(ours: ProcessPlace, theirs: ProcessPlace) -> Refusal:
    """decode's part of the comparison."""
    if ours.version != theirs.version:
        return Refusal("version", f"handshake {ours.version} here, {theirs.version} there")
    for name in ("pid_namespace", "ipc_namespace"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            words = name.split("_")[0].upper()
            return Refusal(name, f"{words} namespace {mine[1]} here, {other[1]} there")
    return Refusal()
