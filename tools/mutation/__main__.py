"""Measure how many small faults in the product the tests find.

    python -m mutation record        # what each test executes, and how long it takes
    python -m mutation try           # 200 mutants, drawn with a seed
    python -m mutation report FILE   # counts by part, and the survivors

(with PYTHONPATH=tools; `make mutation ARGS="try --again FILE"`).

`try` changes one line of a copy of the repository at a time, runs the tests that execute the line,
and writes one JSON object per mutant. Its verdict is

    killed      a test fails that passes without the change
    survived    all tests pass
    late        the tests did not end in time, but did without the change
    untested    no test is known to execute the line or to import its module
    invalid     the line is gone, or does not compile
    error       the tests do not run without the change either

An interrupted run is resumed, unless the commit has changed. `--again FILE` uses the mutants of an
earlier run instead, also on another commit; `--survivors` only those that were not killed there.
The tests are those of `make test` and `make test-kernels`, or `--marks`.
"""

import argparse
import fcntl
import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutation.mutants import CPP, Mutant, draw, mutated
from mutation.selection import Selection
from mutation.tree import Run, Tree

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LIMIT_S = 90.0  # for the tests of one mutant
BUDGET_S = 40.0  # of recorded test seconds; the remainder is for imports
NO_TESTS = 5  # exit code of pytest
TEST_LIMIT_S = 60  # per test: finds a mutant that hangs
MARKS = "not extended and not compose and not clients"
KILLED, SURVIVED, LATE = "killed", "survived", "late"
UNTESTED, INVALID, ERROR = "untested", "invalid", "error"
MISSED = (SURVIVED, LATE, UNTESTED)


@dataclass(frozen=True)
class Outcome:
    """The verdict on a mutant, the test that found it, and whether the tests that ran are known to
    execute its line."""

    verdict: str
    found_by: str = ""
    num_tests: int = 0
    executes: bool = False
    seconds: float = 0.0


class Trial:
    """Test mutants in one working tree."""

    def __init__(self, tree: Tree, selection: Selection, marks: str) -> None:
        self._tree = tree
        self._selection = selection
        self._marks = marks
        self._sound = tree.root / "build/sound_extension.so"
        shutil.copy2(tree.extension(), self._sound)
        self._broken: set[str] = set()  # tests that fail without any mutant

    def outcome(self, mutant: Mutant) -> Outcome:
        try:
            text, line = mutated(self._tree.root, mutant)
        except LookupError:
            return Outcome(INVALID, "the line is gone")
        tests, executes = self._selection.tests(mutant.path, line, BUDGET_S)
        while True:
            chosen = [test for test in tests if not self._is_broken(test)]
            if not chosen:
                return Outcome(UNTESTED)
            run = self._run_mutated(mutant, text, chosen)
            if run is None:
                return Outcome(INVALID, "it does not compile")
            verdict, found_by = self._verdict(run, chosen)
            if verdict:
                return Outcome(verdict, found_by, len(chosen), executes, round(run.seconds, 1))

    def _is_broken(self, test: str) -> bool:
        return test in self._broken or test.partition("::")[0] in self._broken

    def _run_mutated(self, mutant: Mutant, text: str, tests: list[str]) -> Run | None:
        """Run the tests on a mutant; None if the mutant does not compile."""
        is_cpp = Path(mutant.path).suffix in CPP
        self._tree.write(mutant.path, text)
        try:
            if is_cpp:
                self._tree.install()
            return self._run(tests)
        except subprocess.CalledProcessError:
            return None
        finally:
            self._tree.restore(mutant.path)
            if is_cpp:
                shutil.copy2(self._sound, self._tree.extension())

    def _run(self, tests: list[str]) -> Run:
        broken = [f"--deselect={test}" for test in sorted(self._broken)]
        words = ["-x", "-m", self._marks, f"--timeout={TEST_LIMIT_S}", *broken]
        return self._tree.pytest([*words, *tests], LIMIT_S)

    def _verdict(self, run: Run, tests: list[str]) -> tuple[str, str]:
        """The verdict, with the test that found the mutant. Empty if that test also fails without
        the mutant; the test is ignored from then on."""
        if run.code == 0:
            return SURVIVED, ""
        if run.code == NO_TESTS:
            return UNTESTED, ""
        suspects = [run.failed] if run.failed else tests
        sound = self._run(suspects)
        if sound.code == 0:
            if run.code is None and not run.failed:
                return LATE, ""
            return KILLED, run.failed or f"exit {run.code}"
        if not sound.failed or self._is_broken(sound.failed):
            return ERROR, sound.output[-500:]
        print(f"fails without any mutant: {sound.failed}", flush=True)
        self._broken.add(sound.failed)
        return "", ""


