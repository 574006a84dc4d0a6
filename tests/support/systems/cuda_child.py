"""One end of a cuda_ipc connection on the fake device, in a process that a test kills or freezes.

    python -m systems.cuda_child half|late|flood|serve FOLDER

half: its copy stops in the middle, after its frame was sent. late: sends a frame, and for each
line on stdin writes into its slot again. flood: sends frames without end. serve: decode, which
takes a few frames and then holds them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fakes.device import FakeCopy, FakeDevice, FakeMemory, FakeSignal, array_at, pages_of

from pdserve.engine.handoff.connection import DataLink
from pdserve.engine.handoff.protocol import TAG_BYTES, FrameHeader
from pdserve.engine.kv import Pages
from pdserve.engine.transport import Frame, FrameJob, Target, TransportOptions, Wire
from pdserve.engine.transport.cuda_ipc.transport import CudaIpcTransport
from pdserve.engine.transport.device import Slot
from systems.eventually import wait_until
from systems.link_ends import (
    COPY_KEY,
    HELLO,
    INCARNATION,
    SLOT_BYTES,
    TICKET,
    Recorder,
    claim_record,
)

SIZE = SLOT_BYTES // 2


def payload(sequence: int) -> np.ndarray:
    return np.full(SIZE, sequence % 251, np.uint8)


class HalfDevice(FakeDevice):
    """A device whose copy into the window never gets further than its first half."""

    def copy_out(self, pages: Pages, slot: Slot, key: bytes) -> FakeCopy:
        if slot.capacity < SLOT_BYTES:  # the handshake's
            return super().copy_out(pages, slot, key)
        assert isinstance(slot.signal, FakeSignal)
        slot.signal.counts[0] += 1
        half = pages.num_bytes // 2
        array_at(slot.address, half)[:] = array_at(pages.base, half)
        return FakeCopy()


class StubbornDevice(FakeDevice):
    """A device that can write forever into what it has opened, like an unfinished copy."""

    def open_memory(self, handle: bytes, size: int) -> FakeMemory:
        memory = super().open_memory(handle, size)
        memory.close = lambda: None  # type: ignore[method-assign]
        return memory


DEVICES = {"half": HalfDevice, "late": StubbornDevice, "flood": FakeDevice}


def frame(sequence: int, sent: Callable[[Slot], None]) -> FrameJob:
    data = payload(sequence)

    @contextmanager
    def build(slot: int, sink: Any) -> Iterator[Frame]:
        sink.copy_out(pages_of(data), COPY_KEY)
        sent(sink.slot)
        header = FrameHeader(
            TICKET, sequence, slot, 0, range(1), range(1), range(1), SIZE, bytes(16)
        )
        yield Frame(header.pack() + bytes(TAG_BYTES), [])

    return build


def transport(folder: str, device: FakeDevice) -> CudaIpcTransport:
    options = TransportOptions("", folder, SLOT_BYTES, lambda: device, SLOT_BYTES)
    return CudaIpcTransport(options)


def dial(folder: str, device: FakeDevice) -> DataLink:
    wire = transport(folder, device).dial(Target("", INCARNATION), 5.0)
    hello = replace(HELLO, transport="cuda_ipc")
    link = DataLink.dial(wire, "cuda_ipc", Recorder(), hello, 5.0)
    link.post(claim_record())
    return link


def write(mode: str, folder: str) -> None:
    link = dial(folder, DEVICES[mode]())
    slots: list[Slot] = []
    if mode == "flood":
        for sequence in range(1_000_000):
            link.push(frame(sequence, slots.append))
            wait_until(lambda up_to=sequence: len(slots) + 4 >= up_to or not link.open)
    link.push(frame(7, slots.append))
    for _ in sys.stdin:
        array_at(slots[0].address, SIZE)[:] = 0xEE
        print("late", flush=True)


def serve(folder: str) -> None:
    decode = Recorder()

    def accept(wire: Wire) -> None:
        DataLink(wire, "cuda_ipc", decode).accept()

    transport(folder, FakeDevice()).listen(INCARNATION, accept)
    print("listening", flush=True)
    seen = 0
    while True:
        wait_until(lambda old=seen: len(decode.payloads) > old, limit_s=3600, pause_s=0.0005)
        for _ in range(len(decode.payloads) - seen):
            print("frame", flush=True)
            seen += 1
        if seen >= 3:
            decode.hold()


if __name__ == "__main__":
    mode, where = sys.argv[1], sys.argv[2]
    assert Path(where).is_dir()
    serve(where) if mode == "serve" else write(mode, where)
