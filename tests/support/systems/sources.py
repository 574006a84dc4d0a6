"""The state of the checkout, so that results are reused only for the same sources."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
RESULTS = "benchmarks/results"
PROSE = (f"{RESULTS}/", "docs/", "README.md", "CONTRIBUTING.md")
DIRTY = "-dirty"


def commit() -> str:
    """Return the commit, with "-dirty" after it if files outside the results have changed."""
    changed = _git("status", "--porcelain", "--", ".", f":!{RESULTS}")
    return _git("rev-parse", "--short=12", "HEAD") + (DIRTY if changed else "")


def source_tree() -> str:
    """Return a hash of all committed files except results and prose."""
    entries = _git("ls-tree", "-r", "HEAD").splitlines()
    kept = [entry for entry in entries if not entry.split("\t")[1].startswith(PROSE)]
    return _git("hash-object", "--stdin", text="\n".join(kept))[:12]


def _git(*words: str, text: str | None = None) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, input=text, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()
