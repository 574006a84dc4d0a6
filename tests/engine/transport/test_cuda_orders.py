"""device_cupy.py on a fake GPU, in many orders of its streams. No copy takes wrong bytes, all of
them end, and faults that it once had are found when they are put back."""

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from fake_cuda import FakeCupy, FakeGpu, FakeRuntime

from pdserve.engine.kv.pages import Pages
from pdserve.engine.transport.cuda_ipc import device_cupy
from pdserve.engine.transport.cuda_ipc.device_cupy import CudaDevice
from pdserve.engine.transport.cuda_ipc.transport import make_window
from pdserve.engine.transport.cuda_ipc.windows import DeviceWindow
from pdserve.engine.transport.device import HANDLE_BYTES, TAIL_BYTES, Copy, DeviceError, Slot
from pdserve.kernels.copy_hash import KEY_BYTES

ORDERS = 60
BLOCK_BYTES, BLOCKS, LAYERS = 8192, 24, 2
SLOT_BYTES = 12 * BLOCK_BYTES
LIMIT = 400  # looks at what is under way, at the end


class Faulty(AssertionError):
    """A copy took wrong bytes, or did not end."""


@pytest.fixture(autouse=True)
def torch_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    properties = SimpleNamespace(uuid=UUID(int=7))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "fake")
    default = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: default)


class Process:
    """One side: its device, its pool, and the engine's stream, which is the legacy one."""

    def __init__(self, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, **faults: bool) -> None:
        self.runtime = FakeRuntime(gpu, **faults)
        monkeypatch.setitem(sys.modules, "cupy", FakeCupy(self.runtime))
        self.device = CudaDevice(0)
        self.pool = self.runtime.malloc(LAYERS * BLOCKS * BLOCK_BYTES)

    def array(self) -> Any:
        size = LAYERS * BLOCKS * BLOCK_BYTES
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.pool))
        return flat.reshape(LAYERS, BLOCKS, BLOCK_BYTES)

    def pages(self, blocks: tuple[int, ...], ready: Any = None) -> Pages:
        layer_bytes = BLOCKS * BLOCK_BYTES
        return Pages(self.pool, layer_bytes, BLOCK_BYTES, range(LAYERS), blocks, ready)

    def compute(self, change: Callable[[], None]) -> Any:
        """A step of the engine, and the event behind it."""
        assert not self.runtime.last_error, "torch would report another's error as its own"

        def run() -> bool:
            change()
            return True

        self.runtime.gpu.give(self.runtime.legacy, run)
        number = self.runtime.eventCreateWithFlags(2)
        self.runtime.eventRecord(number, 0)
        return SimpleNamespace(cuda_event=number)


@dataclass(eq=False)
class Frame:
    source: tuple[int, ...]
    target: tuple[int, ...]
    key: bytes
    payload: Any = None  # once its step is computed
    copy: Copy | None = None  # decode's


@dataclass(eq=False)
class Connection:
    """A window of decode's, as both see it."""

    window: DeviceWindow  # decode's
    memory: Any  # prefill's
    ours: list[Slot] = field(default_factory=list)
    frames: dict[int, Frame] = field(default_factory=dict)  # under way, by slot


