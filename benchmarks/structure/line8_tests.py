"""Line 8: tests ask public objects and wait in one place; what was tested only from afar is tested
directly, with seeds; the acceptance counts what was skipped as skipped."""

import json
import re
import sys
from pathlib import Path

from pytest_line import run_tests

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

from test_tests import MOST_POKES, pokes  # noqa: E402

DIRECTLY = ("Scheduler", "JobTable", "BlockTables", "StepProgress")
SEEDED = re.compile(r"\bRandom\(|from hypothesis|import hypothesis")


def seeded_tests(name: str) -> list[str]:
    """Test files that import a class and draw what they do with it."""
    imported = re.compile(rf"^from pdserve\.\S+ import .*\b{name}\b", re.MULTILINE)
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if imported.search(text := path.read_text()) and SEEDED.search(text)
    ]


def main() -> None:
    found = pokes()
    directly = {name: seeded_tests(name) for name in DIRECTLY}
    files = sorted({path for paths in directly.values() for path in paths})
    ran = run_tests("tests/test_tests.py", "tests/benchmarks/test_accept.py", *files)
    print(json.dumps({
        "ok": found.total() <= MOST_POKES and all(directly.values()) and ran["ok"],
        "pokes": found.total(),
        "most_pokes": MOST_POKES,
        "files_that_poke": dict(found.most_common(10)),
        "direct_tests": directly,
        "tests": ran,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
