"""The allotment of cores: disjoint where possible, never more threads than requested cores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli.options import OptionError
from pdserve.cli.up.cores import Share, allot, machine_cores


def test_two_workers_on_two_cores() -> None:
    assert allot((0, 1), 2, 2) == [Share(1, (0,)), Share(1, (1,))]


def test_a_remaining_core_goes_to_the_first() -> None:
    assert allot((3, 5, 6), 3, 2) == [Share(2, (3, 5)), Share(1, (6,))]


def test_more_workers_than_cores_share_them() -> None:
    assert allot((0, 1), 2, 3) == [Share(1)] * 3
    assert allot((0, 1), 2, 3, threads=1) == [Share(1)] * 3


def test_nothing_is_pinned_under_a_quota() -> None:
    assert allot(range(8), 4, 2) == [Share(2)] * 2


def test_the_requested_threads_are_used() -> None:
    assert allot(range(8), 8, 2, threads=3) == [Share(3, (0, 1, 2)), Share(3, (3, 4, 5))]


def test_too_many_threads_are_refused() -> None:
    with pytest.raises(
        OptionError, match=r"--threads 2: 2 workers need 4 cores, but only 2 are usable"
    ):
        allot((0, 1), 2, 2, threads=2)


@given(
    st.sets(st.integers(0, 255), min_size=1, max_size=64).map(sorted),
    st.integers(1, 64),
    st.integers(1, 70),
    st.integers(0, 20),
)
def test_shares_are_disjoint_and_within_bounds(
    cores: list[int], quota: int, workers: int, threads: int
) -> None:
    worth = min(len(cores), quota)
    try:
        shares = allot(cores, worth, workers, threads)
    except OptionError:
        shares = []
    assert bool(shares) == (threads <= 1 or threads * workers <= worth)
    pinned = [core for share in shares for core in share.cores]
    assert len(pinned) == len(set(pinned))
    assert set(pinned) <= set(cores)
    for share in shares:
        assert share.threads == (threads or share.threads) >= 1
        assert not share.cores or len(share.cores) == share.threads
    if shares and not threads and workers <= worth:
        assert sum(share.threads for share in shares) == worth


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (Share(1, (4,)), "core 4"),
        (Share(3, (1, 2, 3)), "cores 1-3"),
        (Share(2, (1, 3)), "cores 1,3"),
        (Share(1), "1 thread, not pinned"),
        (Share(2), "2 threads, not pinned"),
    ],
)
def test_shares_as_text(share: Share, text: str) -> None:
    assert str(share) == text


def test_this_machine_has_cores() -> None:
    cores, worth = machine_cores()
    assert 1 <= worth <= len(cores)
