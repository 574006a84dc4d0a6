"""A simulated GPU: the calls of engine/transport/cuda_ipc/device_cupy.py to CuPy and torch, in
host memory. Streams are queues; a seeded choice picks the queue of the next operation, so that
each seed gives another order. Kernels are the project's own .cu files, run on the host.

As in CUDA: malloc returns arbitrary contents, small allocations share a piece of 2 MiB that an
exported handle opens as a whole, memset returns at once, and nothing orders a non-blocking stream
with the legacy default stream 0. Touching memory that is not allocated is an error. Stricter than
CUDA: an event is destroyed only when its records are done, memory is freed only when no other
process has it open, pageable memory is read when a copy runs, and the host and other processes see
what a kernel has written without a system fence after it only some time after its event.
"""

import ctypes
import struct
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np

from pdserve.kernels.copy_hash import LANE_WORDS, TAG_BYTES, TILE_BYTES, UNIT_BYTES
from pdserve.kernels.cuda import SHARE_BYTES, SHARES_AT
from pdserve.kernels.cuda.copy_hash import FOLDER as KERNELS

PIECE_BYTES = 2 << 20
NOT_READY = 600
FENCES = DEVICE_FENCE, SYSTEM_FENCE = 1, 2  # __threadfence, __threadfence_system
HOST = Path(__file__).parent / "cuda_host"
Operation = Callable[[], bool]  # runs the operation; False: it has to wait
_HANDLE = struct.Struct("<Q")
_NUMBERS = (
    ctypes.c_uint64,  # base, layer_bytes, block_bytes
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_uint32,  # first_layer, num_blocks
    ctypes.c_uint32,
    ctypes.c_uint64,  # slot
    ctypes.c_uint32,  # num_units, to_slot
    ctypes.c_uint32,
    ctypes.c_uint64,  # plan, shares, tag, verdict
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_uint64,
)


