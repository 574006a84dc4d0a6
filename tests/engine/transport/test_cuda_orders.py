"""device_cupy.py on a fake GPU, under many orders of its streams
(support/systems/cuda_orders.py)."""

import ctypes
from collections import Counter
from random import Random
from typing import Any

import pytest
from fakes.cuda import FakeGpu
from systems.cuda_orders import FAULTS, SLOT_BYTES, Handoff, Process, orders_until_found

from pdserve.engine.transport.cuda_ipc import device_cupy
from pdserve.engine.transport.device import TAIL_BYTES, Slot
from pdserve.kernels.copy_hash import KEY_BYTES


@pytest.mark.parametrize(
    "orders",
    [12, pytest.param(2_000, marks=[pytest.mark.extended, pytest.mark.timeout(1800)])],
)
def test_no_order_copies_wrong_bytes_or_leaves_a_copy_unfinished(orders: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(orders):
        handoff = Handoff(seed)
        handoff.run()
        seen += handoff.seen
    assert seen["frames"] == seen["taken"] + seen["lost"] + seen["given up"] > 8 * orders
    assert min(seen[name] for name in ("windows", "left", "lent again", "probes")) > orders / 4
    assert seen["lost"]
    assert seen["given up"] > orders / 10


@pytest.mark.parametrize("fault", FAULTS)
def test_former_faults_are_found(fault: str) -> None:
    assert orders_until_found(fault, 100)


def test_host_copies_do_not_wait_for_the_engine() -> None:
    gpu = FakeGpu(Random(1))
    process = Process(gpu)
    gpu.give(process.runtime.legacy, lambda: False)  # a step that never ends
    memory = process.device.allocate(64)
    process.device.put(memory.address, bytes(range(64)))
    assert process.device.get(memory.address, 64) == bytes(range(64))


def test_host_copies_and_zeros_are_complete_on_return() -> None:
    """Another process may access the memory at once, without synchronization with this one's
    streams."""
    device = Process(FakeGpu(Random(1))).device
    used = device.allocate(64)
    device.put(used.address, bytes(range(64)))
    assert ctypes.string_at(used.address, 64) == bytes(range(64))
    device.put(used.address, b"\xff" * 64)
    assert ctypes.string_at(used.address, 64) == b"\xff" * 64
    assert ctypes.string_at(device.allocate(64).address, 64) == bytes(64)


def slot_of(process: Process, stream: Any = None) -> Slot:
    memory = process.device.allocate(SLOT_BYTES + TAIL_BYTES)
    return Slot(memory.address, SLOT_BYTES, process.device.make_signal(), stream)


def test_a_waiting_copy_delays_only_its_connection() -> None:
    gpu = FakeGpu(Random(1))
    process = Process(gpu)
    device, key = process.device, bytes(KEY_BYTES)
    slots = [slot_of(process, device.share_stream()) for _ in range(2)]
    probe = slot_of(process)
    gpu.give(process.runtime.legacy, lambda: False)  # a step that never ends
    held = device.copy_out(process.pages((1,), process.compute(lambda: None)), slots[0], key)
    gpu.until(device.copy_out(process.pages((2,)), slots[1], key).done)
    device.copy_out(process.pages((3,)), probe, key).wait()
    assert not held.done()


def test_connections_share_a_bounded_number_of_streams() -> None:
    device = Process(FakeGpu(Random(1))).device
    shared = [device.share_stream() for _ in range(3 * device_cupy.MAX_STREAMS)]
    users = Counter(stream.number for stream in shared)
    assert set(users.values()) == {3}
    assert len(users) == device_cupy.MAX_STREAMS
    shared[5].close()
    assert device.share_stream() is shared[5]


def test_an_unfinished_event_leaves_no_error() -> None:
    gpu = FakeGpu(Random(1))
    process = Process(gpu)
    signal = process.device.make_signal()
    gpu.give(process.runtime.legacy, lambda: False)
    process.runtime.eventRecord(signal.number, 0)
    assert not signal.done()
    assert process.runtime.last_error == 0
