"""A payload goes from the pool into a socket; a peer that does not read keeps no blocks in use."""

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from systems.eventually import LIMIT_S

from pdserve.engine.transport import WireClosed
from pdserve.engine.transport.base import IOV_MAX, READ_AHEAD_BYTES
from pdserve.engine.transport.tcp import AT_ONCE_S, TcpWire

SLOT_BYTES = 32 << 20  # more than both sockets buffer
RECORD = b"r" * 100


@pytest.fixture
def ends() -> Iterator[tuple[TcpWire, TcpWire]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    wires = TcpWire(near, SLOT_BYTES), TcpWire(far, SLOT_BYTES)
    yield wires
    for wire in wires:
        wire.close()


def sent(wire: TcpWire, parts: list[memoryview]) -> tuple[threading.Thread, threading.Event]:
    taken = threading.Event()
    thread = threading.Thread(target=wire.send_frame, args=(RECORD, 0, parts, taken.set))
    thread.start()
    return thread, taken


def test_blocks_are_released_before_the_peer_reads(ends: tuple[TcpWire, TcpWire]) -> None:
    near, far = ends
    pool = bytearray(os.urandom(SLOT_BYTES))
    payload = bytes(pool)
    began = time.monotonic()
    thread, taken = sent(near, [memoryview(pool)])
    assert taken.wait(LIMIT_S)
    assert time.monotonic() - began >= AT_ONCE_S, "the socket must first get time to take more"
    assert thread.is_alive()
    pool[:] = bytes(SLOT_BYTES)  # a new owner overwrites them
    arrived = bytearray(len(RECORD) + SLOT_BYTES)
    far.fill(memoryview(arrived))
    thread.join(10)
    assert arrived == RECORD + payload


def test_a_payload_with_more_parts_than_one_call_takes(ends: tuple[TcpWire, TcpWire]) -> None:
    near, far = ends
    payload = os.urandom(3 * IOV_MAX + 7)
    thread, taken = sent(near, [memoryview(payload)[at : at + 1] for at in range(len(payload))])
    arrived = bytearray(len(RECORD) + len(payload))
    far.fill(memoryview(arrived))
    thread.join(10)
    assert arrived == RECORD + payload
    assert taken.is_set()


@pytest.mark.parametrize("step", [1, 7, 100, 5_000])
def test_data_read_ahead_are_not_lost(ends: tuple[TcpWire, TcpWire], step: int) -> None:
    """Records and payloads alternate, and arrive in pieces with arbitrary boundaries."""
    near, far = ends
    sizes = [8, 92, 3, READ_AHEAD_BYTES, 8, 3 * READ_AHEAD_BYTES, 1, 5_000, 8]
    stream = os.urandom(sum(sizes))
    writer = threading.Thread(
        target=lambda: [near.write(stream[at : at + step]) for at in range(0, len(stream), step)]
    )
    writer.start()
    found = b""
    for number, size in enumerate(sizes):
        if number % 2:
            payload = bytearray(size)
            far.fill(memoryview(payload))
            found += payload
        else:
            found += far.take(size)
    writer.join(10)
    assert found == stream
    assert not far.readable
    near.write(b"12")
    assert far.take(1) == b"1"
    assert far.readable, "the rest was not read ahead"
    assert far.take(1) == b"2"


def test_a_write_to_a_closed_peer_fails(ends: tuple[TcpWire, TcpWire]) -> None:
    near, far = ends
    far.close()
    with pytest.raises(WireClosed):
        near.send_frame(RECORD, 0, [memoryview(bytes(SLOT_BYTES))], lambda: None)
