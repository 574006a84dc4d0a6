"""The rows of the table, and the order of runs."""

import pytest
from table import ROWS, SERVER_ROWS, START_ROWS, X32, contenders, runs, turn


def test_every_run_is_made_once_per_round_for_all_compared() -> None:
    plan = runs(ROWS)
    works = [work for work, _ in plan]
    assert len(set(works)) == len(works)
    for work, names in plan:
        assert len(set(names)) == len(names)
        for row in ROWS:
            if row.work == work:
                assert {row.ours, row.theirs} <= set(names)
    assert {name for _, names in plan for name in names} == set(contenders(ROWS))


def test_names_are_unique() -> None:
    names = [*(row.name for row in ROWS), *SERVER_ROWS, *START_ROWS]
    assert len(set(names)) == len(names)


def test_the_rows_of_the_quick_table() -> None:
    quick = {row.work.name for row in ROWS if row.quick}
    assert quick == {"decode x1", "decode x32", "prefill 512"}
    assert X32.name == "decode x32"


@pytest.mark.parametrize("number", range(7))
def test_turns_rotate(number: int) -> None:
    names = ["a", "b", "c"]
    order = turn(names, number)
    assert sorted(order) == names
    assert order[0] == names[number % 3]
