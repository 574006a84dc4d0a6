"""Says how many small faults the tests find.

    python -m mutation record        # what each test executes, and how long it takes
    python -m mutation try           # 200 mutants, drawn with a seed
    python -m mutation report FILE   # counts by part, and what survived

(with PYTHONPATH=tools; `make mutation ARGS="try --again FILE"`).

`try` changes one line of a copy of the repository at a time, runs the tests that execute the line,
and writes one JSON object a mutant: `killed` (a test fails that passes without the change),
`survived`, or `invalid` (it does not compile). What FILE already has is not tried again.
`--again FILE` takes the mutants of an earlier run, on another tree too, `--survivors` only those
that survived there.
"""

import argparse
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
LIMIT_S = 90.0  # of the tests of one mutant
BUDGET_S = 40.0  # of their recorded seconds; the rest is for imports
TEST_LIMIT_S = 60  # of one test: a mutant that hangs is found by it
KILLED, SURVIVED, INVALID = "killed", "survived", "invalid"


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant: the verdict, the test that found it, and whether the tests that ran
    are known to execute its line."""

    verdict: str
    found_by: str = ""
    num_tests: int = 0
    executes: bool = False
    seconds: float = 0.0


class Trial:
    """Tries mutants in one working tree."""

    def __init__(self, tree: Tree, selection: Selection) -> None:
        self._tree = tree
        self._selection = selection
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
            chosen = [test for test in tests if test not in self._broken]
            run = self._run_mutated(mutant, text, chosen) if chosen else Run(0, "", 0.0, "")
            if run is None:
                return Outcome(INVALID, "it does not compile")
            found = self._found(run, chosen)
            if run.code == 0 or found:
                verdict = KILLED if found else SURVIVED
                return Outcome(verdict, found, len(chosen), executes, round(run.seconds, 1))

    def _run_mutated(self, mutant: Mutant, text: str, tests: list[str]) -> Run | None:
        """None if the mutant does not compile."""
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
        return self._tree.pytest(["-x", f"--timeout={TEST_LIMIT_S}", *broken, *tests], LIMIT_S)

    def _found(self, run: Run, tests: list[str]) -> str:
        """The test that fails for the mutant alone; one that always fails is left out from now."""
        if run.code == 0:
            return ""
        suspects = [run.failed] if run.failed else tests
        sound = self._run(suspects)
        if sound.code == 0:
            return run.failed or f"ended with {run.code}"
        if not sound.failed:
            raise RuntimeError(f"the tests do not run: {sound.output[-2000:]}")
        self._broken.add(sound.failed)
        return ""


def record(source: Path, work: Path, tests: list[str], jobs: int) -> None:
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
    words += ["--cov-context=test", "--cov-report=", *tests]
    run = tree.pytest(words, 7200, COVERAGE_FILE=str(data), COVERAGE_CORE="ctrace")
    print(run.output[-3000:])


def try_all(args: argparse.Namespace) -> None:
    work: Path = args.work
    known = read(args.out) if args.out.exists() else []
    done = {Mutant(**entry["mutant"]) for entry in known}
    wanted = (
        again(args.again, args.survivors)
        if args.again
        else draw(args.source, args.seed, args.count)
    )
    waiting = [mutant for mutant in wanted if mutant not in done]
    trees = [Tree(args.source, work / f"tree{i}") for i in range(args.jobs)]
    free: SimpleQueue[Trial] = SimpleQueue()
    for tree in trees:
        free.put(Trial(tree, Selection(tree.root, work / "coverage", work / "junit.xml")))
    writing = threading.Lock()

    def one(mutant: Mutant) -> None:
        trial = free.get()
        try:
            outcome = trial.outcome(mutant)
        finally:
            free.put(trial)
        entry = {"mutant": asdict(mutant), "area": mutant.area, **asdict(outcome)}
        with writing, args.out.open("a") as out:
            out.write(json.dumps(entry) + "\n")
            print(
                f"{outcome.verdict:9}{outcome.seconds:6} s  {mutant.path}: {mutant.becomes}",
                flush=True,
            )

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, waiting))
    report(args.out)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def again(earlier: Path, survivors: bool) -> list[Mutant]:
    kept = [e for e in read(earlier) if not survivors or e["verdict"] == SURVIVED]
    return [Mutant(**entry["mutant"]) for entry in kept]


def report(path: Path) -> None:
    entries = read(path)
    counts = Counter((entry["area"], entry["verdict"]) for entry in entries)
    total = Counter(entry["verdict"] for entry in entries)
    for area in sorted({entry["area"] for entry in entries}):
        print(f"{area:10} {counts[area, KILLED]:4} killed {counts[area, SURVIVED]:4} survived")
    valid = total[KILLED] + total[SURVIVED]
    print(
        f"all        {total[KILLED]:4} killed {total[SURVIVED]:4} survived"
        f" {total[INVALID]:4} invalid; {total[KILLED] / max(1, valid):.1%} found"
    )
    for entry in entries:
        if entry["verdict"] == SURVIVED:
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
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("tests", nargs="*", default=["tests"], help="words for pytest")
    trying = commands.add_parser("try")
    trying.add_argument("--seed", type=int, default=1)
    trying.add_argument("--count", type=int, default=200)
    trying.add_argument("--again", type=Path)
    trying.add_argument("--survivors", action="store_true")
    trying.add_argument("--out", type=Path, default=ROOT / "build/mutation/mutants.jsonl")
    reporting = commands.add_parser("report")
    reporting.add_argument("file", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.command == "record":
        record(args.source, args.work, args.tests, args.jobs)
    elif args.command == "try":
        try_all(args)
    else:
        report(args.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
