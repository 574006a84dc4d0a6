"""The context of a part of `make bench-gpu`: its device, its time, and its figures, which are
written whenever one is added, so that a killed part has reported its results so far."""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class MeasuredPart:
    """One part; the folder has the records of earlier parts."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.fake: bool = options.fake
        self.smallest: bool = options.smallest
        self.only: str = options.only
        self.folder = Path(options.folder)
        self.device = "cpu" if self.fake else "cuda"
        self._name = name
        self._ends_s = time.monotonic() + options.seconds
        self.record: dict[str, Any] = {"figures": {}, "skipped": {}}

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def note(self, **figures: Any) -> None:
        """Add figures."""
        self.record["figures"] |= figures
        self._write()

    def skip(self, name: str, reason: str) -> None:
        """Record the name of a figure that cannot be measured here, and the reason."""
        self.record["skipped"][name] = reason
        self._write()

    def earlier(self, name: str) -> dict[str, Any]:
        """The figures of a part that has run before; empty if it has none."""
        path = self.folder / f"{name}.json"
        figures: dict[str, Any] = json.loads(path.read_text())["figures"] if path.exists() else {}
        return figures

    def fail(self, reason: str) -> None:
        self.record["error"] = reason
        self._write()

    def _write(self) -> None:
        path = self.folder / f"{self._name}.json"
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(self.record))
        beside.rename(path)


def run(measure: Callable[[MeasuredPart], None]) -> None:
    """Run the main of a part's module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="where records and models are")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--smallest", action="store_true", help="the fewest sizes")
    parser.add_argument("--only", default="", help="a piece of the part, which runs several")
    parser.add_argument("--watched", action="store_true", help="by compute-sanitizer")
    options = parser.parse_args()
    part = MeasuredPart(Path(sys.argv[0]).stem, options)
    fake_device() if part.fake else own_stream()
    try:
        measure(part)
    except Exception as error:
        traceback.print_exc()
        part.fail(f"{type(error).__name__}: {error}"[:2000])
    sys.stdout.flush()
    code = bool(part.record.get("error"))
    if options.watched:
        sys.exit(code)  # compute-sanitizer reports its findings when a process ends
    os._exit(code)  # a context broken by a failed kernel may never exit


def fake_device() -> None:
    """Load the interpreter of kernels, which run.py has enabled for this process: see
    triton_interpreter."""
    import torch
    from fakes import triton_interpreter as _  # noqa: F401

    torch.set_num_threads(1)


def own_stream() -> None:
    """Use a stream that can be recorded for this thread's launches; the default stream cannot."""
    import torch

    torch.cuda.set_stream(torch.cuda.Stream())
