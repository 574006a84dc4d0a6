"""The plot: one bar per row on a common axis."""

import xml.etree.ElementTree as ET

from bench import place, svg, times_better
from ratios import compared

MORE = compared([3.0, 5.0], [1.0, 1.0])
LESS = compared([1.5], [1.0], less_is_better=True)


def test_more_is_better_in_every_row() -> None:
    assert times_better(MORE, 2.0) == 2.0
    assert times_better(LESS, 0.25) == 4.0


def test_the_axis_is_monotonic_and_bounded() -> None:
    places = [place(x) for x in (0.0001, 0.5, 1, 3, 10, 50, 1e6)]
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
