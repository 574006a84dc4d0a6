"""A device for cuda_ipc without a GPU: memory is memfds, events are counters in shared memory, and
a copy runs the GPU's own source, built for the host (kernels/cuda/copy_hash.h).

A handle names the process and its file, so another process opens it while this one lives.
"""

import ctypes
import mmap
import os
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from systems.eventually import LIMIT_S

from pdserve.engine.kv import Pages
from pdserve.engine.transport import DeviceError
from pdserve.engine.transport.device import HANDLE_BYTES, Slot
from pdserve.kernels import _native
from pdserve.kernels.copy_hash import TAG_BYTES, expand_key

UUID = b"fake GPU number 0"[:16]
_HANDLE = struct.Struct("<4sIIQ")


class FakeMemory:
    def __init__(self, fd: int, size: int) -> None:
        self._fd, self.size = fd, size
        self._map = mmap.mmap(fd, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def handle(self) -> bytes:
        return _HANDLE.pack(b"FAKE", os.getpid(), self._fd, self.size).ljust(HANDLE_BYTES, b"\0")

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


def allocate(size: int) -> FakeMemory:
    fd = os.memfd_create("fake device")
    os.ftruncate(fd, size)
    return FakeMemory(fd, size)


def opened(handle: bytes, size: int) -> FakeMemory:
    magic, pid, number, has = _HANDLE.unpack(handle[: _HANDLE.size])
    if magic != b"FAKE" or has != size:
        raise DeviceError("invalid handle")
    try:
        return FakeMemory(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR), size)
    except OSError as err:
        raise DeviceError(f"invalid handle: {err.strerror}") from None


class FakeSignal:
    """[recorded, done]: numbers of records; they differ while a copy is in progress. As with CUDA,
    only the newest record counts: a record whose process has died is forgotten with the next.
    """

    def __init__(self, memory: FakeMemory) -> None:
        self._memory = memory
        self.counts = array_at(memory.address, 16).view(np.uint64)

    def handle(self) -> bytes:
        return self._memory.handle()

    def done(self) -> bool:
        return bool(self.counts[0] == self.counts[1])

    def close(self) -> None:
        self.counts = np.zeros(2, np.uint64)
        self._memory.close()


class FakeCopy:
    def __init__(self) -> None:
        self.intact = False
        self.ended = threading.Event()

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        if not self.ended.wait(LIMIT_S):
            raise DeviceError("the simulated copy was not run")


class FakeStream:
    def __init__(self, device: "FakeDevice") -> None:
        self._device = device

    def close(self) -> None:
        self._device.num["streams"] -= 1


class FakeDevice:
    """A fake device. `pause` makes copies wait on the device until `resume`; `spoil` is called
    with every copy into a slot after it was made. `num` counts copies "out" of and "in" to pools,
    and open "streams".
    """

    name = "fake"

    def __init__(self, uuid: bytes = UUID) -> None:
        self.uuid = uuid
        self.peers: dict[bytes, tuple[str, str] | None] = {}
        self.num: Counter[str] = Counter()
        self.spoil: Callable[[Slot], None] = lambda slot: None
        self.most_bytes = 1 << 40
        self._queue: deque[Callable[[], None]] = deque()
        self._paused = False
        self._lock = threading.RLock()

    def unreachable(self, uuid: bytes) -> tuple[str, str] | None:
        if uuid == self.uuid:
            return None
        return self.peers.get(uuid, ("other_gpu", f"GPU {uuid!r} is not visible to this process"))

    def allocate(self, size: int) -> FakeMemory:
        if size > self.most_bytes:
            raise DeviceError("out of memory")
        self.most_bytes -= size
        return allocate(size)

    def open_memory(self, handle: bytes, size: int) -> FakeMemory:
        return opened(handle, size)

    def make_signal(self) -> FakeSignal:
        return FakeSignal(allocate(16))

    def open_signal(self, handle: bytes) -> FakeSignal:
        return FakeSignal(opened(handle, 16))

    def share_stream(self) -> FakeStream:
        self.num["streams"] += 1
        return FakeStream(self)

    def copy_out(self, pages: Pages, slot: Slot, key: bytes) -> FakeCopy:
        copy, signal = FakeCopy(), slot.signal
        assert isinstance(signal, FakeSignal)
        signal.counts[0] += 1
        number = int(signal.counts[0])

        def run() -> None:
            tag = copied(pages, slot, key, True)
            array_at(slot.address + slot.capacity, TAG_BYTES)[:] = np.frombuffer(tag, np.uint8)
            self.spoil(slot)
            signal.counts[1] = number
            self.num["out"] += 1
            copy.ended.set()

        self._give(run)
        return copy

    def copy_in(self, pages: Pages, slot: Slot, key: bytes) -> FakeCopy:
        copy = FakeCopy()

        def run() -> None:
            tag = copied(pages, slot, key, False)
            copy.intact = tag == array_at(slot.address + slot.capacity, TAG_BYTES).tobytes()
            self.num["in"] += 1
            copy.ended.set()

        self._give(run)
        return copy

    def release(self, slot: Slot) -> None:
        pass

    def put(self, address: int, data: bytes) -> None:
        array_at(address, len(data))[:] = np.frombuffer(data, np.uint8)

    def get(self, address: int, size: int) -> bytes:
        return array_at(address, size).tobytes()

    def pause(self) -> None:
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        with self._lock:
            self._paused = False
            while self._queue:
                self._queue.popleft()()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def _give(self, run: Callable[[], None]) -> None:
        with self._lock:  # one after the other, like a stream
            if self._paused:
                self._queue.append(run)
            else:
                run()


def array_at(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def copied(pages: Pages, slot: Slot, key: bytes, to_slot: bool) -> bytes:
    """Run the kernel on the host; return the tag."""
    last = pages.layers[-1] * pages.layer_bytes + (max(pages.blocks) + 1) * pages.block_bytes
    tag = _native.copy_and_hash(
        array_at(pages.base, last),
        pages.layer_bytes,
        pages.block_bytes,
        pages.layers[0],
        len(pages.layers),
        np.array(pages.blocks, np.int32),
        array_at(slot.address, pages.num_bytes),
        expand_key(key),
        to_slot,
    )
    return struct.pack("<QQ", *tag)


def pages_of(data: NDArray[np.uint8]) -> Pages:
    """Return a host array as one block; its size is a multiple of 16."""
    return Pages(data.ctypes.data, data.nbytes, data.nbytes, range(1), (0,))
