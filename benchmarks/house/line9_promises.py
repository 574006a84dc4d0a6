"""Line 9: the acceptance lines of before, from their results; nothing is run here.

Each line's last record must have held, whole, on this source tree. One that held on another tree is
named with its commit and the folders that have changed since, and counts as skipped: whether it may
stand depends on what it runs, which a person decides.
"""

import json
from collections import Counter
from typing import Any

from accept import HELD, HERE, UNMEASURED, exit_code, git, judged, number, source_tree

TOPICS = ("main", "cpu", "handoff")


def last_records(topic: str) -> dict[str, dict[str, Any]]:
    path = HERE / "results" / f"accept-{topic}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {(record := json.loads(text))["line"]: judged(record) for text in lines if text.strip()}


def changed_since(commit: str) -> dict[str, int]:
    """Changed files by folder, other than results and prose."""
    names = git("diff", "--name-only", commit.removesuffix("-dirty"), "HEAD").splitlines()
    kept = [name for name in names if not name.startswith(UNMEASURED)]
    return dict(Counter("/".join(name.split("/")[:2]) for name in kept).most_common(12))


def stands(record: dict[str, Any] | None, tree: str) -> dict[str, Any]:
    if record is None:
        return {"ok": False, "error": "never run"}
    found = {"ok": record["verdict"] == HELD, "commit": record["commit"]}
    if record["verdict"] != HELD:
        return found | {"verdict": record["verdict"]}
    if record["tree"] != tree:
        found["skipped"] = f"held at {record['commit']}, before other changes"
        found["changed"] = changed_since(record["commit"])
    return found


def main() -> int:
    tree = source_tree()
    topics: dict[str, dict[str, Any]] = {}
    for topic in TOPICS:
        records = last_records(topic)
        modules = sorted((HERE / topic).glob("line*_*.py"), key=number)
        topics[topic] = {m.stem: stands(records.get(m.stem), tree) for m in modules}
    lines = [line for found in topics.values() for line in found.values()]
    figures = judged({"ok": all(line["ok"] for line in lines), **topics})
    print(json.dumps(figures))
    return exit_code([figures["verdict"]])


if __name__ == "__main__":
    raise SystemExit(main())
