"""The lease of a served request: adopted once, by the highest epoch, and freed exactly once."""

from collections import Counter
from random import Random

import pytest

from pdserve.services.decode.lease_machine import (
    PARK_S,
    AttemptEnded,
    BlocksEvicted,
    Event,
    Lease,
    LeaseAction,
    LeasePhase,
    LeaseTick,
    Resumed,
    SessionLost,
    step,
)

KINDS = (SessionLost, SessionLost, Resumed, Resumed, LeaseTick, BlocksEvicted, AttemptEnded)
WALKS = 4000


def run(lease: Lease, *events: Event, now: float = 0.0) -> tuple[Lease, list[LeaseAction]]:
    done: list[LeaseAction] = []
    for event in events:
        lease, actions = step(lease, event, now)
        done += actions
    return lease, done


def test_a_lost_session_parks_and_a_higher_epoch_adopts() -> None:
    lease, done = run(Lease(3), SessionLost(3), now=10.0)
    assert (lease.phase, lease.until, done) == (
        LeasePhase.PARKED,
        10.0 + PARK_S,
        [LeaseAction.PARK],
    )
    lease, done = run(lease, LeaseTick(), Resumed(4), now=10.0 + PARK_S - 0.01)
    assert lease == Lease(4)
    assert done == [LeaseAction.HAND_OVER, LeaseAction.UNPARK, LeaseAction.COUNT_ADOPTED]


@pytest.mark.parametrize("ticked", [True, False])
def test_a_resume_after_the_park_time_is_answered_gone(ticked: bool) -> None:
    lease, _ = run(Lease(3), SessionLost(3))
    early: tuple[Event, ...] = (LeaseTick(),) if ticked else ()
    lease, done = run(lease, *early, Resumed(4), now=PARK_S)
    assert lease.phase is LeasePhase.GIVEN_UP
    assert done == [
        LeaseAction.GIVE_UP,
        LeaseAction.COUNT_EXPIRED,
        LeaseAction.FORGET,
        LeaseAction.COUNT_STALE,
        LeaseAction.SEND_GONE,
    ]


@pytest.mark.parametrize("epoch", [2, 3])
@pytest.mark.parametrize("lost", [True, False])
def test_a_lower_or_equal_epoch_is_counted_and_ignored(epoch: int, lost: bool) -> None:
    lease, _ = run(Lease(3), *([SessionLost(3)] if lost else []))
    assert step(lease, Resumed(epoch), 1.0) == (lease, (LeaseAction.COUNT_STALE,))


def test_a_higher_epoch_takes_over_and_the_old_session_is_ignored() -> None:
    lease, done = run(Lease(3), Resumed(5))
    assert (lease, done) == (Lease(5), [LeaseAction.HAND_OVER])
    assert run(lease, SessionLost(3)) == (Lease(5), [])


def test_eviction_gives_up_and_answers_an_owner_that_came_too_late() -> None:
    parked, _ = run(Lease(3), SessionLost(3))
    lease, done = run(parked, BlocksEvicted())
    assert (lease.phase, done) == (
        LeasePhase.GIVEN_UP,
        [LeaseAction.COUNT_EVICTED, LeaseAction.FORGET],
    )
    lease, done = run(parked, Resumed(4), BlocksEvicted())
    assert lease.phase is LeasePhase.GIVEN_UP
    assert LeaseAction.SEND_GONE in done


def test_last_messages_are_kept_for_the_park_time_after_the_end_or_the_loss() -> None:
    lease, done = run(Lease(3), AttemptEnded(keep=True), now=1.0)
    assert (lease.phase, lease.until, done) == (LeasePhase.KEPT, 1.0 + PARK_S, [])
    lease, _ = run(lease, SessionLost(3), now=3.0)
    assert lease.until == 3.0 + PARK_S
    lease, done = run(lease, Resumed(4), now=4.0)
    assert (lease.phase, lease.until) == (LeasePhase.KEPT, 4.0 + PARK_S)
    assert done == [LeaseAction.HAND_OVER, LeaseAction.COUNT_ADOPTED]
    lease, done = run(lease, LeaseTick(), Resumed(5), now=4.0 + PARK_S)
    assert done == [LeaseAction.FORGET, LeaseAction.COUNT_STALE, LeaseAction.SEND_GONE]


def test_a_cancelled_request_is_not_kept() -> None:
    for events in ((), (SessionLost(3),), (AttemptEnded(keep=True),)):
        lease, _ = run(Lease(3), *events)
        lease, done = run(lease, AttemptEnded())
        assert (lease.phase, done) == (LeasePhase.ENDED, [LeaseAction.FORGET])
        assert run(lease, Resumed(9))[1] == [LeaseAction.COUNT_STALE, LeaseAction.SEND_GONE]


EDGES = (
    ("owned", "parked"),
    ("parked", "owned"),
    ("parked", "given_up"),
    ("owned", "given_up"),
    ("owned", "kept"),
    ("parked", "kept"),
    ("kept", "ended"),
    ("owned", "ended"),
    ("parked", "ended"),
)


def made(kind: type, epoch: int) -> Event:
    if kind in (SessionLost, Resumed):
        event: Event = kind(epoch)
        return event
    return (
        AttemptEnded(keep=epoch % 2 == 0)
        if kind is AttemptEnded
        else LeaseTick()
        if kind is LeaseTick
        else BlocksEvicted()
    )


def test_every_path_frees_once_forgets_once_and_never_returns() -> None:
    walked: Counter[tuple[str, str]] = Counter()

    for seed in range(WALKS):
        rng = Random(seed)
        lease, now, frees = Lease(2), 0.0, 0
        count: Counter[LeaseAction] = Counter()
        for _ in range(rng.randrange(1, 16)):
            now += rng.uniform(0, 0.7 * PARK_S)
            before = lease
            event = made(rng.choice(KINDS), before.epoch + rng.choice((-1, 0, 0, 1, 2)))
            lease, actions = step(before, event, now)
            count.update(actions)
            walked[before.phase.value, lease.phase.value] += 1
            assert lease.epoch >= before.epoch
            if before.final:
                assert lease == before
                assert set(actions) <= {LeaseAction.COUNT_STALE, LeaseAction.SEND_GONE}
            if before.live and not lease.live:
                ends_early = isinstance(event, AttemptEnded | BlocksEvicted) and now < before.until
                assert ends_early != (LeaseAction.GIVE_UP in actions)
                frees += 1
            else:
                assert LeaseAction.GIVE_UP not in actions
                assert not lease.live or before.live
            if LeaseAction.HAND_OVER in actions:
                assert isinstance(event, Resumed)
                assert lease.epoch == event.epoch > before.epoch
                assert now < before.until
                assert (LeaseAction.UNPARK in actions) == (before.phase is LeasePhase.PARKED)
        assert frees == int(not lease.live)
        assert count[LeaseAction.FORGET] == int(lease.final)
        assert count[LeaseAction.PARK] - count[LeaseAction.UNPARK] in (0, 1)
        if lease.phase is not LeasePhase.OWNED and not lease.final:
            assert step(lease, LeaseTick(), lease.until)[0].final, "no lease waits forever"
    print({f"{a} -> {b}": count for (a, b), count in walked.items()})
    assert all(walked[edge] for edge in EDGES), walked
