"""Fuzz targets: one file each under targets/, with a class `Fuzzed`."""

from pathlib import Path
from random import Random
from typing import Protocol


class Target(Protocol):
    """A component that reads input from untrusted senders."""

    def __init__(self, folder: Path) -> None:
        """Make what all cases need; `folder` belongs to this target only."""

    def case(self, rng: Random) -> str:
        """Run one hostile input; return its outcome, e.g. "refused". An exception is a finding."""
        ...
