"""Disk caches of data derived from a model's files, keyed by the files' device, inode, size and
time.

They live below $XDG_CACHE_HOME/pdserve. Losing them costs only time; damaged entries are rebuilt.
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

DIGEST_RULES = "1"  # increment when the input of a digest changes
TEXT_RULES = "3"  # increment when the facts read from a tokenizer change


class FileCache:
    """A disk cache of one piece of data per list of source files. `kind` names the cache's folder;
    `rules` is the version of the derivation, so that a new version finds no old entries."""

    def __init__(self, kind: str, rules: str, folder: Path | None = None) -> None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = folder or root / "pdserve" / kind
        self._rules = rules

    def get(self, files: Sequence[str]) -> bytes | None:
        """Return the cached data of these source files; None if it is missing or a file has
        changed."""
        try:
            return self._entry(files).read_bytes()
        except OSError:
            return None

    def put(self, files: Sequence[str], data: bytes) -> None:
        """Cache the data of these source files; do nothing if it cannot be written."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(data)
            os.replace(file.name, self._entry(files))

    def _entry(self, files: Sequence[str]) -> Path:
        """Return the path of the cached data of these source files. Raises OSError if a source file
        is missing."""
        stats = [os.stat(file) for file in files]
        identity = [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]
        return self._folder / hashlib.sha256(f"{self._rules} {identity}".encode()).hexdigest()


class DigestCache:
    """A disk cache of weight digests by weight files. `part` names a subset of the weights, empty
    for all."""

    def __init__(self, folder: Path | None = None, part: str = "") -> None:
        self._files = FileCache("digests", f"{DIGEST_RULES}{part}", folder)

    def get(self, files: Sequence[str]) -> str | None:
        """Return the cached digest of these weight files; None if it is missing or a file has
        changed."""
        text = (self._files.get(files) or b"").decode("ascii", "replace")
        is_digest = len(text) == 64 and not set(text) - set("0123456789abcdef")
        return text if is_digest else None

    def put(self, files: Sequence[str], digest: str) -> None:
        """Cache the digest of these weight files; do nothing if it cannot be written."""
        self._files.put(files, digest.encode())


class TextCache:
    """A disk cache of TextFiles by source files. An entry is a line of JSON (all fields except the
    tokenizer), then tokenizer.json."""

    def __init__(self, folder: Path | None = None) -> None:
        self._files = FileCache("tokenizers", TEXT_RULES, folder)

    def get(self, files: Sequence[str]) -> TextFiles | None:
        """Return the cached TextFiles of these files; None if missing or damaged, or if a file has
        changed."""
        head, line, tokenizer = (self._files.get(files) or b"").partition(b"\n")
        try:
            facts = json.loads(head)
            digest = facts.pop("sha256")
            facts["eos_ids"] = tuple(facts["eos_ids"])
            text = TextFiles(tokenizer, **facts)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        return text if line and hashlib.sha256(tokenizer).hexdigest() == digest else None

    def put(self, files: Sequence[str], text: TextFiles) -> None:
        """Cache the TextFiles of these files; do nothing if they cannot be written."""
        facts = asdict(text)
        tokenizer: bytes = facts.pop("tokenizer_json")
        head = json.dumps({**facts, "sha256": hashlib.sha256(tokenizer).hexdigest()})
        self._files.put(files, head.encode() + b"\n" + tokenizer)
