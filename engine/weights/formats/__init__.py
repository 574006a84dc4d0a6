"""The storage formats of weights, by name. A module in this package defines a family of formats in
a tuple FORMATS and is found by discovery; a module elsewhere calls `register`."""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType

from pdserve.engine.weights.format import Format
from pdserve.engine.weights.formats.grouped import (
    CODES,
    FP4,
    FP8,
    INT4,
    INT8,
    SCALES,
    ZEROS,
    even_groups,
    float4,
    nibbles,
    packed_nibbles,
    scales_of,
)

_formats: dict[str, Format] = {}


def register(*added: Format) -> None:
    """Add storage formats. Raises ValueError if one of their names is taken."""
    for item in added:
        if _formats.setdefault(item.name, item) is not item:
            raise ValueError(f"storage format {item.name} is registered twice")


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        register(*import_module(module.name).FORMATS)


def formats() -> Mapping[str, Format]:
    """Return all storage formats by name, except those of plain numbers
    (engine/weights/format.py)."""
    _discover()
    return MappingProxyType(_formats)
