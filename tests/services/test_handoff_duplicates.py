"""Records duplicated and credits damaged by the network: they are counted, and the connection
stays.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders.engine_kit import fake_engine
from systems.handoff_pair import Pair, local, request
from systems.link_ends import slots_returned

from pdserve.engine.handoff.connection import DataLink
from pdserve.engine.handoff.connection import link as link_module
from pdserve.engine.transport import SLOTS, Wire, shm, tcp
from pdserve.engine.transport.base import transports
from pdserve.engine.transport.cuda_ipc import wires

Parts = Sequence[memoryview]
Taken = Callable[[], None]
WRITERS: dict[str, Any] = {
    "tcp": tcp.TcpWire,
    "shm": shm.ShmWriter,
    "cuda_ipc": wires.CudaWriter,
}


def test_every_transport_has_a_row() -> None:
    assert set(WRITERS) == set(transports())


def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a frame for each block of each layer, so that slots are reused many times."""
    monkeypatch.setattr("pdserve.engine.handoff.protocol.frames.SLOT_BYTES", 1)


@contextmanager
def handed_over(transport: str, folder: Path) -> Iterator[Pair]:
    """Run a few hand-offs on one connection; check that nothing is lost or wrong, and that both
    ends are clean.
    """
    options: dict[str, Any] = {"num_blocks": 256, "prefix_cache": False}
    pair = Pair(fake_engine(**options), fake_engine(**options), transport, folder)
    try:
        writes: Counter[int] = Counter()
        write = pair.decode.kv.write

        def counted(group: int, layers: range, blocks: list[int], payload: memoryview) -> None:
            writes[len(layers) * len(blocks)] += 1
            write(group, layers, blocks, payload)

        pair.decode.kv.write = counted  # type: ignore[method-assign]
        sent = 0
        for seed in range(4):
            job = request(150, seed=seed, max_tokens=3)
            attempt = pair.hand_off(job)
            assert pair.answer(job) == local(job, **options)
            pair.wait(lambda one=attempt: one in pair.sent)  # type: ignore[misc]
            assert pair.sent[attempt].reason == ""
            sent += pair.sent[attempt].num_bytes
        assert not pair.lost
        assert pair.sender.counters["resent"] == 0
        received = sum(found.num_bytes for found in pair.received.values())
        assert received == sent, "a block was written twice"
        if transport != "cuda_ipc":
            assert writes.total() == pair.receiver.figures[transport].frames
        yield pair
        pair.assert_clean()
    finally:
        pair.close()


def frames_sent(pair: Pair) -> int:
    return sum(figures.frames for figures in pair.sender.figures.values())


def check_the_one_link(pair: Pair) -> None:
    (link,) = pair.sender.links
    assert link.open


def refused_credits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bytes]]:
    """Return (slot, mark) of the Credits that free no slot: its frame has been answered, or is
    another.
    """
    refused: list[tuple[int, bytes]] = []
    slot_returned = DataLink.slot_returned

    def noted(link: DataLink, slot: int, mark: bytes) -> bool:
        known = slot_returned(link, slot, mark)
        on_reader = threading.current_thread().name.endswith("-read")  # answers come elsewhere
        if on_reader and not known:
            refused.append((slot, mark))
        return known

    monkeypatch.setattr(DataLink, "slot_returned", noted)
    return refused


@pytest.mark.parametrize("transport", list(WRITERS))
def test_a_record_twice_in_a_row(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = WRITERS[transport]
    send = writer.send_frame

    def twice(self: Wire, record: bytes, slot: int, parts: Parts, taken: Taken) -> None:
        send(self, record, slot, parts, lambda: None)
        send(self, record, slot, parts, taken)

    monkeypatch.setattr(writer, "send_frame", twice)
    small_frames(monkeypatch)
    surplus = refused_credits(monkeypatch)
    with handed_over(transport, tmp_path) as pair:
        check_the_one_link(pair)
        frames = pair.receiver.figures[transport].frames
        pair.wait(lambda: pair.receiver.counters["duplicate_frames"] >= 1)
        duplicates = pair.receiver.counters["duplicate_frames"]
        late = pair.receiver.counters["late_frames"]  # their attempt was complete with the first
        assert frames > 100
        assert 0 < duplicates <= duplicates + late <= frames
        print(f"{frames} frames, {duplicates} duplicates, {len(surplus)} surplus credits")


@pytest.mark.parametrize("transport", list(WRITERS))
def test_a_record_repeated_while_its_slot_has_another_frame(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The duplicate's credit must not free the slot of the frame that is in it now."""
    writer = WRITERS[transport]
    send = writer.send_frame
    last: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    repeated = 0

    def late_again(self: Wire, record: bytes, slot: int, parts: Parts, taken: Taken) -> None:
        nonlocal repeated
        if old := last.get((id(self), slot)):
            self.write(*old)
            repeated += 1
        last[id(self), slot] = record, b"".join(parts) if transport == "tcp" else b""
        send(self, record, slot, parts, taken)

    monkeypatch.setattr(writer, "send_frame", late_again)
    small_frames(monkeypatch)
    surplus = refused_credits(monkeypatch)
    with handed_over(transport, tmp_path) as pair:
        check_the_one_link(pair)
        assert repeated > 100
        pair.wait(lambda: len(surplus) > 50)
        assert pair.receiver.counters["duplicate_frames"] > 50
        assert pair.receiver.counters["corrupt_frames"] == 0


def damage_credits(monkeypatch: pytest.MonkeyPatch, most: int) -> list[tuple[int, bytes]]:
    """Make decode's first credits name other frames; return their slots with the damaged marks."""
    damaged: list[tuple[int, bytes]] = []
    credit = link_module._credit

    def damage(slot: int, mark: bytes) -> bytes:
        if len(damaged) < most:
            mark = bytes([mark[0] ^ 1]) + mark[1:]
            damaged.append((slot, mark))
        return credit(slot, mark)

    monkeypatch.setattr(link_module, "_credit", damage)
    return damaged


@pytest.mark.parametrize("transport", list(WRITERS))
def test_slots_with_damaged_credits_return_with_the_answers(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise as many damaged credits as there are slots would stop the connection forever."""
    damaged = damage_credits(monkeypatch, SLOTS)
    small_frames(monkeypatch)
    refused, returned = refused_credits(monkeypatch), slots_returned(monkeypatch)
    with handed_over(transport, tmp_path) as pair:
        check_the_one_link(pair)
        pair.wait(lambda: sum(returned) == frames_sent(pair))
        assert len(damaged) == SLOTS
        pair.wait(lambda: set(damaged) <= set(refused))


@pytest.mark.parametrize("transport", list(WRITERS))
def test_the_end_of_a_hand_off_answers_its_last_frames(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode sends only Complete for them."""
    damaged, returned = damage_credits(monkeypatch, 1 << 20), slots_returned(monkeypatch)
    with handed_over(transport, tmp_path) as pair:
        check_the_one_link(pair)
        pair.wait(lambda: sum(returned) == frames_sent(pair))
        assert damaged
