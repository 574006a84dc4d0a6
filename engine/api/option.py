"""The definition of an option: a field of a settings dataclass, of an engine or of a process.

Pure; it imports no other module of pdserve, so that engine and services can both use it.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Any


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

    `secret` values are masked wherever settings are shown; `flag` overrides the flag's name. The
    field's metadata omits absent properties.
    """
    metadata: dict[str, Any] = {"help": help}
    properties = {
        "choices": choices,
        "min": min,
        "max": max,
        "flag": flag,
        "secret": secret or None,
    }
    metadata.update({name: value for name, value in properties.items() if value is not None})
    return field(default=default, metadata=metadata)
