"""A frame is written some layers at a time; in between, its attempt may end."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from engine_kit import ask
from memory_link import MemoryLink

from pdserve.engine.handoff import slices
from pdserve.engine.handoff.direct import Parcel
from pdserve.engine.handoff.frames import FrameHeader
from pdserve.engine.handoff.machine import Claimed
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.kv_identity import KvIdentity
from pdserve.engine.kv_spec import KvSpec, LayerGroup

LAYERS, TOKENS = 6, 8
GROUP = LayerGroup(tuple(range(LAYERS)), "full", 0, 1, 8, "bfloat16", 0, 1)
SPEC = KvSpec(4, (GROUP,))
BLOCKS = [3, 5]
SIZE = LAYERS * len(BLOCKS) * GROUP.block_bytes(4)


class Engine:
    """Gives every hand-off the same two blocks."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def stats(self) -> Any:
        blocks = SimpleNamespace(total=16, free=16, cached=0)
        return SimpleNamespace(blocks=blocks, parked_blocks=0, running=0)

    def reserve(self, request: Any, sender: bytes = b"") -> Any:
        return SimpleNamespace(num_tokens=TOKENS, blocks=[BLOCKS], first_block=[0], cached_tokens=0)

    def verified(self, reservation: Any, num_tokens: int) -> int:
        return num_tokens

    def release(self, reservation: Any) -> None:
        self.ended.append("released")

    def commit(self, reservation: Any) -> None:
        self.ended.append("committed")


class World:
    """A Receiver with one frame of six layers before it; each write takes 10 ms."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engine, self.kv = Engine(), KvCache(SPEC, 16)
        self.written: list[int] = []
        self.credits = 0
        write = self.kv.write

        def slow(group: int, layers: range, blocks: list[int], payload: memoryview) -> None:
            self.now += 0.01
            self.written += layers
            write(group, layers, blocks, payload)

        self.kv.write = slow  # type: ignore[method-assign]
        self.receiver = Receiver(
            self.engine,  # type: ignore[arg-type]
            self.kv,
            boot=b"d" * 16,
            identity=KvIdentity(b"test"),
            on_received=lambda received: None,
            on_lost=lambda attempt, reason: None,
            wake=lambda: None,
            progress=lambda: (0, True),
            clock=lambda: self.now,
        )
        self.attempt = os.urandom(16)
        request = ask(self.attempt.hex(), range(TOKENS + 1))
        ticket = self.receiver.admit(self.attempt, request, b"p" * 16, 1e9)
        assert ticket is not None
        (incoming,) = self.receiver._live.values()
        link: Any = MemoryLink(self.receiver, b"p" * 16, SIZE, lambda: self.now)
        link.credit = self.credit
        incoming.link = link
        self.receiver._advance(incoming, Claimed())
        self.receiver.poll(1.0)
        header = FrameHeader(
            ticket.id, 1, 0, 0, range(LAYERS), range(TOKENS), range(1), SIZE, b"\0" * 16
        )
        self.payload = os.urandom(SIZE)
        parcel = Parcel(incoming, link, header, memoryview(bytearray(self.payload)))
        self.receiver._parcels.append(parcel)

    def credit(self, header: FrameHeader) -> None:
        self.credits += 1

    def in_pool(self) -> bytes:
        return b"".join(self.kv.read(0, range(LAYERS), BLOCKS))


@pytest.mark.parametrize("layers", [1, 2, 4, 6, 100])
def test_a_slice_is_as_many_layers_as_its_bytes_allow(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", layers * SIZE // LAYERS)
    world = World()
    polls = 1
    while world.receiver.poll(0.005):
        assert world.engine.ended == []
        assert world.credits == 0
        polls += 1
    assert polls == -(-LAYERS // layers)
    assert world.written == list(range(LAYERS))
    assert world.in_pool() == world.payload
    assert (world.engine.ended, world.credits) == (["committed"], 1)


def test_with_time_left_all_of_it_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 1)
    world = World()
    assert not world.receiver.poll(0.5)
    assert (world.written, world.engine.ended) == (list(range(LAYERS)), ["committed"])


def test_an_attempt_that_ends_between_two_slices_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 1)
    world = World()
    assert world.receiver.poll(0.005)
    assert world.written == [0]
    assert world.receiver.cancel(world.attempt, "cancelled")
    assert world.engine.ended == ["released"], "at once, not after the frame"
    assert not world.receiver.poll(0.5)
    assert (world.written, world.credits) == ([0], 1)
    assert world.receiver.counters["late_frames"] == 1
