"""device_cupy.py on a fake GPU: two processes hand blocks over, in a seeded order of their
streams.

No copy takes wrong bytes, all of them end, and past faults can be restored.
"""

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import UUID

import numpy as np
import torch
from fakes.cuda import FakeCupy, FakeGpu, FakeRuntime

from pdserve.engine.kv import Pages
from pdserve.engine.transport import Copy, DeviceError
from pdserve.engine.transport.cuda_ipc import device_cupy
from pdserve.engine.transport.cuda_ipc.device_cupy import CudaDevice
from pdserve.engine.transport.cuda_ipc.transport import make_window
from pdserve.engine.transport.cuda_ipc.windows import DeviceWindow
from pdserve.engine.transport.device import HANDLE_BYTES, Slot
from pdserve.kernels.copy_hash import KEY_BYTES

BLOCK_BYTES, BLOCKS, LAYERS = 8192, 24, 2
SLOT_BYTES = 12 * BLOCK_BYTES
LIMIT = 400  # looks at unfinished copies, at the end

DAMAGED = "a tag is not that of its payload|did not arrive"
FAULTS = {  # and the error that reports each
    "late_zeros": DAMAGED,
    "late_windows": DAMAGED,
    "late_signals": "an event is destroyed before its record is done",
    "no_fence": DAMAGED,
    "no_system_fence": DAMAGED,
    "shared_exports": "beside the exported memory",
    "freed_early": "blocks were written that had a new owner",
    "before_grant": "wrong bytes were taken",
}


class WrongBytes(AssertionError):
    """A copy took wrong bytes."""


class Stuck(AssertionError):
    """A copy did not end, or its scratch cannot be used again."""


@contextmanager
def torch_without_a_gpu() -> Iterator[None]:
    properties = SimpleNamespace(uuid=UUID(int=7))
    with (
        patch.object(torch.cuda, "get_device_properties", lambda index: properties),
        patch.object(torch.cuda, "get_device_name", lambda index: "fake"),
    ):
        yield


class Process:
    """One side: its device, its pool, and the engine's stream, which is the legacy one."""

    def __init__(self, gpu: FakeGpu, **faults: bool) -> None:
        self.runtime = FakeRuntime(gpu, **faults)
        with torch_without_a_gpu(), patch.dict(sys.modules, {"cupy": FakeCupy(self.runtime)}):
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
        """Make a step of the engine, and record the event after it."""
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
    """A window of decode's, as seen by both sides."""

    window: DeviceWindow  # decode's
    memory: Any  # prefill's
    sending: list[Slot] = field(default_factory=list)
    frames: dict[int, Frame] = field(default_factory=dict)  # unfinished, by slot


