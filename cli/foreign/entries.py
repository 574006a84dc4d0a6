"""The kinds of entries in the table of foreign options: what an option of another server is in
pdserve. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.cli.options import FALSE, TRUE, OptionError

# (name as typed, its value) -> flags of pdserve with their values; raises OptionError
Meaning = Callable[[str, str], list[str]]
ON = (*TRUE, "enabled")  # values of a switch
OFF = (*FALSE, "disabled")


@dataclass(frozen=True, slots=True)
class Renamed:
    """Options with an equivalent: `flag`, or what `meaning` makes of the value.

    Names that begin with a dash are flags, names in capitals are environment variables. `takes` is
    "value", "optional" (a value that may be missing), "several" (values up to the next flag) or
    "nothing". `shown` is the equivalent as the documentation shows it, if it is not just `flag`.
    """

    names: tuple[str, ...]
    flag: str
    meaning: Meaning | None = None
    takes: str = "value"
    shown: str = ""
    commands: tuple[str, ...] = ()  # those to which the entry is limited

    def translate(self, name: str, value: str) -> list[str]:
        """Return the flags of pdserve that mean the same; none for a switch that is off. Raises
        OptionError, with a sentence that names the alternative, if this value has no equivalent."""
        if self.takes == "nothing" and value.lower() in OFF:
            return []
        if self.meaning:
            return self.meaning(name, value)
        return [self.flag] if self.takes == "nothing" else [self.flag, value]


@dataclass(frozen=True, slots=True)
class Implied:
    """Options that ask for what pdserve does anyway, and are accepted. `takes` is as in
    `Renamed`."""

    names: tuple[str, ...]
    because: str
    takes: str = "nothing"
    commands: tuple[str, ...] = ()  # those to which the entry is limited


@dataclass(frozen=True, slots=True)
class Lacking:
    """Options without an equivalent. `names` may be patterns with `*`; `sentence` says why there is
    none and what to use instead."""

    names: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options that set a default for requests: `key` of generation_config.json, whose value is of
    type `kind`. The value `none` means no default."""

    names: tuple[str, ...]
    key: str
    kind: type
    none: float | None = None

    def parse(self, name: str, value: str) -> float:
        """Return the value as a number. Raises OptionError if it is not one."""
        try:
            number: float = self.kind(value)
        except ValueError:
            noun = "a whole number" if self.kind is int else "a number"
            raise OptionError(f"{name}: {value!r} is not {noun}") from None
        return number


Entry = Renamed | Implied | Lacking | Sampling


def refuse(name: str, value: str, sentence: str) -> OptionError:
    """Return the error for a value of an option that has no equivalent."""
    return OptionError(f"{name} {value}: {sentence}" if value else f"{name}: {sentence}")
