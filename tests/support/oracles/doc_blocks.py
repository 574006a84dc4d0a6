"""The fenced blocks of the documents, each with the comment before it that says who runs it.

`<!-- not run: REASON -->` marks a block that no test can run, `<!-- run by: PATH -->` one that the
test in PATH runs.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (not run|run by): ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block. `not_run` and `run_by` are the texts of its comment, or empty."""

    page: str
    line: int
    language: str
    text: str
    not_run: str
    run_by: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> Iterator[Block]:
    """Yield the blocks of all pages, in these languages if any are given."""
    for path in PAGES:
        page, text = str(path.relative_to(ROOT)), path.read_text()
        for found in BLOCK.finditer(text):
            kind, comment, language, body = found.groups()
            if languages and language not in languages:
                continue
            line = text.count("\n", 0, found.start()) + 1
            marks = {kind: comment}
            yield Block(
                page, line, language, body, marks.get("not run", ""), marks.get("run by", "")
            )


def prose() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each page without its blocks."""
    for path in PAGES:
        yield str(path.relative_to(ROOT)), BLOCK.sub("", path.read_text())
