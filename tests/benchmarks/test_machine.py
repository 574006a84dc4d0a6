"""The share of core time used by others, from two readings of /proc/stat."""

from machine import busy_share

BEFORE = """cpu  400 0 100 1500 0 0 0 0 0 0
cpu0 100 0 50 800 50 0 0 0 0 0
cpu1 300 0 50 700 0 0 0 0 0 0
cpu2 9 9 9 9 9 9 9 9 9 9
"""
AFTER = """cpu  440 0 110 1650 0 0 0 0 0 0
cpu0 110 0 60 860 70 0 0 0 0 0
cpu1 330 0 50 770 0 0 0 0 0 0
cpu2 999 9 9 9 9 9 9 9 9 9
"""


def test_idle_and_waiting_for_disks_are_not_busy() -> None:
    assert busy_share(BEFORE, AFTER, [0]) == 20 / 100
    assert busy_share(BEFORE, AFTER, [0, 1]) == 50 / 200


def test_other_cores_do_not_count() -> None:
    assert busy_share(BEFORE, AFTER, [2]) == 990 / 990


def test_an_empty_interval_has_no_load() -> None:
    assert busy_share(BEFORE, BEFORE, [0, 1]) == 0.0
