"""How far something is: bars on a terminal, plain lines elsewhere."""

from typing import Any, Protocol, TextIO

STEP = 0.25  # plain lines are this far apart


class ProgressView(Protocol):
    """A view is told how far the loading of each worker is."""

    def update(self, name: str, fraction: float) -> None: ...
    def close(self) -> None: ...


class Lines:
    """Prints a line for each quarter that is done."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown: dict[str, float] = {}

    def update(self, name: str, fraction: float) -> None:
        step = int(min(1.0, fraction) / STEP) * STEP
        if step > self._shown.get(name, -1.0):
            self._shown[name] = step
            print(f"{name} {step:.0%}", file=self._out, flush=True)

    def close(self) -> None:
        """Does nothing: no resource is held."""


class Bars:
    """Draws a bar for each name; the bars go when all is done."""

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
        self._bars.start()

    def update(self, name: str, fraction: float) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=1.0)
        self._bars.update(self._tasks[name], completed=min(1.0, fraction))

    def close(self) -> None:
        self._bars.stop()


def progress_on(out: TextIO) -> ProgressView:
    """Returns Bars if `out` is a terminal and rich is installed, otherwise Lines."""
    if out.isatty():
        try:
            return Bars(out)
        except ImportError:
            return Lines(out)
    return Lines(out)
