"""`pdserve report` writes one file that helps to diagnose a broken system.

Each part is collected on its own thread. The bundle names each part that fails or is late, with the
reason; the others are written anyway. Invariant: the bundle has no value of a secret option, no
password in a URL (`Secrets`), and no prompt, since none of its sources has one.
"""

import io
import os
import queue
import sys
import tarfile
import threading
import time
from collections.abc import Mapping

from pdserve.engine.handoff.recorder.ring import SUFFIX as RING
from pdserve.services.cli.report.parts import NothingThere, Part, parts
from pdserve.services.cli.report.secrets import Secrets
from pdserve.services.options.settings import ReportSettings
from pdserve.services.options.sources import Settings

FOLDER = "pdserve-report"
SUMMARY = "summary.txt"
STDOUT = "-"
MAX_FILE_BYTES = 4 << 20  # the end of a longer file is kept
MAX_BYTES = 64 << 20  # of all files, before compression


Made = dict[str, bytes] | str  # files by name, or why there are none


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Return 0 if the file is written, even with missing parts; otherwise 1."""
    chosen = settings.build(ReportSettings)
    out = chosen.out or time.strftime("pdserve-report-%Y%m%d-%H%M%S.tar.gz")
    secrets = Secrets(os.environ, settings)
    bundle = Bundle(secrets)
    for name, part in gathered(parts(chosen), chosen.within_s).items():
        bundle.add(name, part)
    if out == STDOUT:
        sys.stdout.buffer.write(bundle.packed())
        sys.stdout.flush()
        print(bundle.summary(), end="", file=sys.stderr)
        return 0
    try:
        with os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(bundle.packed())
    except OSError as error:
        print(f"pdserve report: cannot write {out}: {error.strerror}", file=sys.stderr)
        return 1
    print(bundle.summary(), end="")
    print(f"written: {out}")
    return 0


def gathered(makers: Mapping[str, Part], timeout_s: float) -> dict[str, Made]:
    """Collect all parts within `timeout_s`: by part, its files by name, or why it has none."""
    done: queue.SimpleQueue[tuple[str, Made]] = queue.SimpleQueue()

    def make(name: str, part: Part) -> None:
        try:
            done.put((name, part()))
        except Exception as error:  # any failure: the report must still be written
            told = "" if isinstance(error, NothingThere) else f"{type(error).__name__}: "
            done.put((name, f"{told}{error}"))

    for name, part in makers.items():
        threading.Thread(target=make, args=(name, part), name=name, daemon=True).start()
    found: dict[str, Made] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < len(makers):
        try:
            name, made = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[name] = made
    return {name: found.get(name, f"not within {timeout_s:g} s") for name in makers}


class Bundle:
    """The files of a report, bounded in size, without secrets."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._files: dict[str, bytes] = {}
        self._said: list[str] = []
        self._left = MAX_BYTES

    def add(self, name: str, part: Made) -> None:
        """Add the files of a part, or the reason why it has none."""
        if isinstance(part, str):
            self._said.append(f"{name}: MISSING: {self._secrets.hide(part.encode()).decode()}")
            return
        for path, data in part.items():
            cut = "" if len(data) <= MAX_FILE_BYTES else f", the last of {len(data)}"
            if path.endswith(RING):  # only numbers and ids; a truncated ring is unreadable
                kept, cut = data, ""
            else:
                kept = self._secrets.hide(data)[-MAX_FILE_BYTES:]  # a cut may split a secret
            if len(kept) > self._left:
                self._said.append(f"{name}: {path} is left out: the report is full")
                continue
            self._left -= len(kept)
            self._files[path] = kept
            self._said.append(f"{name}: {path}, {len(kept)} bytes{cut}")

    def summary(self) -> str:
        """A line for each file, and for each missing part."""
        return "\n".join(self._said) + "\n"

    def packed(self) -> bytes:
        """The bundle as a tar.gz."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for path, data in {SUMMARY: self.summary().encode(), **self._files}.items():
                entry = tarfile.TarInfo(f"{FOLDER}/{path}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))
        return packed.getvalue()
