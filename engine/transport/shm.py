"""Passes KV through memory shared on one host: prefill's sealed memfd, mapped read-only by decode.

The memfd belongs to prefill and is sent once over a unix socket (SCM_RIGHTS), so the transport
works between containers that share the socket's directory. It is sealed against shrinking (no
SIGBUS) and growing. Decode verifies a slot and copies it in place. Only prefill can write to the
memory: it holds the tag's key anyway, and does not write between a frame's record and its credit or
answer. A writer that is frozen in the middle of a copy has not sent the record yet. The memory has
no name in the file system, so nothing can be left behind; it is freed when the last of the two
processes ends.
"""

import contextlib
import fcntl
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence

import numpy as np

from pdserve.engine.transport.base import (
    SLOTS,
    KvTransport,
    Listener,
    Payload,
    Target,
    TransportRefused,
    WindowReader,
    WindowWriter,
    Wire,
    WireClosed,
)
from pdserve.engine.transport.unix_socket import dial_unix, listen_unix, socket_path
from pdserve.kernels._native import copy_past_caches

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HEAD = b"K"
PROOF_BYTES = 16


class ShmWriter(WindowWriter):
    """Prefill's end of a shm connection; owns the memfd that it writes payloads into."""

    def __init__(self, sock: socket.socket, slot_bytes: int) -> None:
        super().__init__(sock, slot_bytes)
        size = SLOTS * slot_bytes
        fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = mmap.mmap(fd, size)
            self._nonce = os.urandom(PROOF_BYTES)
            self._memory[:PROOF_BYTES] = self._nonce
            socket.send_fds(sock, [_HEAD], [fd])
        finally:
            os.close(fd)

    def proof(self) -> bytes:
        return self._nonce

    def send_frame(
        self,
        record: bytes,
        slot: int,
        parts: Sequence[memoryview],
        release_parts: Callable[[], None],
    ) -> None:
        offset = slot * self.slot_bytes
        for part in parts:
            window = np.frombuffer(self._memory, np.uint8, len(part), offset)
            copy_past_caches(window, np.frombuffer(part, np.uint8))
            offset += len(part)
        release_parts()
        self.write(record)

    def close(self) -> None:
        super().close()
        self._memory.close()


class ShmReader(WindowReader):
    """Decode's end of a shm connection; maps prefill's memfd read-only."""

    _memory: mmap.mmap | None = None

    def setup(self) -> None:
        fds: list[int] = []
        try:
            if self.deadline is not None:
                self.sock.settimeout(max(0.01, self.deadline - time.monotonic()))
            head, fds, _, _ = socket.recv_fds(self.sock, 1, 1)
            if head != _HEAD or len(fds) != 1:
                raise WireClosed("prefill did not pass its shared memory")
            if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise WireClosed("prefill's shared memory is not sealed")
            self._memory = mmap.mmap(fds[0], os.fstat(fds[0]).st_size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as err:
            raise WireClosed(f"prefill's shared memory cannot be mapped: {err}") from None
        finally:
            for fd in fds:
                os.close(fd)

    def proof(self) -> bytes:
        if self._memory is None or len(self._memory) != SLOTS * self.slot_bytes:
            raise TransportRefused("prefill's shared memory has an unexpected size")
        return self._memory[:PROOF_BYTES]

    def payload(self, slot: int, size: int) -> Payload:
        assert self._memory is not None  # proof() has passed
        return memoryview(self._memory)[slot * self.slot_bytes :][:size]

    def close(self) -> None:
        super().close()
        if self._memory is not None:
            with contextlib.suppress(BufferError):  # unmapped with its last view
                self._memory.close()


class ShmTransport(KvTransport):
    """The shm transport. Both processes must share a directory of unix sockets, in which decode's
    socket is named by its incarnation."""

    name = "shm"
    preference = 10

    def listen(self, incarnation: bytes, accept: Callable[[Wire], None]) -> Listener:
        size = self.options.slot_bytes
        path = socket_path(self.options.shm_dir, incarnation, ".sock")
        return listen_unix(path, lambda peer: accept(ShmReader(peer, size)))

    def dial(self, target: Target, timeout_s: float) -> Wire:
        path = socket_path(self.options.shm_dir, target.incarnation, ".sock")
        sock = dial_unix(path, timeout_s)
        try:
            return ShmWriter(sock, self.options.slot_bytes)
        except OSError as err:
            sock.close()
            raise TransportRefused(f"{path}: {err.strerror or err}") from None
