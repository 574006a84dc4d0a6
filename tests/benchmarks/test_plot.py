"""The plot: one bar per row on a common axis."""

import xml.etree.ElementTree as ET

from plot import place, relative, svg
from ratios import Bound, judged

MORE = judged(Bound(2, 4), [3.0, 5.0], [1.0, 1.0])
LESS = judged(Bound(0.25, 0.1), [0.5], [1.0])


def test_one_is_the_minimum_in_both_directions() -> None:
    assert relative(MORE, 2.0) == 1.0
    assert relative(LESS, 0.25) == 1.0
    assert relative(LESS, 0.125) == 2.0


def test_the_axis_is_monotonic_and_bounded() -> None:
    places = [place(x) for x in (0.0001, 0.1, 0.5, 1, 3, 10, 1e6)]
    assert places == sorted(places)
    assert places[0] == places[1]
    assert places[-1] == places[-2]


def test_every_row_has_a_bar_and_names_are_escaped() -> None:
    root = ET.fromstring(svg({"a<b": MORE, "less": LESS}, "a & b"))
    texts = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("text")]
    assert "a<b" in texts
    assert "less" in texts
    bars = [e for e in root.iter() if e.tag.endswith("rect")][1:]  # the first is the background
    assert [b.get("fill") for b in bars] == ["#2a7", "#c63"]
