"""The connection's thread writes frames into an attempt's blocks while the attempt owns them."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from builders.engine_kit import ask
from fakes.memory_link import MemoryLink
from systems.eventually import LIMIT_S

from pdserve.engine.handoff.open_blocks import BlocksReleased, OpenBlocks
from pdserve.engine.handoff.protocol import Bitmap, Claimed, Domain, FrameError, FrameHeader
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.kv import KvIdentity, KvSpec, LayerGroup
from pdserve.engine.kv.cache import KvCache

LAYERS, SIZE, BLOCKS = 6, 4, [3, 5, 9, 2]
TOKENS = SIZE * len(BLOCKS)
GROUP = LayerGroup(tuple(range(LAYERS)), "full", 0, 1, 8, "bfloat16", 0, 1)
SPEC = KvSpec(SIZE, (GROUP,))


def header(
    layers: range,
    blocks: range,
    sequence: int = 1,
    ticket: bytes = b"t" * 16,
    tag: bytes = bytes(16),
) -> FrameHeader:
    size = len(layers) * len(blocks) * GROUP.block_bytes(SIZE)
    tokens = range(blocks.start * SIZE, blocks.stop * SIZE)
    return FrameHeader(ticket, sequence, 0, 0, layers, tokens, range(1), size, tag)


class Gate:
    """A write into the pool that blocks halfway until it is released."""

    def __init__(self, kv: KvCache) -> None:
        self.entered, self.free = threading.Event(), threading.Event()
        write = kv.write

        def held(*args: Any) -> None:
            self.entered.set()
            assert self.free.wait(LIMIT_S)
            write(*args)

        kv.write = held  # type: ignore[method-assign]


def open_blocks() -> OpenBlocks:
    return OpenBlocks([BLOCKS], Bitmap(SPEC, TOKENS, [0]))


def content(kv: KvCache) -> bytes:
    return b"".join(kv.read(0, range(LAYERS), BLOCKS))


def payload_of(head: FrameHeader) -> memoryview:
    return memoryview(os.urandom(head.payload_bytes))


def test_a_frame_is_written_once_to_its_blocks() -> None:
    kv, blocks = KvCache(SPEC, [16]), open_blocks()
    head = header(range(2, 4), range(1, 3))
    payload = payload_of(head)
    piece = blocks.write(kv, head, payload)
    assert piece is not None
    assert b"".join(kv.read(0, range(2, 4), [5, 9])) == payload
    assert blocks.write(kv, header(range(2, 4), range(1, 3), 2), payload_of(head)) is None
    assert b"".join(kv.read(0, range(2, 4), [5, 9])) == payload, "verified blocks must not change"


def test_a_frame_that_does_not_fit_changes_nothing(subtests: pytest.Subtests) -> None:
    for layers, blocks, reason in (
        (range(3, 5), range(1, 3), "overlaps"),  # half of it is already written
        (range(2, 4), range(2, 4), "overlaps"),
        (range(6, 7), range(1), "6 layers"),
        (range(1), range(3, 5), "not requested"),
    ):
        with subtests.test(reason, layers=layers, blocks=blocks):
            kv, inside = KvCache(SPEC, [16]), open_blocks()
            first = header(range(2, 4), range(1, 3))
            inside.write(kv, first, payload_of(first))
            before = content(kv)
            head = header(layers, blocks, 2)
            with pytest.raises(FrameError, match=reason):
                inside.write(kv, head, payload_of(head))
            assert content(kv) == before


def test_leading_blocks_are_those_complete_in_every_layer() -> None:
    kv, blocks = KvCache(SPEC, [16]), open_blocks()
    seen = []
    for layers, run in [
        (range(3), range(2)),
        (range(3, 6), range(1, 2)),
        (range(3, 6), range(1)),
        (range(6), range(2, 4)),
    ]:
        head = header(layers, run)
        blocks.write(kv, head, payload_of(head))
        seen.append(blocks.num_leading)
    assert seen == [0, 0, 2, 4]


def test_closing_waits_for_the_current_write_and_prevents_others() -> None:
    kv, blocks = KvCache(SPEC, [16]), open_blocks()
    gate = Gate(kv)
    first, second = header(range(3), range(4)), header(range(3, 6), range(4), 2)
    payload = payload_of(first)
    writer = threading.Thread(target=blocks.write, args=(kv, first, payload))
    closer = threading.Thread(target=blocks.close)
    writer.start()
    assert gate.entered.wait(LIMIT_S)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive(), "closed while the blocks were being written"
    gate.free.set()
    closer.join(LIMIT_S)
    writer.join(LIMIT_S)
    assert not closer.is_alive()
    before = content(kv)
    assert bytes(payload) == before[: len(payload)]
    with pytest.raises(BlocksReleased):
        blocks.write(kv, second, payload_of(second))
    assert content(kv) == before


class Engine:
    """An engine that gives every hand-off the same blocks."""

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
    """A Receiver with one attempt that has its blocks; a call of `frame` delivers a frame."""

    def __init__(self) -> None:
        self.engine, self.kv = Engine(), KvCache(SPEC, [16])
        self.wakes = 0
        self.lost: list[str] = []
        self.receiver = Receiver(
            self.engine,  # type: ignore[arg-type]
            self.kv,
            incarnation=b"d" * 16,
            identity=KvIdentity(b"test"),
            on_received=lambda received: None,
            on_lost=lambda attempt, reason: self.lost.append(reason),
            wake=self._wake,
            liveness=lambda: 0,
        )
        self.attempt = os.urandom(16)
        request = ask(self.attempt.hex(), range(TOKENS + 1))
        ticket = self.receiver.admit(self.attempt, request, b"p" * 16, 1e9)
        assert ticket is not None
        self.ticket = ticket.id
        (self.incoming,) = self.receiver.live
        self.link: Any = MemoryLink(self.receiver, b"p" * 16, 1 << 16, lambda: 0.0)
        self.link.hello = SimpleNamespace(identity=KvIdentity(b"test"))
        self.incoming.link = self.link
        self.receiver._advance(self.incoming, Claimed())
        self.receiver.poll()
        self.wakes = 0

    def _wake(self) -> None:
        self.wakes += 1

    def frame(self, layers: range, blocks: range, sequence: int) -> bytes:
        """Deliver a frame's payload as the connection's thread does. Return its bytes."""
        head = header(layers, blocks, sequence)
        payload = payload_of(head)
        tag = self.incoming.peer_key.tag(Domain.PAYLOAD, sequence, payload)
        self.receiver.payload(
            self.link, header(layers, blocks, sequence, self.ticket, tag), payload
        )
        return bytes(payload)


def test_the_engine_thread_wakes_only_for_whole_blocks() -> None:
    world = World()
    sent = b"".join(world.frame(range(n, n + 1), range(4), n + 1) for n in range(LAYERS - 1))
    assert (world.wakes, world.engine.ended) == (0, [])
    sent += world.frame(range(LAYERS - 1, LAYERS), range(4), LAYERS)
    assert world.wakes == 1
    assert content(world.kv) == sent
    world.receiver.poll()
    assert world.engine.ended == ["committed"]


def test_an_attempt_that_ends_during_a_write_frees_its_blocks_afterwards() -> None:
    world = World()
    gate = Gate(world.kv)
    writer = threading.Thread(target=world.frame, args=(range(3), range(4), 1))
    writer.start()
    assert gate.entered.wait(LIMIT_S)
    engine = threading.Thread(target=world.receiver.cancel, args=(world.attempt, "cancelled"))
    engine.start()
    engine.join(0.1)
    assert world.engine.ended == [], "the attempt ended during the write"
    gate.free.set()
    engine.join(LIMIT_S)
    writer.join(LIMIT_S)
    assert world.engine.ended == ["released"]
    before = content(world.kv)
    world.frame(range(3, 6), range(4), 2)
    world.receiver.poll()
    assert content(world.kv) == before
    assert world.receiver.counters["late_frames"] == 2
    assert world.engine.ended == ["released"]


def test_a_failing_pool_ends_only_its_attempt() -> None:
    world = World()

    def fail(*args: Any) -> None:
        raise ValueError("a bug")

    world.kv.write = fail  # type: ignore[method-assign]
    world.frame(range(3), range(4), 1)
    world.receiver.poll()
    world.receiver.poll()
    assert world.lost == ["internal error"]
    assert world.engine.ended == ["released"]
    assert world.link.open
