"""What was made of a model's files at an earlier start, by the identity of these files.

Kept below $XDG_CACHE_HOME/pdserve; losing it costs only time, and what is damaged is made anew.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pdserve.engine.checkpoints.source import TextFiles

DIGEST_RULES = "1"  # raise it when what a digest is taken of changes
TEXT_RULES = "3"  # raise it when what is read of a tokenizer changes


class FileCache:
    """Bytes by files; `kind` is a folder of its own, `rules` a version of how they are made."""

    def __init__(self, kind: str, rules: str, folder: Path | None = None) -> None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = folder or root / "pdserve" / kind
        self._rules = rules

    def get(self, files: Sequence[str]) -> bytes | None:
        """What is remembered of `files`, unchanged since."""
        try:
            return self._entry(files).read_bytes()
        except OSError:
            return None

    def put(self, files: Sequence[str], data: bytes) -> None:
        """Remembers it, or does nothing where that cannot be written."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(data)
            os.replace(file.name, self._entry(files))

    def _entry(self, files: Sequence[str]) -> Path:
        """Raises OSError if a file is gone."""
        stats = [os.stat(file) for file in files]
        identity = [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]
        return self._folder / hashlib.sha256(f"{self._rules} {identity}".encode()).hexdigest()


class DigestCache:
    """Digests of weights; `part`: which of those in the files, if not all."""

    def __init__(self, folder: Path | None = None, part: str = "") -> None:
        self._files = FileCache("digests", f"{DIGEST_RULES}{part}", folder)

    def get(self, files: Sequence[str]) -> str | None:
        """The remembered digest of weights in `files`, unchanged since."""
        text = (self._files.get(files) or b"").decode("ascii", "replace")
        good = len(text) == 64 and not set(text) - set("0123456789abcdef")
        return text if good else None

    def put(self, files: Sequence[str], digest: str) -> None:
        """Remembers it, or does nothing where that cannot be written."""
        self._files.put(files, digest.encode())


class TextCache:
    """Tokenizers and what they say of themselves: a line of JSON, then tokenizer.json."""

    def __init__(self, folder: Path | None = None) -> None:
        self._files = FileCache("tokenizers", TEXT_RULES, folder)

    def get(self, files: Sequence[str]) -> TextFiles | None:
        """What is remembered of `files`, unchanged since."""
        head, line, tokenizer = (self._files.get(files) or b"").partition(b"\n")
        try:
            facts = json.loads(head)
            digest = facts.pop("sha256")
            facts["eos_ids"] = tuple(facts["eos_ids"])
            found = TextFiles(tokenizer, **facts)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        return found if line and hashlib.sha256(tokenizer).hexdigest() == digest else None

    def put(self, files: Sequence[str], text: TextFiles) -> None:
        """Remembers it, or does nothing where that cannot be written."""
        facts = asdict(text)
        tokenizer: bytes = facts.pop("tokenizer_json")
        head = json.dumps({**facts, "sha256": hashlib.sha256(tokenizer).hexdigest()})
        self._files.put(files, head.encode() + b"\n" + tokenizer)