@lru_cache(maxsize=1)
def copy_hash_on_host() -> Any:
    """kernels/cuda/copy_hash.cu, compiled for the host. Blocks of threads run in the given order,
    the threads of each from the last to the first with `reverse`; FENCES are the fences that take
    effect. Returns whether the host and other processes see what it has written.
    """
    folder = TemporaryDirectory()
    library = Path(folder.name) / "copy_hash.so"
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", f"-I{KERNELS}", f"-I{HOST}"]
    subprocess.run(["g++", *flags, str(HOST / "copy_hash.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).copy_hash_on_host
    function.argtypes = (
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_uint32,
        *_NUMBERS,
    )
    function.restype = ctypes.c_uint32
    function.folder = folder  # as long as the library is loaded
    return function


@dataclass(eq=False)
class _Event:
    interprocess: bool
    recorded: int = 0
    done: int = 0
    pending: int = 0  # records and waits in queues


@dataclass(eq=False)
class _Piece:
    """2 MiB or more of device memory."""

    owner: Any  # the process
    data: Any
    allocations: dict[int, int] = field(default_factory=dict)  # size by address
    used: int = 0
    opened: int = 0  # by other processes

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)


class FakeGpu:
    """Memory, events and streams of one GPU, which several processes use."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self._pieces: list[_Piece] = []
        self._pinned: dict[int, Any] = {}
        self.events: dict[int, _Event] = {}
        self.queues: dict[int, deque[Operation]] = {}
        self._last_number = 100
        self.num_operations = 0

    def number(self) -> int:
        """Return a new number for a stream or an event."""
        self._last_number += 1
        return self._last_number

    # --- memory

    def malloc(self, size: int, owner: Any) -> int:
        """Allocate memory with arbitrary contents. Small allocations of a process share a piece,
        as long as it has room.
        """
        for piece in self._pieces:
            at = -(-piece.used // 256) * 256
            if piece.owner is owner and size < PIECE_BYTES and at + size <= PIECE_BYTES:
                piece.used = at + size
                piece.allocations[piece.address + at] = size
                return piece.address + at
        data = np.full(max(size, PIECE_BYTES), self.rng.randrange(256), np.uint8)
        piece = _Piece(owner, data, {int(data.ctypes.data): size}, size)
        self._pieces.append(piece)
        return piece.address

    def free(self, address: int) -> None:
        piece = self.piece_of(address)
        assert not piece.opened, "memory is freed that another process has open"
        del piece.allocations[address]
        if not piece.allocations:
            self._pieces.remove(piece)

    def pinned(self, size: int) -> int:
        data = np.full(size, 0xEE, np.uint8)
        address = int(data.ctypes.data)
        self._pinned[address] = data
        return address

    def free_pinned(self, address: int) -> None:
        del self._pinned[address]

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def is_pinned(self, address: int) -> bool:
        return address in self._pinned

    def export(self, address: int) -> bytes:
        """Return the handle of an allocation."""
        piece = self.piece_of(address)
        assert address in piece.allocations, "a handle is of a whole allocation"
        others = piece.allocations.keys() - {address}
        assert not others, "another process could open data beside the exported memory"
        return _HANDLE.pack(address).ljust(64, b"\0")

    def allocated(self, address: int) -> int:
        """Return the size of an allocation."""
        return self.piece_of(address).allocations[address]

    def live(self, address: int, size: int) -> None:
        """Fail unless all of it is allocated device memory."""
        piece = self.piece_of(address)
        inside = any(
            at <= address and address + size <= at + has for at, has in piece.allocations.items()
        )
        assert inside, "memory that is not allocated is used"

    def piece_of(self, address: int) -> _Piece:
        for piece in self._pieces:
            if piece.address <= address < piece.address + piece.data.size:
                return piece
        raise AssertionError("memory that is not allocated is used")

    # --- streams

    def give(self, stream: int, operation: Operation) -> None:
        self.queues[stream].append(operation)

    def advance(self) -> bool:
        """Run one operation of some stream; False if none can continue."""
        streams = [stream for stream, queue in self.queues.items() if queue]
        self.rng.shuffle(streams)
        for stream in streams:
            if self.queues[stream][0]():
                self.queues[stream].popleft()
                self.num_operations += 1
                return True
        return False

    def some(self, most: int = 4) -> None:
        """Run what the GPU does between two calls of the host."""
        for _ in range(self.rng.randrange(most)):
            self.advance()

    def until(self, over: Callable[[], bool]) -> None:
        """Run operations until a condition holds, like a blocking host call."""
        while not over():
            assert self.advance(), "the host would wait forever"

    def drain(self) -> None:
        while self.advance():
            pass
        assert not any(self.queues.values()), "a stream waits forever"


class FakeRuntime:
    """`cupy.cuda.runtime` of one process. These options restore faults: with `late_zeros` and
    `late_windows` zeroing scratch, or a new allocation, is a memset on the legacy stream that no
    stream waits for; with `late_signals` a slot's signal is recorded after its copy's event; with
    `no_fence` and `no_system_fence` these fences of the kernel do nothing.
    """

    streamNonBlocking, memcpyHostToDevice, memcpyDeviceToHost = 1, 1, 2
    hostAllocMapped, hostAllocPortable = 2, 1

    def __init__(
        self,
        gpu: FakeGpu,
        late_zeros: bool = False,
        late_windows: bool = False,
        late_signals: bool = False,
        no_fence: bool = False,
        no_system_fence: bool = False,
    ) -> None:
        self.gpu = gpu
        self.legacy, self.unfenced = gpu.number(), gpu.number()
        gpu.queues[self.legacy] = deque()
        gpu.queues[self.unfenced] = deque()  # writes in flight
        off = no_fence * DEVICE_FENCE | no_system_fence * SYSTEM_FENCE
        self.fences = sum(FENCES) & ~off
        self._streams = [self.legacy]
        self._events: dict[int, _Event] = {}  # by this process's names for them
        self._late_zeros = late_zeros
        self._late_windows = late_windows
        self._zeroed_late = False
        self._late_signals = late_signals
        self._held_back: int | None = None
        self.last_error = 0  # what torch's next check would report

    def stream(self, number: int) -> int:
        return number or self.legacy

    def setDevice(self, index: int) -> None:
        self.gpu.some()

    def malloc(self, size: int) -> int:
        return self.gpu.malloc(size, self)

    def freeHost(self, address: int) -> None:
        self.gpu.free_pinned(address)

    def free(self, address: int) -> None:
        self._finish()
        self.gpu.free(address)

    def _finish(self) -> None:
        """Run this process's own work first, as cudaFree does."""
        self.gpu.until(lambda: not any(self.gpu.queues[stream] for stream in self._streams))

    def hostAlloc(self, size: int, flags: int) -> int:
        return self.gpu.pinned(size)

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        window = self.gpu.allocated(address) >= PIECE_BYTES
        if self._late_windows if window else self._late_zeros:
            stream, self._zeroed_late = 0, window

        def run() -> bool:
            self.gpu.live(address, size)
            ctypes.memset(address, value, size)
            return True

        self.gpu.give(self.stream(stream), run)

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        device = target if kind == self.memcpyHostToDevice else source

        def run() -> bool:
            self.gpu.live(device, size)
            ctypes.memmove(target, source, size)
            return True

        self.gpu.give(self.stream(stream), run)

    def streamCreateWithFlags(self, flags: int) -> int:
        assert flags == self.streamNonBlocking
        number = self.gpu.number()
        self.gpu.queues[number] = deque()
        self._streams.append(number)
        return number

    def streamSynchronize(self, stream: int) -> None:
        if self._zeroed_late:
            self._zeroed_late = False
            return
        self.gpu.until(lambda: not self.gpu.queues[self.stream(stream)])

    def streamWaitEvent(self, stream: int, number: int) -> None:
        event = self._event(number)
        awaited = event.recorded
        event.pending += 1

        def run() -> bool:
            if event.done < awaited:
                return False
            event.pending -= 1
            return True

        self.gpu.give(self.stream(stream), run)

    def eventCreateWithFlags(self, flags: int) -> int:
        number = self.gpu.number()
        self._events[number] = self.gpu.events[number] = _Event(interprocess=bool(flags & 4))
        return number

    def eventRecord(self, number: int, stream: int) -> None:
        event = self._event(number)
        if self._late_signals and event.interprocess:
            self._held_back = number
            self._late_signals = False
            return
        event.recorded += 1
        event.pending += 1
        mine = event.recorded

        def run() -> bool:
            event.done = max(event.done, mine)
            event.pending -= 1
            return True

        self.gpu.give(self.stream(stream), run)
        if self._held_back is not None:
            signal, self._held_back = self._held_back, None
            self.eventRecord(signal, stream)
            self._late_signals = True

    def eventQuery(self, number: int) -> int:
        self.gpu.some()
        event = self._event(number)
        self.last_error = 0 if event.done == event.recorded else NOT_READY
        return self.last_error

    def check_status(self, status: int) -> None:
        """Like CuPy's: take the error from the thread, and raise it."""
        if status:
            self.last_error = 0
            raise RuntimeError(f"CUDA error {status}")

    def eventSynchronize(self, number: int) -> None:
        event = self._event(number)
        self.gpu.until(lambda: event.done == event.recorded)

    def eventDestroy(self, number: int) -> None:
        event = self._event(number)
        assert not event.pending, "an event is destroyed before its record is done"
        del self._events[number]

    def ipcGetMemHandle(self, address: int) -> bytes:
        return self.gpu.export(address)

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        (address,) = _HANDLE.unpack(handle[: _HANDLE.size])
        self.gpu.live(address, 1)
        self.gpu.piece_of(address).opened += 1
        return int(address)

    def ipcCloseMemHandle(self, address: int) -> None:
        self._finish()
        self.gpu.piece_of(address).opened -= 1

    def ipcGetEventHandle(self, number: int) -> bytes:
        assert self._event(number).interprocess
        return _HANDLE.pack(number).ljust(64, b"\0")

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        (exported,) = _HANDLE.unpack(handle[: _HANDLE.size])
        number = self.gpu.number()
        self._events[number] = self.gpu.events[exported]
        return number

    def _event(self, number: int) -> _Event:
        assert number in self._events, "a destroyed event is used"
        return self._events[number]


class FakeCupy:
    """The module `cupy` of one process."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime
        self._current = 0
        self.cuda = SimpleNamespace(
            runtime=runtime, Stream=SimpleNamespace(from_external=self._use)
        )

    def _use(self, stream: Any) -> AbstractContextManager[None]:
        version, number = stream.__cuda_stream__()
        assert version == 0

        @contextmanager
        def used() -> Any:
            self._current = number
            try:
                yield
            finally:
                self._current = 0

        return used()

    def RawModule(self, code: str, options: tuple[str, ...]) -> Any:
        assert "copy_hash_kernel" in code
        return SimpleNamespace(get_function=lambda name: self._launch)

    def _launch(self, grid: tuple[int], threads: tuple[int], numbers: tuple[Any, ...]) -> None:
        gpu, stream = self._runtime.gpu, self._runtime.stream(self._current)
        (count,), values = grid, [int(number) for number in numbers]
        order = list(range(count))
        gpu.rng.shuffle(order)
        reverse = gpu.rng.randrange(2)

        def run() -> bool:
            base, layer_bytes, block_bytes, first_layer, num_blocks, slot, num_units = values[:7]
            to_slot, plan, shares, tag, verdict = values[7:]
            num_bytes = num_units * UNIT_BYTES
            assert -(-num_bytes // TILE_BYTES) == count
            lanes = 2 * LANE_WORDS * 8
            used = [
                (slot, num_bytes),
                (plan, lanes + 4 * num_blocks),
                (shares, SHARES_AT + count * SHARE_BYTES),
                (tag, TAG_BYTES),
            ]
            for address, size in used:
                gpu.live(address, size)
            assert gpu.is_pinned(verdict)
            for block in (ctypes.c_int32 * num_blocks).from_address(plan + lanes):
                for layer in range(num_bytes // (num_blocks * block_bytes)):
                    at = base + (first_layer + layer) * layer_bytes + block * block_bytes
                    gpu.live(at, block_bytes)
            seen = [(slot, num_bytes), (tag, TAG_BYTES)] if to_slot else [(verdict, 4)]
            before = [ctypes.string_at(*one) for one in seen]
            blocks = (ctypes.c_uint32 * count)(*order)
            if not copy_hash_on_host()(blocks, count, reverse, self._runtime.fences, *values):
                self._come_late(seen, before)
            return True

        gpu.give(stream, run)

    def _come_late(self, places: list[tuple[int, int]], before: list[bytes]) -> None:
        """Delay what was written into these places."""
        gpu = self._runtime.gpu
        for (address, size), old in zip(places, before, strict=True):
            new = ctypes.string_at(address, size)
            ctypes.memmove(address, old, size)

            def run(address: int = address, new: bytes = new) -> bool:
                ctypes.memmove(address, new, len(new))
                return True

            gpu.give(self._runtime.unfenced, run)
