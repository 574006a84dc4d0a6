"""The messages that the two ends of a cuda_ipc connection exchange before the first record. Pure.

1. prefill sends its ProcessPlace, with an eventfd that it writes when it has closed its window.
2. decode sends an answer (Refusal) and, if it does not refuse, its ProcessPlace and a
   HandshakeOffer of 4 KiB.
3. prefill copies random bytes into the 4 KiB with the transport's kernel, and sends an answer.
4. decode copies them out again, compares, and sends an answer.

The end that refuses gives one of REASONS; both ends log it.
"""

import struct
from dataclasses import dataclass

from pdserve.engine.transport.device import HANDLE_BYTES

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
    """The place of a process. A namespace is (device, inode) of its file in /proc/self/ns."""

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
        """Decode a place. Raises ValueError."""
        if len(data) != PLACE_BYTES or data[:4] != _MAGIC:
            raise ValueError("the peer does not use cuda_ipc")
        _, version, uuid, p0, p1, i0, i1 = _PLACE.unpack(data)
        return cls(uuid, (p0, p1), (i0, i1), version)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer: the reason for a refusal; without a reason the handshake continues."""

    reason: str = ""
    text: str = ""

    def pack(self) -> bytes:
        text = self.text.encode()[:200].decode(errors="ignore").encode()
        return _ANSWER.pack(self.reason.encode(), text)

    @classmethod
    def unpack(cls, data: bytes) -> "Refusal":
        """Decode an answer. Raises ValueError."""
        if len(data) != ANSWER_BYTES:
            raise ValueError("an answer has a wrong length")
        reason, text = (part.rstrip(b"\0").decode() for part in _ANSWER.unpack(data))
        if reason and reason not in REASONS:
            raise ValueError(f"unknown reason {reason!r}")
        return cls(reason, text)


@dataclass(frozen=True, slots=True)
class HandshakeOffer:
    """An offer of 4 KiB of decode's device memory, with the signal and the key to use for them."""

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
    """Return decode's refusal if the versions or namespaces differ."""
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
