"""Line 9: earlier acceptance lines, from their results; they are not run here. line9_chaos.py and
line9_speed.py run the other parts.

Each line's last record must have held completely on this source tree. One that held on another tree
is named with its commit and counts as skipped; for each such commit, the folders that have changed
since are listed. Whether the line still holds depends on what it runs, which a person decides.
"""

import json
from collections import Counter
from typing import Any

from accept import (
    FAILED,
    HELD,
    HERE,
    SKIPPED,
    UNMEASURED,
    committed_records,
    exit_code,
    git,
    judged,
    number,
    skipped_parts,
    tree_of,
)

TOPICS = ("main", "cpu", "handoff")


def last_records(topic: str) -> dict[str, dict[str, Any]]:
    records = committed_records(HERE / "results" / f"accept-{topic}.jsonl")
    return {record["line"]: record for record in records}


def changed_since(commit: str) -> dict[str, int]:
    """Changed files by folder, other than results and prose."""
    names = git("diff", "--name-only", commit, "HEAD").splitlines()
    kept = [name for name in names if not name.startswith(UNMEASURED)]
    return dict(Counter("/".join(name.split("/")[:2]) for name in kept).most_common(12))


def stands(record: dict[str, Any] | None, tree: str) -> dict[str, Any]:
    if record is None:
        return {"ok": False, "error": "never run"}
    found = {"ok": record["verdict"] != FAILED, "commit": record["commit"]}
    if record["verdict"] == SKIPPED:
        found["skipped"] = "; ".join(skipped_parts(record))
    elif record["verdict"] == HELD and record["tree"] != tree:
        found["skipped"] = f"held at {record['commit']}, before other changes"
    return found


def main() -> int:
    topics: dict[str, dict[str, Any]] = {}
    for topic in TOPICS:
        records = last_records(topic)
        modules = sorted((HERE / topic).glob("line*_*.py"), key=number)
        topics[topic] = {m.stem: stands(records.get(m.stem), tree_of(m)) for m in modules}
    lines = [line for found in topics.values() for line in found.values()]
    earlier = sorted({line["commit"] for line in lines if "skipped" in line})
    changed = {commit: changed_since(commit) for commit in earlier}
    ok = all(line["ok"] for line in lines)
    figures = judged({"ok": ok, **topics, "changed_files_since": changed})
    print(json.dumps(figures))
    return exit_code([figures["verdict"]])


if __name__ == "__main__":
    raise SystemExit(main())