class Handoff:
    """Prefill and decode on one GPU, without the protocol between them. Faults are those of
    FakeRuntime, and: with `freed_early` blocks are returned while a copy writes them, with
    `before_grant` copies do not wait for their blocks' previous owners.
    """

    def __init__(
        self, seed: int, freed_early: bool = False, before_grant: bool = False, **faults: bool
    ) -> None:
        self.rng = Random(seed)
        self.gpu = FakeGpu(self.rng)
        self.prefill = Process(self.gpu, **faults)
        self.decode = Process(self.gpu, **faults)
        self._freed_early, self._before_grant = freed_early, before_grant
        self.given_up: list[tuple[tuple[int, ...], Any]] = []  # blocks, and their next owner's
        self.connections: list[Connection] = []
        self.sources: set[int] = set()  # prefill's blocks of unfinished frames ...
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
            made.sending.append(Slot(at, SLOT_BYTES, signal, stream))
        self.connections.append(made)

    def send(self, connection: Connection) -> None:
        """Compute some blocks in a step, and copy them into a free slot."""
        free = [at for at in range(len(connection.sending)) if at not in connection.frames]
        sources, targets = (
            [block for block in range(1, BLOCKS) if block not in used]
            for used in (self.sources, self.targets)
        )
        if not free or not sources or not targets:
            return
        most = min(len(sources), len(targets), SLOT_BYTES // BLOCK_BYTES // LAYERS)
        count = self.rng.randint(1, most)
        source = tuple(self.rng.sample(sources, count))
        target = tuple(self.rng.sample(targets, count))
        frame = Frame(source, target, self.rng.randbytes(KEY_BYTES))
        self.sources.update(frame.source)
        self.targets.update(frame.target)

        def change() -> None:
            frame.payload = self._content(source)
            self.prefill.array()[:, source] = frame.payload

        slot_number = self.rng.choice(free)
        slot = connection.sending[slot_number]
        ready = self.prefill.compute(change)
        slot.newest = self.prefill.device.copy_out(
            self.prefill.pages(source, ready), slot, frame.key
        )
        connection.frames[slot_number] = frame
        self.seen["frames"] += 1

    def receive(self, connection: Connection) -> None:
        """Check unfinished copies, as decode does between two steps."""
        for slot_number, frame in list(connection.frames.items()):
            slot = connection.window.slots[slot_number]
            if frame.copy is None:
                if slot.signal.done():
                    granted = self.decode.compute(
                        self._step_of(frame.target, self._content(frame.target))
                    )
                    pages = self.decode.pages(frame.target, None if self._before_grant else granted)
                    frame.copy = self.decode.device.copy_in(pages, slot, frame.key)
                    self.seen["copies in"] += 1
            elif frame.copy.done():
                if not frame.copy.intact:
                    raise WrongBytes("a tag is not that of its payload")
                if not (self.decode.array()[:, frame.target] == frame.payload).all():
                    raise WrongBytes("wrong bytes were taken")
                self.sources.difference_update(frame.source)
                self.targets.difference_update(frame.target)
                del connection.frames[slot_number]
                self.seen["taken"] += 1

    def give_up(self) -> None:
        """Return decode's blocks while a copy writes them, as OpenBlocks.close does; their next
        owner computes.
        """
        under_way = [(c, at, frame) for c in self.connections for at, frame in c.frames.items()]
        for connection, slot_number, frame in under_way:
            if frame.copy is None or frame.copy.done():
                continue
            if not self._freed_early:
                frame.copy.wait()
            content = self._content(frame.target)
            self.decode.compute(self._step_of(frame.target, content))
            self.given_up.append((frame.target, content))
            self.sources.difference_update(frame.source)
            del connection.frames[slot_number]
            self.seen["given up"] += 1
            return

    def _step_of(self, blocks: tuple[int, ...], content: Any) -> Callable[[], None]:
        """Return the step of another owner of decode's blocks."""

        def change() -> None:
            self.decode.array()[:, blocks] = content

        return change

    def _content(self, blocks: tuple[int, ...]) -> Any:
        data = self.rng.randbytes(LAYERS * len(blocks) * BLOCK_BYTES)
        return np.frombuffer(data, np.uint8).reshape(LAYERS, len(blocks), BLOCK_BYTES)

    def leave(self, connection: Connection) -> None:
        """Close prefill's end, as CudaWriter.close does; frames that decode has not begun to take
        are lost, and the window is lent again.
        """
        if any(frame.copy is not None for frame in connection.frames.values()):
            return
        for slot in connection.sending:
            if slot.newest is not None:
                slot.newest.wait()
            self.prefill.device.release(slot)
            slot.signal.close()
        connection.sending[0].stream.close()  # type: ignore[union-attr]
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
        """Check a handshake's bytes, off the engine's thread while its stream is busy."""
        decode, prefill, size = self.decode.device, self.prefill.device, 256
        cell = decode.allocate(3 * size)
        theirs = Slot(cell.address, size, decode.make_signal())
        memory = prefill.open_memory(cell.handle(), cell.size)
        source_slot = Slot(memory.address, size, prefill.open_signal(theirs.signal.handle()))
        source = prefill.allocate(size)
        data, key = self.rng.randbytes(size), self.rng.randbytes(KEY_BYTES)
        prefill.put(source.address, data)
        sent = prefill.copy_out(Pages(source.address, size, size, range(1), (0,)), source_slot, key)
        self.gpu.until(theirs.signal.done)
        at = cell.address + 2 * size
        taken = decode.copy_in(Pages(at, size, size, range(1), (0,)), theirs, key)
        taken.wait()
        if not taken.intact or decode.get(at, size) != data:
            raise WrongBytes("a probe's bytes did not arrive")
        sent.wait()
        prefill.release(source_slot)
        decode.release(theirs)
        source_slot.signal.close()
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
                leaving = self.rng.choice(self.connections)
                if self.rng.random() < 0.5:
                    self.send(leaving)
                self.leave(leaving)
            elif choice < 0.28:
                self.receive(self.rng.choice(self.connections))
                self.give_up()
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
            raise Stuck("a copy does not end")
        self.gpu.drain()
        for blocks, content in self.given_up:
            if not (self.decode.array()[:, blocks] == content).all():
                raise WrongBytes("blocks were written that had a new owner")
        self._check_scratch()

    def _check_scratch(self) -> None:
        """Check that every scratch can be used again: it lies in a slot or is spare, and its copy
        is done.
        """
        slots = [slot for one in self.connections for slot in (*one.sending, *one.window.slots)]
        slots += [slot for window in self.spare for slot in window.slots]
        scratches = [slot.scratch for slot in slots if slot.scratch is not None]
        scratches += self.prefill.device.spare + self.decode.device.spare
        if len(scratches) != self.gpu.num_pinned:
            raise Stuck("a scratch is stuck: no connection has it")
        if not all(scratch.event.done() for scratch in scratches):
            raise Stuck("a scratch is stuck: its copy does not end")


def orders_until_found(fault: str, most: int) -> int:
    """Return how many orders it takes to find a fault of FAULTS; 0: more than `most`."""
    exports = 256 if fault == "shared_exports" else device_cupy.EXPORT_BYTES
    faults = {} if fault == "shared_exports" else {fault: True}
    with patch.object(device_cupy, "EXPORT_BYTES", exports):
        for seed in range(most):
            try:
                Handoff(seed, **faults).run()
            except (AssertionError, DeviceError) as err:
                if re.search(FAULTS[fault], str(err)) is None:
                    raise
                return seed + 1
    return 0
