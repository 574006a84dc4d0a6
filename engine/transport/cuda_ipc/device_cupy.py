"""A CUDA device for the cuda_ipc transport, implemented by CuPy; transport/device.py specifies each
method.

A thin shell without protocol decisions. CuPy is the optional extra `cuda` and is imported only when
a pool lies on a CUDA device; the kernel is compiled then (NVRTC; CuPy caches it on disk).
"""

import ctypes
import threading
import uuid as uuids
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdserve.engine.kv import Pages
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.transport.device import Device, DeviceError, Slot
from pdserve.kernels.copy_hash import TILE_BYTES, UNIT_BYTES, expand_key
from pdserve.kernels.cuda import INTACT, SHARE_BYTES, SHARES_AT, CopyHash

_LOCAL, _INTERPROCESS = 2, 2 | 4  # cudaEventDisableTiming, and cudaEventInterprocess
_NOT_READY = 600  # cudaErrorNotReady
_VERDICT_BYTES = 16
# The unit that cudaMalloc takes from the driver: an exported handle opens all of it to the other
# process, so it must hold no other data of this process.
EXPORT_BYTES = 2 << 20
MAX_STREAMS = 8  # of connections; further connections share them


def opener(kv: KvCache, *, encrypted: bool) -> Callable[[], Device] | None:
    """Return a function that opens the CUDA device of a block pool, and raises DeviceError if
    cuda_ipc cannot use it; None if the pool lies in host memory."""
    index = kv.device
    if index is None:
        return None

    def open_device() -> Device:
        if encrypted:
            raise DeviceError(
                "payloads on a device cannot be encrypted (--encrypt-kv)", "encrypted"
            )
        for group in kv.spec.groups:
            size = group.block_bytes(kv.spec.block_size)
            if size % UNIT_BYTES:
                raise DeviceError(
                    f"a block has {size} bytes, which is not a multiple of {UNIT_BYTES}"
                )
        return CudaDevice(index)

    return open_device


