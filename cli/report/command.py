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

from pdserve.cli.options import ReportSettings, Settings
from pdserve.cli.report.parts import NoData, Part, Secrets, parts
from pdserve.engine.handoff.recorder import SUFFIX as RING

FOLDER = "pdserve-report"
SUMMARY = "summary.txt"
STDOUT = "-"
MAX_FILE_BYTES = 4 << 20  # the end of a longer file is kept
MAX_BYTES = 64 << 20  # of all files, before compression


PartResult = dict[str, bytes] | str  # files by name, or the reason for having none


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Return 0 if the file is written, even with missing parts; otherwise 1."""
    options = settings.build(ReportSettings)
    out = options.out or time.strftime("pdserve-report-%Y%m%d-%H%M%S.tar.gz")
    secrets = Secrets(os.environ, settings)
    bundle = Bundle(secrets)
    for name, part in collect_parts(parts(options), options.within_s).items():
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
    print(f"report written to {out}")
    return 0


def collect_parts(makers: Mapping[str, Part], timeout_s: float) -> dict[str, PartResult]:
    """Collect all parts within `timeout_s`: by part, its files by name, or why it has none."""
    done: queue.SimpleQueue[tuple[str, PartResult]] = queue.SimpleQueue()

    def make(name: str, part: Part) -> None:
        try:
            done.put((name, part()))
        except Exception as error:  # any failure: the report must still be written
            prefix = "" if isinstance(error, NoData) else f"{type(error).__name__}: "
            done.put((name, f"{prefix}{error}"))

    for name, part in makers.items():
        threading.Thread(target=make, args=(name, part), name=name, daemon=True).start()
    results: dict[str, PartResult] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(makers):
        try:
            name, result = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        results[name] = result
    return {name: results.get(name, f"not finished within {timeout_s:g} s") for name in makers}


class Bundle:
    """The files of a report, bounded in size, without secrets."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._files: dict[str, bytes] = {}
        self._summary_lines: list[str] = []
        self._free_bytes = MAX_BYTES

    def add(self, name: str, part: PartResult) -> None:
        """Add the files of a part, or the reason why it has none."""
        if isinstance(part, str):
            self._summary_lines.append(
                f"{name}: MISSING: {self._secrets.hide(part.encode()).decode()}"
            )
            return
        for path, data in part.items():
            size_note = "" if len(data) <= MAX_FILE_BYTES else f", truncated from {len(data)}"
            if path.endswith(RING):  # only numbers and ids; a truncated ring is unreadable
                content, size_note = data, ""
            else:
                content = self._secrets.hide(data)[-MAX_FILE_BYTES:]  # a cut may split a secret
            if len(content) > self._free_bytes:
                self._summary_lines.append(
                    f"{name}: {path} is omitted: the report has reached its size limit"
                )
                continue
            self._free_bytes -= len(content)
            self._files[path] = content
            self._summary_lines.append(f"{name}: {path}, {len(content)} bytes{size_note}")

    def summary(self) -> str:
        """A line for each file, and for each missing part."""
        return "\n".join(self._summary_lines) + "\n"

    def packed(self) -> bytes:
        """The bundle as a tar.gz."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path, data in {SUMMARY: self.summary().encode(), **self._files}.items():
                entry = tarfile.TarInfo(f"{FOLDER}/{path}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))
        return buffer.getvalue()
