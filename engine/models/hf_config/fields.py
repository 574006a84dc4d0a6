"""Reads single config.json fields, each with its bounds.

A malformed field raises UnsupportedModel that names the field.
"""

import sys
from collections.abc import Mapping
from typing import Any

from pdserve.engine.models.config import UnsupportedModel

HfConfig = Mapping[str, Any]

_MAX_FLOAT = sys.float_info.max  # integers of JSON may be larger
MAX_SIZE = 1 << 30  # a bound on every count, so that products fit in 64 bits


def integer(
    hf: HfConfig, key: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE
) -> int:
    """Return hf[key] in [minimum, maximum]; `default` if it is absent or null."""
    value = hf.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise UnsupportedModel(f"config field {key}={value!r}: expected {minimum} to {maximum}")
    return value


def positive(
    hf: HfConfig, key: str, default: float | None = None, maximum: float = _MAX_FLOAT
) -> float:
    """Return hf[key] as a number > 0, at most `maximum`; `default` if it is absent or null."""
    value = hf.get(key)
    number = _positive(key, default if value is None else value)
    if number > maximum:
        raise UnsupportedModel(f"config field {key}={number!r}: expected at most {maximum:g}")
    return number


def positives(hf: HfConfig, key: str, count: int) -> tuple[float, ...]:
    """Return hf[key] as `count` finite numbers > 0."""
    values = hf.get(key)
    if not isinstance(values, list | tuple) or len(values) != count:
        raise UnsupportedModel(f"config field {key}: expected {count} numbers")
    return tuple(_positive(key, value) for value in values)


def table(hf: HfConfig, key: str) -> HfConfig:
    """Return hf[key] as a mapping; empty if it is absent or null."""
    value = hf.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UnsupportedModel(f"config field {key}={value!r}: expected a table")
    return value


def _positive(key: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MAX_FLOAT:
        return float(value)
    raise UnsupportedModel(f"config field {key}={value!r}: expected a finite number > 0")
