"""Displays the progress of operations: bars on a terminal, otherwise lines of text."""

import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, BinaryIO, Protocol, TextIO

STEP = 0.25  # fraction between two plain lines
PIPE_BYTES = 1 << 20  # for lines that this process has not read yet, e.g. while it is stopped
LAST_LINES_S = 1.0  # limit for reading the last lines that children wrote


class ProgressView(Protocol):
    """Interface that displays the progress of named operations: for each, a fraction from 0 to
    1."""

    def update(self, name: str, fraction: float) -> None: ...
    def close(self) -> None: ...


class Lines:
    """A progress view that writes a line of text when an operation completes another quarter."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._shown: dict[str, float] = {}

    def update(self, name: str, fraction: float) -> None:
        step = int(min(1.0, fraction) / STEP) * STEP
        if step > self._shown.get(name, -1.0):
            self._shown[name] = step
            self._say(f"{name} {step:.0%}")

    def close(self) -> None:
        """Do nothing, because this view holds no resource."""


class Bars:
    """A progress view that draws a bar for each operation on a terminal; `close` removes the
    bars."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            TextColumn("{task.description:12}"),
            BarColumn(40),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=Console(file=out),
            transient=True,
        )
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()  # rich may print a line in the middle of its `stop`
        self._bars.start()

    def update(self, name: str, fraction: float) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=1.0)
        self._bars.update(self._tasks[name], completed=min(1.0, fraction))

    def close(self) -> None:
        with self._lock:
            self._bars.stop()

    def print(self, line: str) -> None:
        """Print a line of text above the bars. Thread-safe."""
        with self._lock:
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_on(out: TextIO) -> ProgressView:
    """Return the progress view for `out`: Bars if it is a terminal and rich is installed, otherwise
    Lines."""
    if out.isatty():
        with suppress(ImportError):
            return Bars(out)
    return Lines(partial(print, file=out, flush=True))


@contextmanager
def progress_below_log() -> Iterator[ProgressView]:
    """Yield a progress view on standard error. If it draws bars, lines that this process and its
    children write to standard error in the meantime are printed above the bars."""
    if not sys.stderr.isatty():
        yield progress_on(sys.stderr)
        return
    with os.fdopen(os.dup(2), "w") as terminal:
        view = progress_on(terminal)
        try:
            if isinstance(view, Bars):
                with _lines_to(view.print):
                    yield view
            else:
                yield view
        finally:
            view.close()


@contextmanager
def _lines_to(take: Callable[[str], None]) -> Iterator[None]:
    """Pass each line that this process and its children write to standard error during the block to
    `take`, which is called on a thread."""
    sys.stderr.flush()
    saved_stderr = os.dup(2)
    reader, writer = os.pipe()
    with suppress(OSError):  # exceeds this user's limit
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.dup2(writer, 2)
    os.close(writer)
    thread = threading.Thread(target=_read, args=(os.fdopen(reader, "rb"), take), daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
        thread.join(LAST_LINES_S)  # the thread ends when every writer has ended


def _read(file: BinaryIO, take: Callable[[str], None]) -> None:
    with file:
        for line in file:
            take(line.decode(errors="replace").rstrip("\n"))