class CudaDevice:
    """A CUDA device whose copies run on streams that its connections share.

    The streams are non-blocking, so nothing on them is ordered with the legacy default stream, on
    which torch computes. Therefore memory is zeroed on the stream that uses it next, or the zeroing
    is waited for.
    """

    def __init__(self, index: int) -> None:
        """Open the device with this CUDA index. Raises DeviceError if CuPy, a driver or the device
        is missing."""
        try:
            import cupy
        except ImportError as err:
            raise DeviceError(f"CUDA IPC needs CuPy: pip install 'pdserve[cuda]' ({err})") from None
        import torch

        self._cuda: Any = cupy.cuda.runtime
        self._index = index
        self._lock = threading.Lock()
        self.spare: list[_Scratch] = []  # that no slot uses
        with self.active():
            self.uuid = _uuid(index)
            self.name = torch.cuda.get_device_name(index)
            self._kernel = CopyHash(cupy)
            self._streams: list[
                _CudaStream
            ] = []  # of connections; they live as long as the process
            self._side_stream = self._make_stream()  # for operations that are waited for at once

    @contextmanager
    def active(self) -> Iterator[Any]:
        """Make this device current and yield the CUDA runtime; errors in the context become
        DeviceErrors."""
        try:
            self._cuda.setDevice(self._index)
            yield self._cuda
        except DeviceError:
            raise
        except Exception as err:  # CuPy's exceptions have no common base class
            raise DeviceError(f"{type(err).__name__}: {err}") from err

    def unreachable(self, uuid: bytes) -> tuple[str, str] | None:
        if uuid == self.uuid:
            return None
        with self.active() as cuda:
            for other in range(cuda.getDeviceCount()):
                if _uuid(other) == uuid:
                    if cuda.deviceCanAccessPeer(self._index, other):
                        return None
                    return "no_peer_access", f"GPU {self._index} cannot access GPU {other}"
        return "other_gpu", f"GPU {uuids.UUID(bytes=uuid)} is not visible to this process"

    def allocate(self, size: int) -> "_Memory":
        with self.active() as cuda:
            address = int(cuda.malloc(-(-size // EXPORT_BYTES) * EXPORT_BYTES))
            try:
                cuda.memsetAsync(address, 0, size, self._side_stream)
                # Wait: a process that opens the memory may write at once.
                cuda.streamSynchronize(self._side_stream)
            except Exception:
                cuda.free(address)
                raise
        return _Memory(self, address, size, "free")

    def open_memory(self, handle: bytes, size: int) -> "_Memory":
        with self.active() as cuda:
            return _Memory(self, int(cuda.ipcOpenMemHandle(handle)), size, "ipcCloseMemHandle")

    def make_signal(self) -> "_Event":
        with self.active() as cuda:
            return _Event(self, int(cuda.eventCreateWithFlags(_INTERPROCESS)))

    def open_signal(self, handle: bytes) -> "_Event":
        with self.active() as cuda:
            return _Event(self, int(cuda.ipcOpenEventHandle(handle)))

    def share_stream(self) -> "_CudaStream":
        with self._lock, self.active():
            shared = min(self._streams, key=lambda stream: stream.num_users, default=None)
            if shared is None or (shared.num_users and len(self._streams) < MAX_STREAMS):
                shared = _CudaStream(self, self._make_stream())
                self._streams.append(shared)
            shared.num_users += 1
            return shared

    def leave_stream(self, stream: "_CudaStream") -> None:
        with self._lock:
            stream.num_users -= 1

    def copy_out(self, pages: Pages, slot: Slot, key: bytes) -> "_Copy":
        assert isinstance(slot.signal, _Event)
        return self._launch(pages, slot, key, slot.signal)

    def copy_in(self, pages: Pages, slot: Slot, key: bytes) -> "_Copy":
        return self._launch(pages, slot, key)

    def release(self, slot: Slot) -> None:
        scratch, slot.scratch = slot.scratch, None
        if scratch is not None:
            with self._lock:
                self.spare.append(scratch)

    def put(self, address: int, data: bytes) -> None:
        source = np.frombuffer(data, np.uint8)
        with self.active() as cuda:  # cudaMemcpy returns while the last bytes are on their way
            kind = cuda.memcpyHostToDevice
            cuda.memcpyAsync(address, source.ctypes.data, len(data), kind, self._side_stream)
            cuda.streamSynchronize(self._side_stream)

    def get(self, address: int, size: int) -> bytes:
        target = np.empty(size, np.uint8)
        with self.active() as cuda:  # not on the legacy stream, which waits for the engine's steps
            kind = cuda.memcpyDeviceToHost
            cuda.memcpyAsync(target.ctypes.data, address, size, kind, self._side_stream)
            cuda.streamSynchronize(self._side_stream)
        return target.tobytes()

    def _stream_of(self, slot: Slot) -> int:
        if slot.stream is None:
            return self._side_stream
        assert isinstance(slot.stream, _CudaStream)
        return slot.stream.number

    def _make_stream(self) -> int:
        return int(self._cuda.streamCreateWithFlags(self._cuda.streamNonBlocking))

    def _launch(
        self, pages: Pages, slot: Slot, key: bytes, signal: "_Event | None" = None
    ) -> "_Copy":
        """Begin a copy on the slot's stream, after `pages.ready`. With `signal`, copy pages into
        the slot and record the signal; without it, copy out of the slot into the pages."""
        with self.active() as cuda:
            stream = self._stream_of(slot)
            if pages.ready is not None:
                cuda.streamWaitEvent(stream, pages.ready.cuda_event)
            return self._queue_copy(cuda, pages, slot, key, stream, signal)

    def _queue_copy(
        self,
        cuda: Any,
        pages: Pages,
        slot: Slot,
        key: bytes,
        stream: int,
        signal: "_Event | None",
    ) -> "_Copy":
        plan = expand_key(key).tobytes() + np.array(pages.blocks, np.int32).tobytes()
        tiles = -(-pages.num_bytes // TILE_BYTES)
        scratch = self._scratch(slot, len(plan), SHARES_AT + tiles * SHARE_BYTES)
        slot.scratch = None  # unowned if the device fails below, since its state is unknown then
        upload = scratch.host + _VERDICT_BYTES
        ctypes.memmove(upload, plan, len(plan))
        scratch.verdict.value = 0
        try:
            if scratch.copy is None:  # the first launch: the sums are not zeroed yet
                cuda.memsetAsync(scratch.shares, 0, scratch.shares_bytes, stream)
            cuda.memcpyAsync(scratch.plan, upload, len(plan), cuda.memcpyHostToDevice, stream)
            self._kernel.launch(
                pages=pages,
                slot=slot.address,
                tag=slot.address + slot.capacity,
                plan=scratch.plan,
                shares=scratch.shares,
                verdict=scratch.host,
                to_slot=signal is not None,
                stream=stream,
            )
            if signal is not None:
                cuda.eventRecord(signal.number, stream)  # first: a copy is done when all of it is
            cuda.eventRecord(scratch.event.number, stream)
        except Exception:
            with suppress(Exception):  # its launched work has no other waiter
                cuda.streamSynchronize(stream)
            raise
        scratch.copy = _Copy(scratch)
        slot.scratch = scratch
        return scratch.copy

    def _scratch(self, slot: Slot, plan_bytes: int, shares_bytes: int) -> "_Scratch":
        """Return scratch memory of at least these sizes for the slot's next copy, after its
        previous copy is done."""
        scratch: _Scratch | None = slot.scratch
        if scratch is not None and not scratch.fits(plan_bytes, shares_bytes):
            self.release(slot)
            scratch = None
        if scratch is None:
            with self._lock:
                fitting = [s for s in self.spare if s.fits(plan_bytes, shares_bytes)]
                if fitting:
                    scratch = fitting[0]
                    self.spare.remove(scratch)
        if scratch is None:
            scratch = self._make_scratch(2 * plan_bytes, 2 * shares_bytes)
        slot.scratch = scratch
        if scratch.copy is not None:
            scratch.copy.wait()
        return scratch

    def _make_scratch(self, plan_bytes: int, shares_bytes: int) -> "_Scratch":
        with self.active() as cuda, ExitStack() as cleanup:
            plan = int(cuda.malloc(plan_bytes))
            cleanup.callback(cuda.free, plan)
            shares = int(cuda.malloc(shares_bytes))
            cleanup.callback(cuda.free, shares)
            flags = cuda.hostAllocMapped | cuda.hostAllocPortable
            host = int(cuda.hostAlloc(_VERDICT_BYTES + plan_bytes, flags))
            cleanup.callback(cuda.freeHost, host)
            event = _Event(self, int(cuda.eventCreateWithFlags(_LOCAL)))
            cleanup.pop_all()
        verdict = ctypes.c_uint32.from_address(host)
        return _Scratch(plan, plan_bytes, shares, shares_bytes, host, verdict, event)


@dataclass(slots=True)
class _Memory:
    device: CudaDevice
    address: int
    size: int
    free: str  # name of the runtime's function

    def handle(self) -> bytes:
        with self.device.active() as cuda:
            return bytes(cuda.ipcGetMemHandle(self.address))

    def close(self) -> None:
        with self.device.active() as cuda:
            getattr(cuda, self.free)(self.address)


@dataclass(eq=False, slots=True)
class _CudaStream:
    device: CudaDevice
    number: int  # its cudaStream_t
    num_users: int = 0  # connections

    def close(self) -> None:
        self.device.leave_stream(self)


@dataclass(slots=True)
class _Event:
    device: CudaDevice
    number: int  # its cudaEvent_t

    def handle(self) -> bytes:
        with self.device.active() as cuda:
            return bytes(cuda.ipcGetEventHandle(self.number))

    def done(self) -> bool:
        with self.device.active() as cuda:
            status = int(cuda.eventQuery(self.number))
            try:
                # Raises and clears the thread's error: otherwise torch's next check would report
                # it, if both use one libcudart.
                cuda.check_status(status)
            except Exception:
                if status != _NOT_READY:
                    raise
        return status == 0

    def wait(self) -> None:
        with self.device.active() as cuda:
            cuda.eventSynchronize(self.number)

    def close(self) -> None:
        with self.device.active() as cuda:
            cuda.eventDestroy(self.number)


@dataclass(eq=False, slots=True)
class _Scratch:
    """The memory that one copy between pool and slot needs: a plan, sums and a result. One slot at
    a time owns it, and it is reused until the process ends."""

    plan: int  # device: lanes and block numbers
    plan_bytes: int
    shares: int  # device: sums of tiles
    shares_bytes: int
    host: int  # pinned: the verdict, then the plan before its upload
    verdict: ctypes.c_uint32
    event: _Event  # recorded after the newest launch
    copy: "_Copy | None" = None  # of the newest launch

    def fits(self, plan_bytes: int, shares_bytes: int) -> bool:
        return plan_bytes <= self.plan_bytes and shares_bytes <= self.shares_bytes


class _Copy:
    """A copy that is queued on the device. When it is done, it reads its result (whether the bytes
    match their tag) before its scratch memory is reused."""

    def __init__(self, scratch: _Scratch) -> None:
        self._scratch: _Scratch | None = scratch
        self.intact = False

    def done(self) -> bool:
        scratch = self._scratch
        if scratch is not None and scratch.event.done():
            self._end(scratch)
        return self._scratch is None

    def wait(self) -> None:
        scratch = self._scratch
        if scratch is not None:
            scratch.event.wait()
            self._end(scratch)

    def _end(self, scratch: _Scratch) -> None:
        self.intact = scratch.verdict.value == INTACT
        self._scratch = None


def _uuid(index: int) -> bytes:
    import torch

    return uuids.UUID(str(torch.cuda.get_device_properties(index).uuid)).bytes
