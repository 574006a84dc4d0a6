"""Acceptance lines: a skipped part does not count as held, and an earlier run is marked as such."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import accept
import psutil
import pytest
import pytest_line
from line9_promises import stands
from systems.eventually import wait_until

SCRIPT = """import json, sys
open({ran!r}, "a").write("x")
print(json.dumps({figures}))
sys.exit({code})
"""


class Topic:
    """A temporary topic with scripted lines."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.revision, self.tree, self.docs = "aaaaaaaaaaaa", "tree", "docs"
        self._capsys = capsys
        (folder / "made").mkdir()

    def line(self, number: int, figures: dict[str, Any], code: int = 0) -> None:
        text = SCRIPT.format(ran=str(self.folder / f"ran{number}"), figures=figures, code=code)
        (self.folder / f"made/line{number}_x.py").write_text(text)

    def run(self, *lines: str) -> tuple[int, dict[str, Any]]:
        code = accept.run_topic("made", list(lines), 60)
        out = self._capsys.readouterr().out.strip().splitlines()
        return code, json.loads(out[-1])

    def verdicts(self, found: dict[str, Any]) -> dict[str, str]:
        return {name.split("_")[0]: line["verdict"] for name, line in found["lines"].items()}

    def runs(self, number: int) -> int:
        return len((self.folder / f"ran{number}").read_text())


@pytest.fixture
def topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Topic:
    made = Topic(tmp_path, capsys)
    monkeypatch.setattr(accept, "HERE", tmp_path)
    monkeypatch.setattr(accept, "commit", lambda: made.revision)
    monkeypatch.setattr(
        accept, "source_tree", lambda prose=False: made.tree + (made.docs if prose else "")
    )
    return made


def test_a_line_that_holds(topic: Topic) -> None:
    topic.line(1, {"ok": True, "tests": {"ok": True, "skipped": 0}})
    code, found = topic.run()
    assert (code, found["ok"]) == (0, True)
    assert topic.verdicts(found) == {"line1": "held"}


@pytest.mark.parametrize(
    ("figures", "line_code"),
    [
        ({"ok": True, "networks": {"ok": True, "skipped": "no network namespaces"}}, 0),
        ({"ok": True, "rows": [{"deep": {"skipped": "no network namespaces"}}]}, 0),
        ({"ok": False, "verdict": "skipped", "networks": {"skipped": "no network namespaces"}}, 2),
    ],
)
def test_a_skipped_part_is_not_held(
    topic: Topic, figures: dict[str, Any], line_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    topic.line(1, figures, line_code)
    topic.line(2, {"ok": True})
    for run in (1, 2):
        code, found = topic.run()
        assert (code, found["ok"]) == (2, False)
        assert topic.verdicts(found)["line1"] == "skipped"
        assert not found["lines"]["line1_x"]["ok"]
        assert topic.runs(1) == run, "a skipped line must run again"
    accept.run_topic("made", ["1"], 60)
    assert "no network namespaces" in capsys.readouterr().err


def test_a_failed_part_outweighs_a_skipped_one(topic: Topic) -> None:
    topic.line(1, {"ok": False, "networks": {"skipped": "no namespaces"}})
    topic.line(2, {"ok": True, "networks": {"skipped": "no namespaces"}}, code=1)
    code, found = topic.run()
    assert (code, topic.verdicts(found)) == (1, {"line1": "failed", "line2": "failed"})


def test_an_earlier_run_is_marked_as_such(topic: Topic, capsys: pytest.CaptureFixture[str]) -> None:
    topic.line(1, {"ok": True, "figure": 7})
    topic.run()
    topic.revision = "bbbbbbbbbbbb"  # a commit that changes only prose
    code, found = topic.run()
    assert (code, found["ok"], found["commit"]) == (0, True, "bbbbbbbbbbbb")
    line = found["lines"]["line1_x"]
    assert (line["verdict"], line["commit"], line["figure"]) == ("held earlier", "aaaaaaaaaaaa", 7)
    assert topic.runs(1) == 1
    accept.run_topic("made", [], 60)
    assert "line1_x: held earlier, at aaaaaaaaaaaa" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["tree", "dirty", "failed"])
def test_a_line_without_a_valid_record_is_run(topic: Topic, change: str) -> None:
    topic.line(1, {"ok": change != "failed"})
    topic.run()
    if change == "tree":
        topic.tree = "another"
    elif change == "dirty":
        topic.revision += "-dirty"
    topic.line(1, {"ok": True})
    _, found = topic.run()
    assert topic.verdicts(found) == {"line1": "held"}
    assert topic.runs(1) == 2


def test_a_result_of_a_dirty_checkout_is_not_used_for_a_clean_one(topic: Topic) -> None:
    """Both checkouts have the tree of the same commit."""
    clean = topic.revision
    topic.line(1, {"ok": True})
    topic.revision += "-dirty"
    topic.run()
    topic.revision = clean
    _, found = topic.run()
    assert topic.verdicts(found) == {"line1": "held"}
    assert topic.runs(1) == 2


