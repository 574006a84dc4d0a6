"""An option is written once, as a dataclass field; flags, environment and YAML derive from it."""

from collections.abc import Sequence
from dataclasses import field
from typing import Any

LOG_LEVELS = ("debug", "info", "warning", "error")


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    min: float | None = None,
    max: float | None = None,
    secret: bool = False,
    flag: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line option.

    `secret` values are masked wherever settings are shown; `flag` overrides the flag's name.
    Absent properties are left out of the field's metadata.
    """
    metadata: dict[str, Any] = {"help": help}
    given = {"choices": choices, "min": min, "max": max, "flag": flag, "secret": secret or None}
    metadata.update({name: value for name, value in given.items() if value is not None})
    return field(default=default, metadata=metadata)
