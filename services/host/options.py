"""An option is written once, as a dataclass field; flags, environment and YAML derive from it.

The options that all processes share are here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LOG_LEVELS = ("debug", "info", "warning", "error")
GRACE_S = 1.0  # for calls to end by themselves, after the drain
STOP_S = 5.0  # then for gRPC to stop


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


@dataclass(frozen=True)
class HostSettings:
    """Options that gateway, router and workers have in common."""

    cluster_secret: str = option("", "shared secret of all internal hops", secret=True)
    drain_s: float = option(30.0, "seconds that running requests get to end at a stop", min=0)
    log_level: str = option("info", "least severity that is logged", choices=LOG_LEVELS)
