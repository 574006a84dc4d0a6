"""`make fuzz`: run many cases of each target, or of the named ones, each in a separate process.

    python -m fuzz.run [TARGET ...] [--cases N] [--first SEED]

Resumable: build/fuzz/TARGET.json records the finished cases of a target, until the product, the
fuzzers or the installed packages change. Prints one JSON object per target; the exit code is 1 if a
case failed. The output names its seed: `--first SEED --cases 1` repeats it.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STORE = ROOT / "build/fuzz"
TARGETS = sorted(path.stem for path in (HERE / "targets").glob("[a-z]*.py"))
CASES = 1_000_000
PRODUCT = ("protos", "text", "gateway", "services", "cli", "llm", "engine", "kernels")
MEASURED = (*PRODUCT, "tests/fuzz", "constraints.txt")


def run(name: str, first: int, count: int, on_part: Any = None) -> tuple[Counter[str], str]:
    """Return outcomes of the cases, and why they ended early; empty if they did not. `on_part` is
    called with (next seed, outcomes since the last call).
    """
    outcomes: Counter[str] = Counter()
    environment = os.environ | {
        "PYTHONPATH": f"{HERE.parent}:{HERE.parent / 'support'}",
        "MALLOC_ARENA_MAX": "1",  # else the addresses that each thread reserves count as memory
    }
    command = [sys.executable, "-m", "fuzz.child", name, str(first), str(count)]
    with TemporaryDirectory() as folder, TemporaryFile("w+") as said:
        with subprocess.Popen(
            [*command, folder], stdout=subprocess.PIPE, stderr=said, text=True, env=environment
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                part = json.loads(line)
                outcomes.update(part["outcomes"])
                if on_part is not None:
                    on_part(part["next"], part["outcomes"])
        said.seek(0)
        errors = said.read()
    code = child.returncode
    return outcomes, "" if code == 0 else f"exit code {code}\n{errors[-4000:]}"


def source_tree() -> str:
    """Return a hash that changes with any file that the cases run."""
    found = subprocess.run(
        ["git", "ls-files", "-s", "--", *MEASURED], cwd=ROOT, capture_output=True, check=True
    )
    hashed = subprocess.run(
        ["git", "hash-object", "--stdin"], input=found.stdout, capture_output=True, check=True
    )
    return hashed.stdout.decode()[:12]


def resume(name: str, first: int, cases: int, tree: str) -> bool:
    """Run the remaining cases of a target and print the result. Returns False if a case failed."""
    store = STORE / f"{name}.json"
    done: dict[str, Any] = {"tree": tree, "first": first, "next": first, "outcomes": {}}
    if store.exists():
        before = json.loads(store.read_text())
        if (before["tree"], before["first"]) == (tree, first):
            done = before

    def part(following: int, outcomes: dict[str, int]) -> None:
        done["next"] = following
        done["outcomes"] = dict(Counter(done["outcomes"]) + Counter(outcomes))
        store.write_text(json.dumps(done))

    left = first + cases - done["next"]
    error = run(name, done["next"], left, part)[1] if left > 0 else ""
    print(json.dumps({"target": name, **done, "error": error}), flush=True)
    return not error


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    # For argparse, no targets are the value [], which must be a choice too.
    parser.add_argument("targets", nargs="*", default=[], choices=[*TARGETS, []], metavar="TARGET")
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(words)
    STORE.mkdir(parents=True, exist_ok=True)
    tree = source_tree()
    good = [resume(name, options.first, options.cases, tree) for name in options.targets or TARGETS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