class Handoff:
    """Prefill and decode on one GPU, without the protocol between them."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, **faults: bool) -> None:
        self.rng = Random(seed)
        self.gpu = FakeGpu(self.rng)
        self.prefill = Process(self.gpu, monkeypatch, **faults)
        self.decode = Process(self.gpu, monkeypatch, **faults)
        self.connections: list[Connection] = []
        self.sources: set[int] = set()  # prefill's blocks of frames that are under way ...
        self.targets: set[int] = set()  # ... and decode's
        self.spare: list[DeviceWindow] = []
        self.seen: Counter[str] = Counter()

    def connect(self) -> None:
        if self.spare and self.rng.random() < 0.5:
            window = self.spare.pop()
            self.seen["lent again"] += 1
        else:
            window = make_window(self.decode.device, SLOT_BYTES)
            self.seen["windows"] += 1
        handles = window.handles()
        parts = [handles[at : at + HANDLE_BYTES] for at in range(0, len(handles), HANDLE_BYTES)]
        memory = self.prefill.device.open_memory(parts[0], window.memory.size)
        made = Connection(window, memory)
        stream = self.prefill.device.share_stream()
        for slot, handle in zip(window.slots, parts[1:], strict=True):
            at = memory.address + slot.address - window.memory.address
            signal = self.prefill.device.open_signal(handle)
            made.ours.append(Slot(at, SLOT_BYTES, signal, stream))
        self.connections.append(made)

    def send(self, connection: Connection) -> None:
        """A step computes some blocks, and they are copied into a free slot."""
        free = [at for at in range(len(connection.ours)) if at not in connection.frames]
        sources, targets = (
            [block for block in range(1, BLOCKS) if block not in used]
            for used in (self.sources, self.targets)
        )
        if not free or not sources:
            return
        count = self.rng.randint(1, min(len(sources), SLOT_BYTES // BLOCK_BYTES // LAYERS))
        source = tuple(self.rng.sample(sources, count))
        frame = Frame(source, tuple(self.rng.sample(targets, count)), self.rng.randbytes(KEY_BYTES))
        self.sources.update(frame.source)
        self.targets.update(frame.target)

        def change() -> None:
            shape = (LAYERS, count, BLOCK_BYTES)
            frame.payload = np.frombuffer(
                self.rng.randbytes(LAYERS * count * BLOCK_BYTES), np.uint8
            ).reshape(shape)
            self.prefill.array()[:, source] = frame.payload

        slot_number = self.rng.choice(free)
        slot = connection.ours[slot_number]
        ready = self.prefill.compute(change)
        slot.newest = self.prefill.device.copy_out(
            self.prefill.pages(source, ready), slot, frame.key
        )
        connection.frames[slot_number] = frame
        self.seen["frames"] += 1

    def receive(self, connection: Connection) -> None:
        """Looks at what is under way, as decode does between two steps."""
        for slot_number, frame in list(connection.frames.items()):
            slot = connection.window.slots[slot_number]
            if frame.copy is None:
                if slot.signal.done():
                    pages = self.decode.pages(frame.target)
                    frame.copy = self.decode.device.copy_in(pages, slot, frame.key)
                    self.seen["copies in"] += 1
            elif frame.copy.done():
                if not frame.copy.intact:
                    raise Faulty("a tag is not that of its payload")
                if not (self.decode.array()[:, frame.target] == frame.payload).all():
                    raise Faulty("wrong bytes were taken")
                self.sources.difference_update(frame.source)
                self.targets.difference_update(frame.target)
                del connection.frames[slot_number]
                self.seen["taken"] += 1

    def leave(self, connection: Connection) -> None:
        """Prefill closes its end, as CudaWriter.close does; what decode has not begun to take is
        lost, and its window is lent to somebody else."""
        if any(frame.copy is not None for frame in connection.frames.values()):
            return
        for slot in connection.ours:
            if slot.newest is not None:
                slot.newest.wait()
            self.prefill.device.release(slot)
            slot.signal.close()
        connection.ours[0].stream.close()  # type: ignore[union-attr]
        connection.memory.close()
        self.connections.remove(connection)
        for frame in connection.frames.values():
            self.sources.difference_update(frame.source)
            self.targets.difference_update(frame.target)
            self.seen["lost"] += 1
        for slot in connection.window.slots:
            self.decode.device.release(slot)
        self.spare.append(connection.window)
        self.seen["left"] += 1

    def probe(self) -> None:
        """A handshake's bytes, off the engine's thread while its stream is busy."""
        decode, prefill, size = self.decode.device, self.prefill.device, 256
        cell = decode.allocate(3 * size)
        theirs = Slot(cell.address, size, decode.make_signal())
        memory = prefill.open_memory(cell.handle(), cell.size)
        ours = Slot(memory.address, size, prefill.open_signal(theirs.signal.handle()))
        source = prefill.allocate(size)
        data, key = self.rng.randbytes(size), self.rng.randbytes(KEY_BYTES)
        prefill.put(source.address, data)
        sent = prefill.copy_out(Pages(source.address, size, size, range(1), (0,)), ours, key)
        self.gpu.until(theirs.signal.done)
        at = cell.address + 2 * size
        taken = decode.copy_aside(Pages(at, size, size, range(1), (0,)), theirs, key)
        taken.wait()
        if not taken.intact or decode.get(at, size) != data:
            raise Faulty("a probe's bytes did not arrive")
        sent.wait()
        prefill.release(ours)
        decode.release(theirs)
        ours.signal.close()
        memory.close()
        source.close()
        theirs.signal.close()
        cell.close()
        self.seen["probes"] += 1

    def run(self, actions: int = 40) -> None:
        for _ in range(actions):
            self.gpu.some()
            choice = self.rng.random()
            if choice < 0.1 or not self.connections:
                self.connect()
            elif choice < 0.15:
                self.probe()
            elif choice < 0.2:
                self.leave(self.rng.choice(self.connections))
            elif choice < 0.25:
                self.decode.compute(lambda: None)
            elif choice < 0.6:
                self.send(self.rng.choice(self.connections))
            else:
                self.receive(self.rng.choice(self.connections))
        for _ in range(LIMIT):
            for connection in self.connections:
                self.receive(connection)
            if not any(connection.frames for connection in self.connections):
                break
            self.gpu.advance()
        else:
            raise Faulty("a copy does not end")
        self.gpu.drain()


def orders(count: int, monkeypatch: pytest.MonkeyPatch, **faults: bool) -> Iterator[Handoff]:
    for seed in range(count):
        handoff = Handoff(seed, monkeypatch, **faults)
        handoff.run()
        yield handoff


def test_no_order_takes_wrong_bytes_or_leaves_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    for handoff in orders(ORDERS, monkeypatch):
        seen += handoff.seen
    assert seen["frames"] == seen["taken"] + seen["lost"] > 8 * ORDERS
    assert min(seen[name] for name in ("windows", "left", "lent again", "probes")) > ORDERS / 4
    assert seen["lost"]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("late_zeros", "a tag is not that of its payload|did not arrive"),
        ("late_windows", "a tag is not that of its payload|did not arrive"),
        ("late_signals", "an event is destroyed before its record is done"),
        ("no_fence", "a tag is not that of its payload|did not arrive"),
        ("no_system_fence", "a tag is not that of its payload|did not arrive"),
    ],
)
def test_faults_that_were_there_are_found(
    fault: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((AssertionError, DeviceError), match=error):
        for _ in orders(100, monkeypatch, **{fault: True}):
            pass


def test_a_handle_opens_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cupy, "EXPORT_BYTES", 256)
    with pytest.raises(DeviceError, match="beside the exported memory"):
        for _ in orders(100, monkeypatch):
            pass


def test_host_copies_do_not_wait_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(Random(1))
    process = Process(gpu, monkeypatch)
    gpu.give(process.runtime.legacy, lambda: False)  # a step that does not end
    memory = process.device.allocate(64)
    process.device.put(memory.address, bytes(range(64)))
    assert process.device.get(memory.address, 64) == bytes(range(64))


def slot_of(process: Process, stream: Any = None) -> Slot:
    memory = process.device.allocate(SLOT_BYTES + TAIL_BYTES)
    return Slot(memory.address, SLOT_BYTES, process.device.make_signal(), stream)


def test_a_copy_that_waits_holds_up_its_own_connection_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(Random(1))
    process = Process(gpu, monkeypatch)
    device, key = process.device, bytes(KEY_BYTES)
    slots = [slot_of(process, device.share_stream()) for _ in range(2)]
    probe = slot_of(process)
    gpu.give(process.runtime.legacy, lambda: False)  # a step that does not end
    held = device.copy_out(process.pages((1,), process.compute(lambda: None)), slots[0], key)
    gpu.until(device.copy_out(process.pages((2,)), slots[1], key).done)
    device.copy_out(process.pages((3,)), probe, key).wait()
    assert not held.done()


def test_connections_share_a_bounded_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Process(FakeGpu(Random(1)), monkeypatch).device
    shared = [device.share_stream() for _ in range(3 * device_cupy.MAX_STREAMS)]
    users = Counter(stream.number for stream in shared)
    assert set(users.values()) == {3}
    assert len(users) == device_cupy.MAX_STREAMS
    shared[5].close()
    assert device.share_stream() is shared[5]


def test_an_event_that_is_not_done_leaves_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(Random(1))
    process = Process(gpu, monkeypatch)
    signal = process.device.make_signal()
    gpu.give(process.runtime.legacy, lambda: False)
    process.runtime.eventRecord(signal.number, 0)
    assert not signal.done()
    assert process.runtime.last_error == 0
