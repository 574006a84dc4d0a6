"""The two ends of a cuda_ipc connection; transport.py describes how they work together.

Ownership: decode's end borrows a window from DeviceWindows when its peer is trusted and returns it
on close. Prefill's end keeps the window mapped while one of its copies runs. Then it unmaps it and
reports this by an eventfd that decode received with the connection's first bytes.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.engine.kv import Pages
from pdserve.engine.transport.base import (
    SLOTS,
    DeviceSink,
    Payload,
    TransportRefused,
    WindowReader,
    WindowWriter,
    Wire,
    WireClosed,
)
from pdserve.engine.transport.cuda_ipc.handshake import (
    ANSWER_BYTES,
    MAX_PROBES,
    OFFER_BYTES,
    PLACE_BYTES,
    PROBE_BYTES,
    Cell,
    HandshakeOffer,
    Probes,
    ProcessPlace,
    Refusal,
    namespace_refusal,
    probe_pages,
)
from pdserve.engine.transport.cuda_ipc.windows import DeviceWindow, DeviceWindows, handles_bytes
from pdserve.engine.transport.device import (
    ALIGN_BYTES,
    HANDLE_BYTES,
    TAIL_BYTES,
    Copy,
    CopyStream,
    Device,
    DeviceError,
    Memory,
    Slot,
)

log = logging.getLogger(__name__)

PROOF_BYTES = 16
_PEERCRED = struct.Struct("3i")


@dataclass(slots=True)
class _DeviceSlot:
    """A slot of a window: at prefill pool pages are copied into it (DeviceSink), at decode out of
    it (DeviceSource)."""

    device: Device
    slot: Slot

    def copy_out(self, pages: Pages, key: bytes) -> Copy:
        self._check(pages)
        self.slot.newest = self.device.copy_out(pages, self.slot, key)
        return self.slot.newest

    def ready(self) -> bool:
        return self.slot.signal.done()

    def copy_in(self, pages: Pages, key: bytes) -> Copy:
        self._check(pages)
        return self.device.copy_in(pages, self.slot, key)

    def _check(self, pages: Pages) -> None:
        if pages.num_bytes > self.slot.capacity:
            raise DeviceError(
                f"a payload of {pages.num_bytes} bytes does not fit into "
                f"a slot of {self.slot.capacity} bytes"
            )


class PeerProcess:
    """The process at the other end of a unix socket; tells it apart from a later process with the
    same pid."""

    def __init__(self, sock: socket.socket, closed_fd: int | None = None) -> None:
        """Identify the peer of `sock`. `closed_fd`: an eventfd, owned by this object, which the
        peer writes when it has closed its window. Raises OSError if the peer is not in this PID
        namespace."""
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        self.pid = int(_PEERCRED.unpack(data)[0])
        self._fds = [os.pidfd_open(self.pid)]  # readable when it has exited
        if closed_fd is not None:
            self._fds.append(closed_fd)

    def gone(self) -> bool:
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        return any(events & select.POLLIN for _, events in poll.poll(0))

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


class CudaWriter(WindowWriter):
    """Prefill's end of a cuda_ipc connection: opens decode's window and copies KV into its
    slots."""

    direct = True

    def __init__(self, sock: socket.socket, slot_bytes: int, device: Device) -> None:
        super().__init__(sock, slot_bytes)
        self._device = device
        self._memory: Memory | None = None
        self._stream: CopyStream | None = None
        self._slots: list[Slot] = []
        self._closed_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # decode has a copy
        self._proof = b""

    def introduce(self, source: Memory) -> None:
        """Do prefill's part of the handshake. `source` is 4 KiB of device memory, used as the
        source of the test copy. Raises TransportRefused, WireClosed, ValueError or DeviceError."""
        self._send_place()
        _raise_if_refused(_answer(self))
        peer_place = ProcessPlace.unpack(self.take(PLACE_BYTES))
        offer = HandshakeOffer.unpack(self.take(OFFER_BYTES))
        obstacle = self._device.unreachable(peer_place.uuid)
        refusal = Refusal(*obstacle) if obstacle else self._probe(offer, source)
        self.write(refusal.pack())
        _raise_if_refused(refusal)
        _raise_if_refused(_answer(self))

    def proof(self) -> bytes:
        return self._proof

    @property
    def writable(self) -> bool:
        return bool(self._slots)

    def open_window(self, data: bytes) -> None:
        if self._slots or len(data) != handles_bytes(SLOTS):
            raise TransportRefused("decode sent a second device window, or one of a wrong size")
        handles = [
            data[start : start + HANDLE_BYTES] for start in range(0, len(data), HANDLE_BYTES)
        ]
        try:
            self._memory = self._device.open_memory(
                handles[0], SLOTS * slot_stride(self.slot_bytes)
            )
            self._stream = self._device.share_stream()
            for i, handle in enumerate(handles[1:]):
                address = self._memory.address + i * slot_stride(self.slot_bytes)
                signal = self._device.open_signal(handle)
                self._slots.append(Slot(address, self.slot_bytes, signal, self._stream))
        except DeviceError as err:
            raise TransportRefused(f"open_failed: {err}") from None

    def sink(self, slot: int) -> DeviceSink:
        return _DeviceSlot(self._device, self._slots[slot])

    def send_frame(
        self,
        record: bytes,
        slot: int,
        parts: Sequence[memoryview],
        release_parts: Callable[[], None],
    ) -> None:
        release_parts()  # the attempt tracks the copies from the pool
        self.write(record)

    def close(self) -> None:
        super().close()
        for slot in self._slots:
            if slot.newest is not None:
                with contextlib.suppress(DeviceError):
                    slot.newest.wait()  # the window stays mapped while a copy runs
            self._device.release(slot)
            with contextlib.suppress(DeviceError):
                slot.signal.close()
        if self._stream is not None:
            self._stream.close()
        with contextlib.suppress(DeviceError):
            if self._memory is not None:
                self._memory.close()
            os.eventfd_write(self._closed_fd, 1)
        os.close(self._closed_fd)

    def _send_place(self) -> None:
        place = local_place(self._device).pack()
        try:
            sent = socket.send_fds(self.sock, [place], [self._closed_fd])
        except OSError as err:
            raise WireClosed(f"connection lost: {err.strerror or err}") from None
        self.write(place[sent:])

    def _probe(self, offer: HandshakeOffer, source: Memory) -> Refusal:
        """Copy random bytes into the memory that decode offers; return prefill's refusal, without a
        reason if the copy succeeded."""
        data = secrets.token_bytes(PROBE_BYTES)
        self._proof = data[:PROOF_BYTES]
        try:
            with contextlib.ExitStack() as opened:
                memory = self._device.open_memory(offer.memory, offer.memory_bytes)
                opened.callback(memory.close)
                signal = self._device.open_signal(offer.signal)
                opened.callback(signal.close)
                self._device.put(source.address, data)
                slot = Slot(memory.address + offer.offset, PROBE_BYTES, signal)
                opened.callback(self._device.release, slot)
                self._device.copy_out(probe_pages(source.address), slot, offer.key).wait()
        except DeviceError as err:
            return Refusal("open_failed", str(err))
        return Refusal()


class CudaReader(WindowReader):
    """Decode's end of a cuda_ipc connection: lends its peer a window once the peer is trusted."""

    direct = True

    def __init__(
        self,
        sock: socket.socket,
        slot_bytes: int,
        device: Device,
        windows: DeviceWindows,
        probes: Probes,
    ) -> None:
        super().__init__(sock, slot_bytes)
        self._device = device
        self._windows = windows
        self._probes = probes
        self._peer: PeerProcess | None = None
        self._window: DeviceWindow | None = None
        self._closed_fd: int | None = None  # eventfd of prefill, until `_peer` owns it
        self._proof = b""

    def setup(self) -> None:
        try:
            peer_place = ProcessPlace.unpack(self._take_place())
            local = local_place(self._device)
            refusal = namespace_refusal(local, peer_place)
            with self._probes.lend() as cell:
                if not refusal.reason:
                    refusal = self._prepare(cell)
                self._send_answer(refusal)
                assert cell is not None  # otherwise refused as busy
                self.write(local.pack(), cell.offer().pack())
                _raise_if_refused(_answer(self))
                deadline = self.deadline or time.monotonic() + 1.0
                refusal = cell.verify(self._device, deadline)
                if not refusal.reason:
                    self._proof = self._device.get(cell.copy_address, PROOF_BYTES)
                self._send_answer(refusal)
        except (ValueError, DeviceError) as err:
            raise WireClosed(f"the cuda_ipc handshake failed: {err}") from None
        except TransportRefused as err:
            log.info("prefill refused a cuda_ipc connection and tries another transport: %s", err)
            raise WireClosed(f"prefill refused the handshake: {err}") from None

    def proof(self) -> bytes:
        return self._proof

    def window(self) -> bytes:
        assert self._peer is not None  # setup() has passed
        try:
            self._window = self._windows.take(self._peer)
            return self._window.handles()
        except DeviceError as err:
            raise TransportRefused(f"window_memory: {err}") from None

    def payload(self, slot: int, size: int) -> Payload:
        if self._window is None:
            raise WireClosed("prefill sent a frame before decode lent it a device window")
        return _DeviceSlot(self._device, self._window.slots[slot])

    def close(self) -> None:
        super().close()
        if self._closed_fd is not None:
            os.close(self._closed_fd)
        if self._window is not None:
            self._windows.give_back(self._window)
        elif self._peer is not None:
            self._peer.close()

    def _take_place(self) -> bytes:
        """Receive the bytes of prefill's ProcessPlace, and keep the eventfd that comes with
        them."""

        def receive() -> bytes:
            flags = socket.MSG_CMSG_CLOEXEC
            data, fds, _, _ = socket.recv_fds(self.sock, PLACE_BYTES, 1, flags)
            self._closed_fd = fds[0] if fds else None
            return data

        self._ahead += self._received(receive)
        return self.take(PLACE_BYTES)

    def _prepare(self, cell: Cell | None) -> Refusal:
        """Identify the peer and ensure that a window exists for it; return decode's refusal. This
        is done in the handshake, while prefill can still choose another transport."""
        if cell is None:
            return Refusal("busy", f"{MAX_PROBES} handshakes run already")
        try:
            self._peer, self._closed_fd = PeerProcess(self.sock, self._closed_fd), None
            self._windows.prepare()
        except OSError as err:
            return Refusal(
                "pid_namespace", f"prefill's process is not in this PID namespace: {err.strerror}"
            )
        except DeviceError as err:
            return Refusal("window_memory", str(err))
        return Refusal()

    def _send_answer(self, refusal: Refusal) -> None:
        """Send decode's answer to the handshake. Raises WireClosed if the answer is a refusal."""
        self.write(refusal.pack())
        if refusal.reason:
            log.info(
                "decode refused a cuda_ipc connection, so prefill tries another transport: %s: %s",
                refusal.reason,
                refusal.text,
            )
            raise WireClosed(f"decode refused the handshake: {refusal.reason}: {refusal.text}")


def local_place(device: Device) -> ProcessPlace:
    """Return the GPU and the namespaces of this process."""
    pid, ipc = (os.stat(f"/proc/self/ns/{name}") for name in ("pid", "ipc"))
    return ProcessPlace(device.uuid, (pid.st_dev, pid.st_ino), (ipc.st_dev, ipc.st_ino))


def slot_stride(slot_bytes: int) -> int:
    """Return the distance in bytes between the starts of two slots of a window: the payload's size,
    rounded up, plus room for its tag."""
    return -(-slot_bytes // ALIGN_BYTES) * ALIGN_BYTES + TAIL_BYTES


def _answer(wire: Wire) -> Refusal:
    return Refusal.unpack(wire.take(ANSWER_BYTES))


def _raise_if_refused(refusal: Refusal) -> None:
    if refusal.reason:
        raise TransportRefused(f"{refusal.reason}: {refusal.text}")
