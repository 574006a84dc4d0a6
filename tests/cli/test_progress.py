"""Bars in a pseudo terminal while children also write there; lines without a terminal."""

import sys

from systems.terminal import in_terminal

from pdserve.cli.progress import Lines

PROGRAM = """
import subprocess, sys
from pdserve.cli.progress import progress_below_log
child = "import sys; [sys.stderr.write(f'line {n} of the [child]' + chr(10)) for n in range(20)]"
with progress_below_log() as view:
    view.update("loading", 0.1)
    children = [subprocess.Popen([sys.executable, "-c", child]) for _ in range(2)]
    for n in range(50):
        view.update("loading", n / 50)
    for one in children:
        one.wait()
    print("ours", file=sys.stderr)
    view.close()
    print("ours after the bars", file=sys.stderr)
print("at the end", file=sys.stderr)
"""


def test_lines_of_children_stay_whole_above_the_bars() -> None:
    with in_terminal([sys.executable, "-c", PROGRAM]) as terminal:
        terminal.wait_for("at the end")
        assert terminal.end() == 0
    rows = terminal.screen
    for number in range(20):
        assert rows.count(f"line {number} of the [child]") == 2
    assert rows.count("ours") == 1
    assert rows.count("ours after the bars") == 1
    assert rows.count("at the end") == 1
    assert "loading" in terminal.text


def test_a_line_for_each_quarter() -> None:
    said: list[str] = []
    view = Lines(said.append)
    for fraction in (0.0, 0.1, 0.3, 0.6, 1.0):
        view.update("x", fraction)
    view.close()
    assert said == ["x 0%", "x 25%", "x 50%", "x 100%"]
