"""Runs the acceptance lines of one topic and prints one JSON object per line.

`python benchmarks/accept.py TOPIC [LINE ...]` runs every module benchmarks/TOPIC/lineN_*.py in a
process of its own. A line that has passed on the same tree is not run again: results are appended
to benchmarks/results/accept-TOPIC.jsonl with the commit they measured. The last line printed is
one JSON object with the figures of every line; the exit code is 0 only if all of them hold.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
UNMEASURED = ("benchmarks/results/", "docs/", "README.md", "CONTRIBUTING.md")


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit() -> str:
    """The commit measured; changes outside the results mark it dirty, and nothing is skipped."""
    dirty = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if dirty else "")


def source_tree() -> str:
    """Changes whenever anything but results and prose changes."""
    entries = git("ls-tree", "-r", "HEAD", "--", ".").splitlines()
    kept = [e for e in entries if not e.split("\t")[1].startswith(UNMEASURED)]
    return subprocess.run(
        ["git", "hash-object", "--stdin"],
        cwd=ROOT,
        input="\n".join(kept),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()[:12]


def passed_before(path: Path, tree: str) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    records = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    return {r["line"]: r for r in records if r["tree"] == tree and r["ok"]}


def run_line(module: Path, timeout_s: float) -> dict[str, Any]:
    """Runs one line; its last line of standard output is its JSON object."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, str(module)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{HERE}:{ROOT}/tests/support"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        raw = late.stdout or b""
        output, code = raw.decode(errors="replace") if isinstance(raw, bytes) else raw, -1
    sys.stderr.write(output)
    try:
        figures = json.loads(output.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        figures = {"ok": False, "error": f"no result (exit code {code})"}
    figures["ok"] = bool(figures.get("ok")) and code == 0
    figures["seconds"] = round(time.monotonic() - started, 1)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("lines", nargs="*", help="line numbers; all when none is given")
    parser.add_argument("--timeout", type=float, default=9000, help="seconds per line")
    args = parser.parse_args()

    results = HERE / "results" / f"accept-{args.topic}.jsonl"
    revision, tree = commit(), source_tree()
    results.parent.mkdir(exist_ok=True)
    known = {} if revision.endswith("-dirty") else passed_before(results, tree)
    summary: dict[str, Any] = {}
    for module in sorted((HERE / args.topic).glob("line*_*.py")):
        name = module.stem
        number = name.removeprefix("line").split("_")[0]
        if args.lines and number not in args.lines:
            continue
        record = known.get(name)
        if record is None:
            print(f"--- {name}", file=sys.stderr, flush=True)
            record = {"line": name, "commit": revision, "tree": tree}
            record |= run_line(module, args.timeout)
            with results.open("a") as out:
                out.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
        summary[name] = {k: v for k, v in record.items() if k not in ("line", "tree")}
    ok = all(record["ok"] for record in summary.values())
    print(json.dumps({"topic": args.topic, "ok": ok, "lines": summary}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
