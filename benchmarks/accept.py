"""Run the acceptance lines of one topic and print one JSON object per line.

`python benchmarks/accept.py TOPIC [LINE ...]` runs every module benchmarks/TOPIC/lineN_*.py in a
separate process, and gives each line a verdict:

    held          it was run now, and all its parts hold
    held earlier  it was not run: it held at the named commit, on the same source tree
    skipped       no part that was run fails, but a part was not run, for the given reason
    failed        everything else

A line marks a skipped part with a reason under "skipped" in the part's figures; its exit code is 0
or, if it judges itself, that of its verdict. Results are appended to
benchmarks/results/accept-TOPIC.jsonl with the commit they measured; only a line that held
completely on committed sources is not run again. A line whose module sets READS_PROSE = True is
also run again after a change of docs. The last line printed is one JSON object with every line's
figures; the exit code is 0 only if every line held now or earlier, 2 if none failed but some were
skipped.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
HELD, EARLIER, SKIPPED, FAILED = "held", "held earlier", "skipped", "failed"
RESULTS = "benchmarks/results/"
UNMEASURED = (RESULTS, "docs/", "README.md", "CONTRIBUTING.md")
DIRTY = "-dirty"  # after a commit: uncommitted changes were measured
READS_PROSE = re.compile(r"^READS_PROSE = True$", re.MULTILINE)


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit() -> str:
    """The commit measured; changes outside the results mark it dirty, and every line is run."""
    dirty = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return git("rev-parse", "--short=12", "HEAD") + (DIRTY if dirty else "")


def source_tree(prose: bool = False, paths: Sequence[str] = (".",)) -> str:
    """A hash of everything under `paths` except results and, unless `prose`, prose."""
    entries = git("ls-tree", "-r", "HEAD", "--", *paths).splitlines()
    without = RESULTS if prose else UNMEASURED
    kept = [e for e in entries if not e.split("\t")[1].startswith(without)]
    return subprocess.run(
        ["git", "hash-object", "--stdin"],
        cwd=ROOT,
        input="\n".join(kept),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()[:12]


def _environment() -> dict[str, str]:
    """The environment of a line's process, without the ARGS of an enclosing `make`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    own.pop("MFLAGS", None)
    own.pop("ARGS", None)
    return own | {"PYTHONPATH": f"{HERE}:{ROOT}/tests/support:{ROOT}/tools/docs"}


def tree_of(module: Path) -> str:
    """The source tree that a line measures, including the docs if its module says that it reads
    them."""
    return source_tree(prose=READS_PROSE.search(module.read_text()) is not None)


def skipped_parts(figures: Any, name: str = "") -> list[str]:
    """The reasons for skipped parts by part name, at any depth of the figures."""
    if isinstance(figures, dict):
        found = [f"{name}: {figures['skipped']}".lstrip(": ")] if figures.get("skipped") else []
        inner: list[tuple[str, Any]] = [(f"{name} {k}".strip(), v) for k, v in figures.items()]
    elif isinstance(figures, list):
        found, inner = [], [(f"{name} {i}".strip(), v) for i, v in enumerate(figures)]
    else:
        return []
    return found + [part for key, value in inner for part in skipped_parts(value, key)]


def judged(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures with their verdict; `ok` only if the whole line held."""
    parts = skipped_parts(figures)
    verdict = (SKIPPED if parts else HELD) if figures["ok"] else FAILED
    return figures | {"verdict": verdict, "ok": verdict == HELD}


def committed_records(path: Path) -> list[dict[str, Any]]:
    """The records of committed sources; a dirty checkout has the tree of its commit, too."""
    texts = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(text) for text in texts if text.strip()]
    return [judged(r) for r in records if not r["commit"].endswith(DIRTY)]


def held_before(records: list[dict[str, Any]], line: str, tree: str) -> dict[str, Any] | None:
    """The last record of a line that held completely on this tree."""
    held = [r for r in records if (r["line"], r["tree"], r["verdict"]) == (line, tree, HELD)]
    return held[-1] if held else None


def run_line(module: Path, timeout_s: float) -> dict[str, Any]:
    """Run one line; the last line of its standard output is its JSON object. Its children are
    killed if the line is late or the user interrupts it."""
    started = time.monotonic()
    with TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(
            [sys.executable, str(module)],
            cwd=ROOT,
            env=_environment(),
            stdout=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        out.seek(0)
        output = out.read()
    sys.stderr.write(output)
    try:
        figures = json.loads(output.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        figures = {"ok": False, "error": f"no result (exit code {code})"}
    says_skipped = figures.get("verdict") == SKIPPED and code == exit_code([SKIPPED])
    figures["ok"] = says_skipped or (bool(figures.get("ok")) and code == 0)
    figures["seconds"] = round(time.monotonic() - started, 1)
    return judged(figures)


def number(module: Path) -> int:
    """The number of the line that a module measures."""
    return int(module.stem.removeprefix("line").split("_")[0])


def exit_code(verdicts: list[str]) -> int:
    if FAILED in verdicts or not verdicts:
        return 1
    return 2 if SKIPPED in verdicts else 0


def shown(record: dict[str, Any]) -> str:
    """One line of text about a line."""
    text = f"{record['line']}: {record['verdict']}"
    if record["verdict"] == EARLIER:
        text += f", at {record['commit']}"
    return "\n    ".join([text, *skipped_parts(record)])


def run_topic(topic: str, lines: list[str], timeout_s: float) -> int:
    """Run the lines that are not known to hold and print all; returns the exit code."""
    results = HERE / "results" / f"accept-{topic}.jsonl"
    revision = commit()
    results.parent.mkdir(exist_ok=True)
    known = [] if revision.endswith(DIRTY) else committed_records(results)
    records: list[dict[str, Any]] = []
    for module in sorted((HERE / topic).glob("line*_*.py"), key=number):
        if lines and str(number(module)) not in lines:
            continue
        tree = tree_of(module)
        record = {"line": module.stem, "commit": revision, "tree": tree}
        if earlier := held_before(known, module.stem, tree):
            record = earlier | {"verdict": EARLIER}
        else:
            print(f"--- {module.stem}", file=sys.stderr, flush=True)
            record |= run_line(module, timeout_s)
            with results.open("a") as out:
                out.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
        records.append(record)
    print("\n".join(map(shown, records)), file=sys.stderr)
    code = exit_code([record["verdict"] for record in records])
    found = {r["line"]: {k: v for k, v in r.items() if k not in ("line", "tree")} for r in records}
    print(json.dumps({"topic": topic, "commit": revision, "ok": code == 0, "lines": found}))
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("lines", nargs="*", help="line numbers; all when none is given")
    parser.add_argument("--timeout", type=float, default=9000, help="seconds per line")
    args = parser.parse_args()
    # exits together with its line
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run_topic(args.topic, args.lines, args.timeout)


if __name__ == "__main__":
    sys.exit(main())
