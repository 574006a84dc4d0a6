"""The tools of a session."""

from pathlib import Path


def list_files(folder: str) -> str:
    """List the files of a folder."""
    return "\n".join(sorted(path.name for path in Path(folder).iterdir()))


def write_file(path: str, content: str) -> str:
    """Write a text file."""
    Path(path).write_text(content)
    return f"{len(content)} characters are written"
