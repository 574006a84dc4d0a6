"""Frames copied on a device: in any order of events, no verified block is written again, and no
freed block is written afterwards."""

import random
import threading
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders.engine_kit import fake_engine
from fakes.device import FakeDevice
from systems.eventually import LIMIT_S, wait_until
from systems.handoff_pair import Pair, request

from pdserve.engine.handoff.device_frames import DeviceFrames, ReceivedFrame
from pdserve.engine.handoff.open_blocks import OpenBlocks
from pdserve.engine.handoff.protocol import Bitmap, FrameHeader, Piece, cut, frames
from pdserve.engine.kv import KvSpec, LayerGroup, Pages
from pdserve.engine.transport import SLOTS, DeviceError

SPEC = KvSpec(4, (LayerGroup((0, 1, 2), "full", 0, 1, 8, "bfloat16", 0, 1),))
BLOCK = SPEC.groups[0].block_bytes(4)
NUM_TOKENS = 40
GOOD, BAD = "good", "bad"
READY = object()  # the event passed with the grant
Cell = tuple[int, int]  # layer, block


class Pool:
    """Contents of each cell. Until it is done, a launched copy may have written any part of its
    cells."""

    def __init__(self) -> None:
        self.cells: dict[Cell, str] = {}

    def pages(self, group: int, layers: range, blocks: Sequence[int], ready: Any) -> Pages:
        return Pages(0, 0, BLOCK, layers, tuple(blocks), ready)


class Copy:
    def __init__(self, pool: Pool, pages: Pages, content: str) -> None:
        self._pool, self._content = pool, content
        self._cells = [(layer, block) for layer in pages.layers for block in pages.blocks]
        self.intact = content == GOOD
        self.over = self.waited = False
        for cell in self._cells:
            pool.cells[cell] = "half"

    def end(self) -> None:
        self.over = True
        for cell in self._cells:
            self._pool.cells[cell] = self._content

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        if not self.over:
            self.waited = True
            self.end()


class DeviceSource:
    def __init__(self, run: "Run", content: str) -> None:
        self._run, self.content, self.is_ready = run, content, False

    def ready(self) -> bool:
        return self.is_ready

    def copy_in(self, pages: Pages, key: bytes) -> Copy:
        assert self.is_ready
        assert pages.ready is READY, "the copy would not wait for work that the engine has launched"
        copy = Copy(self._run.pool, pages, self.content)
        self._run.num_begun += 1
        self._run.copies.append(copy)
        return copy


