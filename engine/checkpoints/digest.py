"""The digest of a model's weights, and where it is remembered.

The digest is the root of a Merkle tree (RFC 6962's rule: leaves prefixed 0, nodes 1) over the
tensors sorted by name; a leaf hashes name, format, shape and the SHA-256 of the stored bytes in
Hugging Face's row order. It thus names the weights, not the files they came in.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pdserve.engine.weights.format import RawTensor

RULES = "1"  # raise it when a leaf's content changes


def leaf(name: str, raw: RawTensor) -> bytes:
    """The hash of one tensor; of several parts, over their hashes in the order of their names."""
    hashes = [
        hashlib.sha256(np.ascontiguousarray(part).data).digest()
        for _, part in sorted(raw.parts.items())
    ]
    content = hashes[0] if len(hashes) == 1 else hashlib.sha256(b"".join(hashes)).digest()
    head = json.dumps([name, raw.format, list(raw.shape)], separators=(",", ":")).encode()
    return hashlib.sha256(b"\0" + content + head).digest()


def merkle_root(leaves: Mapping[str, bytes]) -> str:
    """Hex root over the leaves in the order of their names; an odd node moves up unchanged."""
    level = [leaves[name] for name in sorted(leaves)]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [
            hashlib.sha256(b"\1" + b"".join(p)).digest() if len(p) > 1 else p[0] for p in pairs
        ]
    return level[0].hex() if level else hashlib.sha256(b"").hexdigest()


class DigestCache:
    """Digests by the identity of the files they were computed from; losing it costs only time."""

    def __init__(self, folder: Path | None = None) -> None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = folder or root / "pdserve" / "digests"

    def get(self, files: Sequence[str]) -> str | None:
        """The remembered digest of weights in `files`, unchanged since."""
        try:
            text = self._entry(files).read_text("ascii")
        except (OSError, UnicodeDecodeError):
            return None
        good = len(text) == 64 and not set(text) - set("0123456789abcdef")
        return text if good else None

    def put(self, files: Sequence[str], digest: str) -> None:
        """Remembers it, or does nothing where that cannot be written."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
                file.write(digest)
            os.replace(file.name, self._entry(files))

    def _entry(self, files: Sequence[str]) -> Path:
        """Raises OSError if a file is gone."""
        stats = [os.stat(file) for file in files]
        identity = [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]
        return self._folder / hashlib.sha256(f"{RULES} {identity}".encode()).hexdigest()
