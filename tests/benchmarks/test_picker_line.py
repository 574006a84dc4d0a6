"""The checks of the endpoint-picker line against the figures of a run."""

from copy import deepcopy
from typing import Any

import pytest
from k8s.line4_picker import MOST_LATE, holds

PARTS = ("policy", "buffered", "times that ship", "list", "a gateway is dead", "no picker")
FIGURES: dict[str, Any] = {
    part: {"requests": 200, "failed": 0, "served_as_told": 200, "placed_as_told": 200}
    for part in PARTS
}
FIGURES |= {"decisions": {"policy": 200}, "served_elsewhere": 3}
FIGURES["times that ship"]["decisions"] = {"policy": 200 - int(MOST_LATE * 200)}
FIGURES["times that ship"]["decisions"]["late"] = int(MOST_LATE * 200)
SHIPPED = ("times that ship", "decisions")


def test_a_run_at_the_limit_of_late_decisions_holds() -> None:
    assert holds(FIGURES)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (SHIPPED, {"policy": 0, "late": 200}),
        (SHIPPED, {"policy": 189, "late": 11}),
        (SHIPPED, {"policy": 199, "unknown": 1}),
        (("decisions",), {"policy": 199, "late": 1}),
        (("policy", "placed_as_told"), 197),
        (("served_elsewhere",), 0),
        (("served_elsewhere",), 200),
        *((( part, "failed"), 1) for part in PARTS),
        *((( part, "served_as_told"), 199) for part in PARTS[:4]),
    ],
)  # fmt: skip
def test_any_wrong_figure_breaks_the_line(where: tuple[str, ...], value: object) -> None:
    found: Any = deepcopy(FIGURES)
    inner = found
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    assert not holds(found)
