"""A slot has one owner at a time and is credited once, in any order of events."""

from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.engine.handoff.connection.slots import ReaderSlots, WriterSlots
from pdserve.engine.handoff.protocol import FrameError

COUNT = 4
reached: Counter[str] = Counter()


class SlotsMachine(RuleBasedStateMachine):
    """Both sides and the stream between them. A frame is (its number, how often it was sent
    before)."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.reader = WriterSlots(0), ReaderSlots(COUNT)
        self.writer.open(COUNT)
        self.filling: dict[int, int] = {}  # slot -> frame
        self.records: deque[tuple[int, int]] = deque()  # in transit: (slot, frame)
        self.lent: dict[int, int] = {}
        self.credits: deque[int] = deque()  # in transit back
        self.to_send: deque[int] = deque(range(100))
        self.damaged: set[int] = set()  # frames to be sent again
        self.taken: list[int] = []

    @precondition(lambda self: self.writer.num_free and self.to_send)
    @rule()
    def take(self) -> None:
        frame = self.to_send.popleft()
        slot = self.writer.take()
        assert slot not in {s for s, _ in self.records} | {*self.lent} | {*self.credits}
        if frame in self.damaged:
            reached["a resend"] += 1
        self.filling[slot] = frame

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), built=st.booleans())
    def fill(self, data: st.DataObject, built: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.filling)))
        frame = self.filling.pop(slot)
        if built:
            self.writer.sent(slot)
            self.records.append((slot, frame))
        else:
            reached["put back"] += 1
            self.writer.put_back(slot)

    @precondition(lambda self: self.records)
    @rule()
    def arrive(self) -> None:
        slot, frame = self.records.popleft()
        self.reader.lend(slot)
        self.lent[slot] = frame
        with pytest.raises(FrameError, match="without a credit"):
            self.reader.lend(slot)

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), intact=st.booleans())
    def land(self, data: st.DataObject, intact: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.lent)))
        frame = self.lent.pop(slot)
        self.reader.credit(slot)
        with pytest.raises(KeyError):
            self.reader.credit(slot)
        self.credits.append(slot)
        if intact:
            self.taken.append(frame)
        else:
            self.damaged.add(frame)
            self.to_send.appendleft(frame)

    @precondition(lambda self: self.credits)
    @rule()
    def credited(self) -> None:
        slot = self.credits.popleft()
        self.writer.credited(slot)
        with pytest.raises(FrameError, match="not in flight"):
            self.writer.credited(slot)
        reached["a credit"] += 1

    @invariant()
    def one_owner(self) -> None:
        owned = [*self.filling, *(s for s, _ in self.records), *self.lent, *self.credits]
        assert len(owned) == len(set(owned))
        assert self.writer.num_free == COUNT - len(owned)
        if not self.writer.num_free:
            reached["no free slot"] += 1
        assert len(self.taken) == len(set(self.taken))


def test_slots_in_random_sequences_of_events() -> None:
    class Case(SlotsMachine.TestCase):  # type: ignore[misc, name-defined]
        settings = settings(max_examples=60, stateful_step_count=60)

    Case("runTest").runTest()
    print(dict(reached))
    for state in ("a resend", "put back", "a credit", "no free slot"):
        assert reached[state] > 20, state


def test_a_slot_outside_the_window_is_refused() -> None:
    with pytest.raises(FrameError, match="out of range"):
        ReaderSlots(COUNT).lend(COUNT)
    writer = WriterSlots(COUNT)
    with pytest.raises(FrameError, match="second window"):
        writer.open(COUNT)