def test_a_line_that_reads_the_docs_is_run_again_after_their_change(topic: Topic) -> None:
    for number in (1, 2):
        topic.line(number, {"ok": True})
    module = topic.folder / "made/line2_x.py"
    module.write_text(f"READS_PROSE = True\n{module.read_text()}")
    topic.run()
    topic.docs = "other docs"
    _, found = topic.run()
    assert topic.verdicts(found) == {"line1": "held earlier", "line2": "held"}


def test_a_late_line_is_killed_with_its_children(topic: Topic) -> None:
    pid, module = topic.folder / "pid", topic.folder / "made/line1_x.py"
    child = f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(999)"
    module.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    for timeout_s in (1, 4, 16, 64):  # retry until the line has had time to start a child
        assert accept.run_line(module, timeout_s)["verdict"] == "failed"
        if pid.exists() and pid.read_text().endswith("."):
            break

    def ended() -> bool:
        try:
            return psutil.Process(int(pid.read_text().rstrip("."))).status() == "zombie"
        except psutil.NoSuchProcess:
            return True

    wait_until(ended, "its child's end")


def test_a_line_ends_when_the_run_is_terminated(tmp_path: Path) -> None:
    """Otherwise the line would keep measuring next to later measurements."""
    pid, folder = tmp_path / "pid", tmp_path / "made"
    folder.mkdir()
    text = f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(999)"
    (folder / "line1_x.py").write_text(text)
    code = f"import sys, accept; from pathlib import Path; accept.HERE = Path({str(tmp_path)!r}); "
    code += "sys.argv[1:] = ['made']; sys.exit(accept.main())"
    environment = os.environ | {"PYTHONPATH": str(Path(accept.__file__).parent)}
    run = subprocess.Popen([sys.executable, "-c", code], env=environment)
    wait_until(lambda: pid.exists() and pid.read_text().endswith("."), "the line's begin")
    run.terminate()
    assert run.wait(30) == 128 + 15
    wait_until(lambda: not psutil.pid_exists(int(pid.read_text().rstrip("."))), "the line's end")


def test_records_without_verdicts_are_judged(topic: Topic) -> None:
    """Do not reuse an old record that says ok but has a skipped part."""
    topic.line(1, {"ok": True})
    old = {"line": "line1_x", "commit": "old", "tree": "tree", "ok": True}
    results = topic.folder / "results/accept-made.jsonl"
    results.parent.mkdir()
    results.write_text(json.dumps(old | {"networks": {"ok": True, "skipped": "no"}}) + "\n")
    _, found = topic.run()
    assert topic.verdicts(found) == {"line1": "held"}
    assert topic.runs(1) == 1


def test_lines_are_run_in_numeric_order(topic: Topic) -> None:
    for number in (10, 2, 1):
        topic.line(number, {"ok": True})
    assert list(topic.run()[1]["lines"]) == ["line1_x", "line2_x", "line10_x"]
    assert list(topic.run("10")[1]["lines"]) == ["line10_x"]


def test_a_line_without_a_result_fails(topic: Topic) -> None:
    (topic.folder / "made/line1_x.py").write_text("raise SystemExit(0)")
    assert topic.run()[0] == 1
    assert topic.run("7") == (
        1,
        {"topic": "made", "commit": topic.revision, "ok": False, "lines": {}},
    )


def test_a_promise_needs_a_result_of_this_tree() -> None:
    held = {"verdict": "held", "commit": "aaaaaaaaaaaa", "tree": "tree"}
    assert stands(held, "tree") == {"ok": True, "commit": "aaaaaaaaaaaa"}
    earlier = stands(held, "another")
    assert accept.judged({"ok": True, "line": earlier})["verdict"] == "skipped"
    assert "aaaaaaaaaaaa" in earlier["skipped"]
    part = held | {"verdict": "skipped", "networks": {"skipped": "no namespaces"}}
    assert "no namespaces" in stands(part, "tree")["skipped"]
    assert not stands(held | {"verdict": "failed"}, "tree")["ok"]
    assert not stands(None, "tree")["ok"]


def test_a_line_does_not_inherit_the_arguments_of_make(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "ARGS"):
        monkeypatch.setenv(name, "ARGS=1")
    seen = 'sorted(set(os.environ) & {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "ARGS"})'
    text = f"import json, os\nprint(json.dumps(dict(ok=True, seen={seen})))\n"
    (topic.folder / "made/line1_x.py").write_text(text)
    _, found = topic.run()
    assert found["lines"]["line1_x"]["seen"] == []


def test_results_of_two_interleaved_runs() -> None:
    output = (
        "....\n..10 passed in 658.76s (0:10:58)\n..... [ 90%]\n3492 passed, 3 skipped in 993.93s\n"
    )
    assert pytest_line.results(output) == [
        "10 passed in 658.76s (0:10:58)",
        "3492 passed, 3 skipped in 993.93s",
    ]
