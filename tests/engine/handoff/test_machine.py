"""The hand-off state machine: every path frees and reports exactly once."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.handoff.protocol import (
    Action,
    Claimed,
    ClaimGranted,
    Event,
    Filled,
    Handoff,
    HandoffEnded,
    Heard,
    PeerProgress,
    Phase,
    Picked,
    Reserved,
    Side,
    Tick,
    step,
)
from pdserve.engine.handoff.protocol.machine import FROZEN_S, SILENCE_S

INF = float("inf")
EVENTS = st.one_of(
    st.sampled_from([Claimed(), Picked(), Reserved(), ClaimGranted(), Filled(), Tick()]),
    st.builds(HandoffEnded, st.just("cancel"), st.booleans()),
    st.builds(Heard, st.floats(0, 50)),
    st.builds(PeerProgress, st.floats(0, 50), st.integers(0, 3)),
)
TIMED = st.lists(st.tuples(EVENTS, st.floats(0, 2)), max_size=30)


def run(state: Handoff, *events: Event, now: float = 0.0) -> tuple[Handoff, list[Action]]:
    done: list[Action] = []
    for event in events:
        state, actions = step(state, event, now)
        done += actions
    return state, done


def receive(deadline: float = INF) -> Handoff:
    return Handoff(Side.RECEIVE, deadline)


def send(deadline: float = INF) -> Handoff:
    return Handoff(Side.SEND, deadline)


def test_decode_path() -> None:
    state, done = run(receive(), Claimed(), Reserved(), Filled())
    assert state.phase is Phase.COMMITTED
    assert done == [
        Action.QUEUE_CLAIM,
        Action.GIVE_BACK_PROMISE,
        Action.SEND_GRANTED,
        Action.COMMIT,
        Action.SEND_COMPLETE,
        Action.REPORT_DONE,
    ]


def test_prefill_path() -> None:
    state, done = run(send(), Picked(), ClaimGranted(), Filled())
    assert state.phase is Phase.COMMITTED
    assert done == [
        Action.SEND_CLAIM,
        Action.SEND_FRAMES,
        Action.FREE_BLOCKS,
        Action.REPORT_DONE,
    ]


@pytest.mark.parametrize("side", Side)
@given(script=TIMED)
@settings(max_examples=400)
def test_resources_are_given_back_exactly_once(
    side: Side, script: list[tuple[Event, float]]
) -> None:
    state, now = Handoff(side, deadline=20.0), 0.0
    count: Counter[Action] = Counter()
    for event, wait in script:
        now += wait
        before = state
        state, actions = step(state, event, now)
        count.update(actions)
        if before.final:
            assert state == before
            assert set(actions) <= {Action.COUNT_STALE, Action.SEND_GONE}
        if before.holds and not state.holds:
            assert (Action.FREE_BLOCKS in actions) != (Action.COMMIT in actions)
        else:
            assert Action.FREE_BLOCKS not in actions
            assert Action.COMMIT not in actions
        assert (Action.GIVE_BACK_PROMISE in actions) == (before.promised and not state.promised)
    assert count[Action.REPORT_DONE] + count[Action.REPORT_LOST] == int(state.final)
    assert count[Action.GIVE_BACK_PROMISE] <= 1
    state, actions = step(state, Tick(), max(now, 20.0))
    assert state.final, "the deadline ends every attempt"


@pytest.mark.parametrize("start", [run(receive(), Claimed())[0], run(send(), Picked())[0]])
def test_a_silent_or_frozen_peer_ends_the_attempt(start: Handoff) -> None:
    state, done = run(start, Tick(), now=SILENCE_S - 0.01)
    assert (state.phase, done) == (Phase.CLAIMED, [])
    state, done = run(state, Tick(), now=SILENCE_S)
    assert (state.phase, state.reason) == (Phase.RELEASED, "peer silent")
    assert Action.SEND_ABORT in done

    state, now = start, 0.0
    while not state.final and now < 60:
        now += 0.5
        state, _ = run(state, PeerProgress(now, liveness=7), Tick(), now=now)
    assert state.reason == "peer frozen"
    assert now == pytest.approx(0.5 + FROZEN_S)


@pytest.mark.parametrize("event", [Claimed(), Picked()])
def test_a_peer_counts_as_frozen_only_by_time_since_the_claim(event: Claimed | Picked) -> None:
    """Its last message may be older, if it arrived while this engine was busy for long."""
    late = 3 * FROZEN_S
    state, _ = run(receive() if isinstance(event, Claimed) else send(), event, now=late)
    state, _ = run(state, PeerProgress(1.0, liveness=7), Heard(late), Tick(), now=late)
    assert state.phase is Phase.CLAIMED
    end = late + FROZEN_S
    for now, reason in ((end - 0.1, ""), (end, "peer frozen")):
        state, _ = run(state, Heard(now), Tick(), now=now)
        assert state.reason == reason


def test_a_peer_whose_counter_moves_is_not_frozen() -> None:
    state = run(receive(), Claimed())[0]
    for i in range(100):
        now = i * 0.5
        state, _ = run(state, PeerProgress(now, liveness=i // 10), Tick(), now=now)
    assert state.phase is Phase.CLAIMED


def test_no_progress_is_expected_before_the_claim() -> None:
    assert run(receive(), Tick(), now=1e6)[0].phase is Phase.ADMITTED


def test_a_late_claim_is_answered_gone() -> None:
    state, _ = run(receive(), HandoffEnded("cancel"))
    assert step(state, Claimed(), 1.0)[1] == (Action.COUNT_STALE, Action.SEND_GONE)


def test_a_duplicate_claim_changes_nothing() -> None:
    state, _ = run(receive(), Claimed(), Reserved())
    assert step(state, Claimed(), 5.0) == (state, (Action.COUNT_STALE,))


def test_the_peer_that_ended_the_attempt_gets_no_abort() -> None:
    state, _ = run(send(), Picked())
    assert Action.SEND_ABORT in step(state, HandoffEnded("cancel"), 1.0)[1]
    assert Action.SEND_ABORT not in step(state, HandoffEnded("gone", peer_notified=True), 1.0)[1]
    assert Action.LEAVE_QUEUE in step(send(), HandoffEnded("cancel"), 1.0)[1]