class Run:
    """A DeviceFrames object, and an attempt whose frames come in random order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = Pool()
        self.copies: list[Copy] = []
        self.credits: Counter[int] = Counter()
        self.link: Any = SimpleNamespace(credit=lambda header: self.credits.update([header.slot]))
        self.attempt: Any = SimpleNamespace(
            bitmap=Bitmap(SPEC, NUM_TOKENS, (0,)),
            num_written=0,
            peer_key=SimpleNamespace(copy_key=lambda sequence: bytes(32)),
            blocks=OpenBlocks([range(NUM_TOKENS // 4)], Bitmap(SPEC, NUM_TOKENS, (0,)), READY),
        )
        self.outcomes: Counter[str] = Counter()
        self.nacked: deque[Piece] = deque()
        self.sources: list[DeviceSource] = []
        self.num_sent = self.num_begun = 0
        self.frames = DeviceFrames(self.pool, self)

    @property
    def num_waiting(self) -> int:
        """Return the number of frames whose copy has not begun, without those found to be
        duplicates."""
        return self.num_sent - self.num_begun - self.outcomes["duplicate"]

    def send(self, piece: Piece, content: str) -> None:
        header = FrameHeader(
            ticket=bytes(16),
            sequence=self.num_sent,
            slot=self.num_sent,  # unique, to count its credits
            group=0,
            layers=piece.layers,
            tokens=range(piece.blocks.start * 4, piece.blocks.stop * 4),
            heads=range(1),
            payload_bytes=len(piece.layers) * len(piece.blocks) * BLOCK,
            payload_tag=bytes(16),
        )
        self.num_sent += 1
        self.sources.append(DeviceSource(self, content))
        self.frames.arrived(ReceivedFrame(self.attempt, self.link, header, self.sources[-1]))

    def accepted(self, frame: ReceivedFrame, written: Piece | None, wake: bool = True) -> None:
        self.outcomes["duplicate" if written is None else "taken"] += 1
        if written is not None:
            assert self.credits[frame.header.slot] == 1, (
                "the answer came before the credit of its slot"
            )
            self.attempt.bitmap.add(written)

    def damaged(self, frame: ReceivedFrame) -> None:
        self.outcomes["damaged"] += 1
        assert self.credits[frame.header.slot] == 1, "the answer came before the credit of its slot"
        self.nacked.append(self.attempt.bitmap.piece(frame.header))

    def refused(self, frame: ReceivedFrame, error: Exception) -> None:
        self.outcomes[str(error)] += 1

    def late(self, frame: ReceivedFrame) -> None:
        self.outcomes["late"] += 1

    def failed(self, frame: ReceivedFrame, error: Exception) -> None:
        self.outcomes[f"failed: {error}"] += 1

    def check(self) -> None:
        """Check that every verified cell holds the right content."""
        for layer in range(len(SPEC.groups[0].layers)):
            for block in range(NUM_TOKENS // 4):
                cell = Piece(0, range(layer, layer + 1), range(block, block + 1))
                if self.attempt.bitmap.has(cell):
                    assert self.pool.cells[layer, block] == GOOD

    def something_happens(self) -> bool:
        """Let one event happen on the device or at the peer. Return False if none is left."""
        waiting = [i for i in self.sources if not i.is_ready]
        running = [c for c in self.copies if not c.over]
        choice = self.rng.random()
        if waiting and (choice < 0.5 or not running):
            self.rng.choice(waiting).is_ready = True
        elif running:
            running[0].end()  # in stream order
        return bool(waiting or running)


def test_duplicates_and_damaged_frames_in_any_order() -> None:
    totals: Counter[str] = Counter()
    deferred = 0
    for seed in range(400):
        run = Run(seed)
        pieces = list(cut(SPEC, 0, range(NUM_TOKENS // 4), 3 * BLOCK))
        assert len(pieces) > 5
        to_send = [(piece, run.rng.choice((GOOD, GOOD, BAD))) for piece in pieces * 2]
        run.rng.shuffle(to_send)
        while to_send or run.nacked or run.frames.busy:
            if to_send and run.rng.random() < 0.5:
                run.send(*to_send.pop())
            elif run.nacked:
                run.send(run.nacked.popleft(), run.rng.choice((GOOD, BAD)))
            run.something_happens()
            run.check()
            run.frames.poll()
            deferred += run.num_waiting
            run.check()
        assert run.attempt.bitmap.complete
        assert all(run.pool.cells[cell] == GOOD for cell in run.pool.cells)
        assert run.credits == Counter(range(run.num_sent)), "each slot must be credited once"
        totals += run.outcomes
    print(dict(totals), deferred)
    assert min(totals["taken"], totals["duplicate"], totals["damaged"], deferred) > 500


def test_a_frame_that_overlaps_verified_blocks_in_part_is_refused() -> None:
    run = Run(0)
    run.send(Piece(0, range(2), range(3)), GOOD)
    run.sources[0].is_ready = True
    run.frames.poll()
    run.send(Piece(0, range(1, 3), range(2, 5)), BAD)
    run.sources[1].is_ready = True
    run.frames.poll()
    assert run.frames.busy
    assert len(run.copies) == 1, "the frame must wait for the overlapping copy"
    run.copies[0].end()
    run.frames.poll()
    assert not run.frames.busy
    assert len(run.copies) == 1
    assert run.outcomes == {"taken": 1, "the frame overlaps verified blocks": 1}
    assert run.credits == {0: 1, 1: 1}
    run.check()


@pytest.mark.parametrize("when", ["before the copy", "during the copy"])
def test_an_attempt_may_end_before_and_during_a_copy(when: str) -> None:
    run = Run(0)
    run.send(Piece(0, range(1), range(2)), GOOD)
    if when == "during the copy":
        run.sources[0].is_ready = True
        run.frames.poll()
    run.attempt.blocks.close()
    if when == "during the copy":
        assert run.copies[0].waited, "not waited for, although its blocks may get another owner"
    run.frames.poll()
    assert not run.frames.busy
    assert run.outcomes == {"late": 1}
    assert run.credits == {0: 1}


def test_a_peer_that_never_finishes_delays_no_other_frame() -> None:
    run = Run(0)
    run.send(Piece(0, range(1), range(2)), GOOD)
    run.send(Piece(0, range(1, 2), range(2)), GOOD)
    run.sources[1].is_ready = True
    run.frames.poll()
    run.copies[0].end()
    run.frames.poll()
    assert run.frames.busy, "the first frame must still wait"
    assert run.outcomes == {"taken": 1}


def test_a_device_failure_ends_only_its_attempt() -> None:
    run = Run(0)
    run.send(Piece(0, range(1), range(2)), GOOD)
    run.sources[0].is_ready = True
    run.frames.poll()

    def broken() -> bool:
        raise DeviceError("the device has failed")

    run.copies[0].done = broken  # type: ignore[method-assign]
    run.frames.poll()
    assert not run.frames.busy
    assert run.outcomes == {"failed: the device has failed": 1}
    assert run.credits == {0: 1}


def test_a_copy_is_credited_once_even_if_its_verdict_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(0)
    run.send(Piece(0, range(1), range(2)), GOOD)
    run.sources[0].is_ready = True
    run.frames.poll()
    run.copies[0].done = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(run, "accepted", lambda *_: 1 / 0, raising=False)
    for _ in range(3):
        with suppress(ZeroDivisionError):
            run.frames.poll()
    assert run.credits == {0: 1}
    assert not run.frames.busy


def test_frames_arrive_during_a_single_step_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are many times more frames than slots of the connection."""
    monkeypatch.setattr(frames, "SLOT_BYTES", 1)  # so that a frame is one block of one layer
    device = FakeDevice()
    decode = fake_engine()
    pair = Pair(fake_engine(), decode, "cuda_ipc", tmp_path, device=lambda: device)
    reserve = decode.reserve

    def pause_and_reserve(*body: Any) -> Any:
        device.pause()
        return reserve(*body)

    monkeypatch.setattr(decode, "reserve", pause_and_reserve)
    computing, over = threading.Event(), threading.Event()

    def step(engine: Any) -> None:
        computing.set()
        over.wait(LIMIT_S)

    try:
        pair.hand_off(request(200))
        wait_until(lambda: device.num_queued == SLOTS)
        pair.decode_thread.post(step)
        assert computing.wait(LIMIT_S)
        device.resume()
        (incoming,) = pair.receiver.live
        num_blocks = -(-incoming.num_tokens // decode.kv.spec.block_size)
        wait_until(lambda: incoming.num_written == num_blocks, limit_s=5.0)
        assert device.num["in"] > 4 * SLOTS
    finally:
        over.set()
        pair.close()