def record(source: Path, work: Path, tests: list[str], marks: str, jobs: int) -> int:
    tree = Tree(source, work / "tree0")
    data = work.resolve() / "coverage"
    for old in work.glob("coverage*"):
        old.unlink()
    words = [
        f"-n{jobs}",
        "--dist=loadfile",
        "--timeout=400",
        f"--junitxml={work.resolve()}/junit.xml",
    ]
    words += ["-ojunit_duration_report=total", "--cov", f"--cov-config={HERE / 'coverage.ini'}"]
    words += ["--cov-context=test", "--cov-report=", "-m", marks, *tests]
    run = tree.pytest(words, 7200, COVERAGE_FILE=str(data), COVERAGE_CORE="ctrace")
    print(run.output[-3000:])
    return 1 if run.code is None else run.code


def try_all(args: argparse.Namespace) -> None:
    work: Path = args.work
    out: Path = args.out or work / ("again.jsonl" if args.again else "mutants.jsonl")
    if args.again and out.resolve() == args.again.resolve():
        raise SystemExit("--out must be another file than --again")
    trees = [Tree(args.source, work / f"tree{i}") for i in range(args.jobs)]
    (commit,) = {tree.commit for tree in trees}
    if args.again:
        wanted = again(args.again, args.survivors)
    else:
        wanted = draw(trees[0].root, args.seed, args.count)
    known = [entry for entry in read(out) if entry["commit"] == commit]
    out.write_text("".join(json.dumps(entry) + "\n" for entry in known))
    done = {Mutant(**entry["mutant"]) for entry in known}
    free: SimpleQueue[Trial] = SimpleQueue()
    for tree in trees:
        selection = Selection(tree.root, work / "coverage", work / "junit.xml")
        free.put(Trial(tree, selection, args.marks))
    writing = threading.Lock()

    def one(mutant: Mutant) -> None:
        trial = free.get()
        try:
            outcome = trial.outcome(mutant)
        finally:
            free.put(trial)
        entry = {"mutant": asdict(mutant), "area": mutant.area, "commit": commit, **asdict(outcome)}
        with writing, out.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")
            said = f"{outcome.verdict:9}{outcome.seconds:6} s  {mutant.path}: {mutant.becomes}"
            print(said, flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, [mutant for mutant in wanted if mutant not in done]))
    report(out)


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines()]


def again(earlier: Path, survivors: bool) -> list[Mutant]:
    kept = [e for e in read(earlier) if not survivors or e["verdict"] in MISSED]
    return [Mutant(**entry["mutant"]) for entry in kept]


def report(path: Path) -> None:
    entries = read(path)
    missed = [entry for entry in entries if entry["verdict"] in MISSED]
    for area in ("all", *sorted({entry["area"] for entry in entries})):
        verdicts = Counter(e["verdict"] for e in entries if area in ("all", e["area"]))
        print(f"{area:10}" + ", ".join(f"{verdicts[v]} {v}" for v in sorted(verdicts)))
    num_killed = sum(entry["verdict"] == KILLED for entry in entries)
    print(f"{num_killed / max(1, num_killed + len(missed)):.1%} are found")
    for entry in missed:
        mutant = Mutant(**entry["mutant"])
        print(f"{entry['area']}: {mutant.path}: {mutant.line.strip()}: {mutant.becomes}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", type=Path, default=ROOT, help="the repository whose HEAD is tried"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build/mutation")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--marks", default=MARKS, help="which tests, as pytest's -m has it")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("tests", nargs="*", default=["tests"], help="arguments of pytest")
    trying = commands.add_parser("try")
    trying.add_argument("--seed", type=int, default=1)
    trying.add_argument("--count", type=int, default=200)
    trying.add_argument("--again", type=Path)
    trying.add_argument("--survivors", action="store_true")
    trying.add_argument("--out", type=Path, help="mutants.jsonl or again.jsonl in the work folder")
    reporting = commands.add_parser("report")
    reporting.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "report":
        report(args.file)
        return 0
    args.work.mkdir(parents=True, exist_ok=True)
    # each run ends processes that another has started there
    with (args.work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run uses {args.work}") from None
        if args.command == "record":
            return record(args.source, args.work, args.tests, args.marks, args.jobs)
        try_all(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
