"""The checker reports a violation of each rule, and none for records of the state machine."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.rings import CELLS, Notes, Played, whole_handoff

from pdserve.engine.handoff.protocol import (
    Claimed,
    ClaimGranted,
    Event,
    Filled,
    Handoff,
    HandoffEnded,
    PeerProgress,
    Phase,
    Picked,
    Reserved,
    Side,
    Tick,
    step,
)
from pdserve.engine.handoff.recorder import EventLog, Recording, RecordKind, check, merge
from pdserve.engine.handoff.recorder.event_log import Record

ATTEMPT = bytes(range(16))


def fresh(role: str) -> Notes:
    return Notes(role, os.urandom(16), count(0, 1_000_000).__next__)


def rules(*notes: Notes | Recording) -> list[str]:
    recordings = [n.recording() if isinstance(n, Notes) else n for n in notes]
    return [violation.rule for violation in check(recordings)]


def test_records_of_a_whole_hand_off_conform() -> None:
    assert rules(*whole_handoff(ATTEMPT)) == []


def number_of(notes: Notes, kind: str, nth: int = 0) -> int:
    """Return the position of the nth record of an event or kind."""
    names = [r.event.__name__ if r.event else RecordKind(r.code).name for r in notes.records]
    return [at for at, name in enumerate(names) if name == kind][nth]


def without(notes: Notes, kind: str, nth: int = 0) -> None:
    del notes.records[number_of(notes, kind, nth)]


def twice(notes: Notes, kind: str) -> None:
    at = number_of(notes, kind)
    notes.records.insert(at + 1, notes.records[at])


def changed(notes: Notes, name: str, **fields: int) -> None:
    at = number_of(notes, name)
    notes.records[at] = notes.records[at]._replace(**fields)


def again(notes: Notes, kind: str) -> None:
    """Repeat a record just before the process ends."""
    record = notes.records[number_of(notes, kind)]
    notes.records.insert(-1, record._replace(time_ns=notes.records[-1].time_ns))


def shifted(notes: Notes, ms: int) -> None:
    """Shift all records of the process in time."""
    records = [r._replace(time_ns=r.time_ns + ms * 1_000_000) for r in notes.records]
    notes.records[:] = records


Break = Callable[[Notes, Notes, Notes], object]
BROKEN: dict[str, tuple[Break, str]] = {
    "a frame is missing": (lambda r, d, p: without(d, "WRITTEN"), "committed with 3 of 6 cells"),
    "a cell twice": (
        lambda r, d, p: changed(d, "WRITTEN", argument=CELLS),
        "9 cells written, but 6 were requested",
    ),
    "a step is missing": (
        lambda r, d, p: without(d, "Reserved"),
        "the phase was claimed, but the record says receiving",
    ),
    "blocks taken twice": (lambda r, d, p: twice(d, "TAKEN"), "blocks were taken twice"),
    "blocks never taken": (lambda r, d, p: without(p, "TAKEN"), "the attempt has no blocks"),
    "blocks freed twice": (lambda r, d, p: twice(p, "FREED"), "the machine did not order this"),
    "blocks handed twice": (lambda r, d, p: twice(d, "HANDED"), "the machine did not order this"),
    "blocks never freed": (lambda r, d, p: without(p, "FREED"), "the record FREED is missing"),
    "blocks never handed": (lambda r, d, p: without(d, "HANDED"), "the record HANDED is missing"),
    "freed before the end": (
        lambda r, d, p: changed(d, "WRITTEN", code=int(RecordKind.FREED)),
        "the machine did not order this",
    ),
    "written after the end": (
        lambda r, d, p: again(d, "WRITTEN"),
        "a frame was written into blocks that the attempt does not have",
    ),
    "sent after the end": (
        lambda r, d, p: again(p, "SENT"),
        "a frame was sent from blocks that the attempt does not have",
    ),
    "another action": (
        lambda r, d, p: changed(d, "Claimed", argument=0),
        "the machine's actions are: queue_claim",
    ),
    "another phase": (
        lambda r, d, p: changed(p, "ClaimGranted", state=_state(Phase.CLAIMED, Phase.COMMITTED)),
        "the machine's next phase is receiving",
    ),
    "opened twice": (lambda r, d, p: twice(d, "OPENED"), "opened twice"),
    "never opened": (lambda r, d, p: without(p, "OPENED"), "no record opens the attempt"),
    "alive at the end": (
        lambda r, d, p: without(p, "Filled"),
        "the attempt had not ended when the process ended in order",
    ),
    "late, but waited for": (
        lambda r, d, p: changed(d, "WRITTEN", code=int(RecordKind.LATE)),
        "a frame was dropped as late while the attempt was receiving",
    ),
    "a frame from nowhere": (
        lambda r, d, p: changed(d, "WRITTEN", detail=99),
        "the frame was never sent",
    ),
    "a frame that grew": (
        lambda r, d, p: changed(p, "SENT", argument=1),
        "more cells were written than the frame has",
    ),
    "claimed first": (
        lambda r, d, p: shifted(d, -3),
        "claimed on receive before picked on send",
    ),
    "granted first": (
        lambda r, d, p: shifted(p, -3),
        "claim granted on send before reserved on receive",
    ),
    "done first": (
        lambda r, d, p: shifted(p, -9),
        "filled on send before filled on receive",
    ),
    "written first": (lambda r, d, p: shifted(p, 5), "the frame was written before it was sent"),
    "never done there": (
        lambda r, d, p: d.records.__delitem__(slice(number_of(d, "Filled"), None)),
        "filled on send without filled on receive",
    ),
    "unrouted": (
        lambda r, d, p: shifted(r, 5),
        "opened on receive before opened on route",
    ),
    "routed twice": (lambda r, d, p: twice(r, "OPENED"), "opened twice"),
    "closed twice": (lambda r, d, p: twice(r, "CLOSED"), "closed twice"),
    "closed unopened": (lambda r, d, p: without(r, "OPENED"), "no record opens the attempt"),
}


def _state(before: Phase, after: Phase) -> int:
    phases = tuple(Phase)
    return phases.index(before) << 6 | phases.index(after)


def test_a_broken_rule_is_found(subtests: pytest.Subtests) -> None:
    for name in BROKEN:
        with subtests.test(name):
            notes = whole_handoff(ATTEMPT)
            breaks, rule = BROKEN[name]
            breaks(*notes)  # type: ignore[arg-type]
            found = check([n.recording() for n in notes])
            assert rule in [violation.rule for violation in found]
            text = str(found[0])
            assert text.startswith(f"attempt {ATTEMPT[:8].hex()}: ")
            assert sum(line.startswith(">") for line in text.splitlines()) == 1


def test_two_receivers_of_one_attempt_are_reported() -> None:
    first, second = whole_handoff(ATTEMPT), whole_handoff(ATTEMPT)
    assert rules(*first, second[1]) == ["two processes receive the attempt"]


def test_a_tick_may_end_an_attempt_only_after_enough_time(subtests: pytest.Subtests) -> None:
    for reason, wait_s in product(("deadline", "peer silent", "peer frozen"), (0.2, 30.0)):
        with subtests.test(reason=reason, wait_s=wait_s):
            notes = fresh("decode")
            side = Played(notes, Side.RECEIVE, ATTEMPT)
            notes.records[0] = notes.records[0]._replace(argument=20_000)  # ms until its deadline
            side.does(Claimed())
            notes.clock = partial(int, wait_s * 1e9)
            before = replace(side.state, deadline=0.0 if reason == "deadline" else float("inf"))
            before = replace(before, heard=-1e9 if reason == "peer silent" else 100.0)
            before = replace(before, moved=-1e9 if reason == "peer frozen" else 100.0)
            after, actions = step(before, Tick(), 100.0)
            assert after.reason == reason
            side.event_log.step(ATTEMPT, Tick(), before, after, actions)
            assert len(rules(notes)) == (1 if wait_s < 1 else 0)


def test_a_commit_that_raised_needs_an_undone_record() -> None:
    notes = fresh("decode")
    side = Played(notes, Side.RECEIVE, ATTEMPT)
    side.does(Claimed())
    side.record(RecordKind.TAKEN, 3, 0)
    side.does(Reserved())
    before = side.state
    after, actions = step(before, Filled(), 0.0)
    side.event_log.step(ATTEMPT, Filled(), before, after, actions)
    assert rules(notes) == [], "the process may have been killed here"
    side.record(RecordKind.UNDONE)
    side.does(HandoffEnded("internal error"))
    notes.close()
    assert rules(notes) == []
    without(notes, "UNDONE")
    assert "the phase was committed, but the record says receiving" in rules(notes)


def test_overwritten_records_are_no_violation() -> None:
    router, decode, prefill = whole_handoff(ATTEMPT)
    for keep in range(1, len(decode.records)):
        cut = replace(decode.recording(), records=decode.records[-keep:], lost=1)
        assert rules(router, cut, prefill) == []
    assert rules(router, replace(decode.recording(), records=decode.records[3:]), prefill)


def test_missing_last_records_of_a_killed_process_are_no_violation() -> None:
    """The records are cut at any point; the sender may record later what it has received."""
    router, decode, prefill = whole_handoff(ATTEMPT)
    for end in range(1, len(prefill.records)):
        cut = replace(prefill.recording(), records=prefill.records[:end])
        last = cut.records[-1].time_ns
        heard = [record for record in decode.records if record.time_ns <= last]
        seen = replace(decode.recording(), records=heard)
        assert rules(router, seen, cut) == [], end


def test_clocks_of_different_hosts_do_not_order_events() -> None:
    router, decode, prefill = whole_handoff(ATTEMPT)
    far = replace(decode.recording(), host=b"another kernel's", wall_ns=-(10**12))
    assert not merge([far, prefill.recording()]).one_host
    assert rules(router, far, prefill) == []
    near = replace(far, host=prefill.recording().host, epoch_ns=10**12)
    assert rules(router, near, prefill)


HAPPY: dict[Side, list[Event]] = {
    Side.SEND: [Picked(), ClaimGranted(), Filled()],
    Side.RECEIVE: [Claimed(), Reserved(), Filled()],
}
EVENTS: list[Event] = [
    Claimed(),
    Picked(),
    Reserved(),
    ClaimGranted(),
    Tick(),
    PeerProgress(1.0, 2),
]
EVENTS += [HandoffEnded("cancel"), HandoffEnded("peer: cancel", peer_notified=True)]
reached: dict[Phase, int] = {}


@settings(max_examples=300)
@given(
    side=st.sampled_from(Side),
    events=st.lists(st.one_of(st.none(), st.sampled_from(EVENTS)), max_size=12),
    broken=st.integers(0, 11),
    bits=st.integers(1, 0xFFFF),
)
def test_every_run_of_the_machine_conforms_and_a_changed_action_is_reported(
    side: Side, events: list[Event | None], broken: int, bits: int
) -> None:
    """None in `events` means the next event of the normal course."""
    notes, happy = fresh("worker"), iter(HAPPY[side])
    played = Played(notes, side, ATTEMPT)
    for chosen in events:
        event = chosen or next(happy, Tick())
        taking = (Side.SEND, Phase.ADMITTED, Picked()), (Side.RECEIVE, Phase.CLAIMED, Reserved())
        if (side, played.state.phase, event) in taking:
            played.record(RecordKind.TAKEN, 3)
        played.does(event)
    reached[played.state.phase] = reached.get(played.state.phase, 0) + 1
    assert rules(notes) == []
    steps = [at for at, record in enumerate(notes.records) if record.event is not None]
    if steps:
        at = steps[broken % len(steps)]
        notes.records[at] = notes.records[at]._replace(argument=notes.records[at].argument ^ bits)
        assert any(rule.startswith("the machine's actions are") for rule in rules(notes))


def test_every_phase_was_reached() -> None:
    """Checks the counts of the test above."""
    print({phase.value: number for phase, number in reached.items()})
    assert reached[Phase.RELEASED] > 20
    assert reached[Phase.CLAIMED] > 20
    assert reached[Phase.RECEIVING] > 10
    assert reached[Phase.COMMITTED] > 10


def test_interleaved_attempts_are_checked_separately() -> None:
    many = [whole_handoff(os.urandom(16), n) for n in range(20)]
    records: list[Record] = []
    notes = fresh("decode")
    for _, decode, _ in many:
        records += decode.records[:-1]
    ordered = sorted(records, key=lambda record: record.time_ns)
    numbered = [r._replace(sequence=n) for n, r in enumerate(ordered, 1)]
    assert rules(replace(notes.recording(), records=numbered)) == []
    assert len(merge([replace(notes.recording(), records=numbered)]).attempts()) == 20


def test_the_event_log_omits_events_without_effect() -> None:
    notes = fresh("decode")
    trace, state = EventLog(notes), Handoff(Side.RECEIVE, 1.0)
    for event in (Tick(), PeerProgress(0.0, 1)):
        after, actions = step(state, event, 0.5)
        trace.step(ATTEMPT, event, state, after, actions)
    assert notes.records == []
    after, actions = step(state, Tick(), 1.0)
    trace.step(ATTEMPT, Tick(), state, after, actions)
    assert notes.recording().reason(notes.records[0].detail) == "deadline"
