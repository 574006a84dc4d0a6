"""Hooks of mkdocs.yml: README is the site's first page, and links to files outside docs lead to the
repository."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\(|srcset=\"|src=\")([^)\s\"#]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add README as index.md."""
    text = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=_relinked(text, Path(), config)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Redirect links that leave docs."""
    folder = (Path("docs") / page.file.src_uri).parent
    return markdown if page.file.src_uri == "index.md" else _relinked(markdown, folder, config)


def _relinked(text: str, folder: Path, config: Any) -> str:
    """Rewrite the links of a page in `folder`, relative to the repository's root."""

    def relinked(match: re.Match[str]) -> str:
        start, target = match.groups()
        if "://" in target or target.startswith(("mailto:", "/")):
            return match.group()
        path = (ROOT / folder / target).resolve().relative_to(ROOT)
        if path.parts[:1] != ("docs",):
            return f"{start}{config.repo_url}/blob/main/{path}"
        return f"{start}{path.relative_to('docs')}" if folder == Path() else match.group()

    return LINK.sub(relinked, text)
