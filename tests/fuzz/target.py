"""What is fuzzed: one file under targets/ each, with a class `Fuzzed`."""

from pathlib import Path
from random import Random
from typing import Protocol


class Target(Protocol):
    """Something that reads what strangers send."""

    def __init__(self, folder: Path) -> None:
        """Makes what all cases need; `folder` is its own."""

    def case(self, rng: Random) -> str:
        """One hostile input; returns how it ended, e.g. "refused". An exception is a finding."""
        ...
