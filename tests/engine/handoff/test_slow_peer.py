"""Detection of a slow prefill: after twice its longest chunk time, never because of a delay at
decode."""

from hypothesis import event, given
from hypothesis import strategies as st

from pdserve.engine.handoff.incoming import LOOK_S, SLOW_RATIO, SLOW_S, SlowPeerDetector

STEP_S = 0.1


def wait(
    pace: SlowPeerDetector, start: float, seconds: float
) -> tuple[SlowPeerDetector, float, float | None]:
    """Look every 0.1 s. Return the pace, the time, and the time at which it was first slow, if
    any."""
    for tick in range(1, round(seconds / STEP_S) + 1):
        now = start + tick * STEP_S
        pace = pace.look(now)
        if pace.slow(now):
            return pace, now, now
    return pace, start + seconds, None


def test_a_peer_is_not_slow_before_its_first_chunk_is_complete() -> None:
    pace = SlowPeerDetector.begin(5.0).arrived(6.0, chunk=False)
    assert wait(pace, 6.0, 60.0)[2] is None


@given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=20))
def test_a_peer_is_slow_after_twice_its_longest_chunk(chunks: list[float]) -> None:
    now, pace = 100.0, SlowPeerDetector.begin(100.0)
    for seconds in chunks:
        pace, now, slow = wait(pace, now, seconds)
        now = max(now, pace.chunk_at + seconds)
        if slow is not None:
            event("slow before the last chunk")
            return  # its chunk times differ that much
        pace = pace.look(now).arrived(now, chunk=True)
    limit = max(SLOW_S, SLOW_RATIO * max(chunks))
    event(f"the floor counts: {limit == SLOW_S}")
    _, _, slow = wait(pace, now, limit + 1.0)
    assert slow is not None
    assert limit < slow - now <= limit + 2 * STEP_S


def test_frames_of_a_chunk_count_as_progress() -> None:
    pace = SlowPeerDetector.begin(0.0).arrived(0.2, chunk=True)
    now = 0.2
    for _ in range(10):
        pace, now, slow = wait(pace, now, 0.9)
        assert slow is None
        pace = pace.arrived(now, chunk=False)
    assert wait(pace, now, SLOW_S + 1.0)[2] is not None


@given(st.integers(1, 1000))
def test_time_for_other_requests_of_prefill_does_not_count(ticks: int) -> None:
    pace, now = SlowPeerDetector.begin(0.0).arrived(0.1, chunk=True).look(0.1), 0.1
    for _ in range(ticks):
        now += STEP_S
        pace = pace.look(now, passed_over=True)
        assert not pace.slow(now)
    done = pace.arrived(now + 0.3, chunk=True)
    assert done.longest is not None
    assert done.longest < 0.31, "must not count toward the chunk's time either"
    _, _, slow = wait(pace, now, 2 * SLOW_S)
    assert slow is not None, "the peer must still continue now"
    assert slow - now <= SLOW_S + 2 * STEP_S


@given(st.floats(LOOK_S, 100.0))
def test_time_without_a_look_does_not_count(away_s: float) -> None:
    """Decode was stopped or computed for long, and has not read messages that arrived meanwhile."""
    pace = SlowPeerDetector.begin(0.0).arrived(0.1, chunk=True).look(0.1)
    back = 0.1 + away_s
    pace = pace.look(back)
    assert not pace.slow(back)
    _, _, slow = wait(pace, back, 2 * SLOW_S)
    assert slow is not None, "the peer must still continue now"
    assert slow - back <= SLOW_S + 2 * STEP_S
