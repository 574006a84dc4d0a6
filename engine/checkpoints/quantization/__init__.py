"""How the weights of a Hugging Face checkpoint are quantized, by `quant_method` of its config.

A method is one module here with a class METHOD, which is found by discovery; a module elsewhere
calls `register`.
"""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights.format import RawTensor

Parts = Mapping[str, NDArray[Any]]  # by the name that stands in place of "weight", read-only


class QuantizationMethod(ABC):
    """Reads weights that are stored as several tensors: `x.qweight`, `x.scales` instead of
    `x.weight`. `layout` is asked for often and reads no more than stored sizes."""

    names: ClassVar[tuple[str, ...]]  # as quant_method has them
    forms: ClassVar[tuple[tuple[str, ...], ...]]  # the parts of a weight; the first that is there
    optional: ClassVar[tuple[str, ...]] = ()  # parts that may be there as well
    unused: ClassVar[tuple[str, ...]] = ()  # stored beside them, and of no use here
    adds_zero_biases: ClassVar[bool] = False  # to modules that have none
    quantizes: bool = True  # any weight at all; else the config is of something else

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None:
        """From quantization_config. Raises ValueError for what is not supported in it."""

    @abstractmethod
    def layout(self, parts: Parts) -> Layout:
        """Format and shape of a weight. Raises ValueError if the parts do not fit together."""

    @abstractmethod
    def read(self, parts: Parts) -> RawTensor:
        """The weight. Raises ValueError as `layout`."""

    def find(self, stored: Collection[str]) -> dict[str, dict[str, str]]:
        """The weights among the `stored` names: name -> part -> stored name."""
        found: dict[str, dict[str, str]] = {}
        for name in stored:
            prefix, _, leaf = name.rpartition(".")
            for form in self.forms:
                parts = {part: f"{prefix}.{part}" for part in form}
                if prefix and leaf == form[-1] and all(full in stored for full in parts.values()):
                    more = {part: f"{prefix}.{part}" for part in self.optional}
                    parts |= {part: full for part, full in more.items() if full in stored}
                    if len(parts) > len(found.get(f"{prefix}.weight", ())):
                        found[f"{prefix}.weight"] = parts
        return found


_added: dict[str, type[QuantizationMethod]] = {}


def register(*methods: type[QuantizationMethod]) -> None:
    """Make methods known. Raises ValueError if one of their names is taken."""
    for method in methods:
        for name in method.names:
            if _added.setdefault(name, method) is not method:
                raise ValueError(f"quantization method {name} is registered twice")


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        register(import_module(module.name).METHOD)


def methods() -> Mapping[str, type[QuantizationMethod]]:
    """All of them, by the names of quant_method."""
    _discover()
    return _added


def choice(
    config: Mapping[str, Any], keys: tuple[str, ...], allowed: tuple[Any, ...], default: Any = None
) -> Any:
    """The value under the first of `keys` that has one, or `default`. Raises ValueError that names
    what is allowed."""
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if not isinstance(value, int | str) or value not in allowed:
        want = " or ".join(map(str, allowed))
        raise ValueError(f"{keys[0]} is {value!r}: want {want}")
    return value


def size(name: str, value: Any) -> int:
    """A number of rows or columns. Raises ValueError for anything else."""
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"{name} is {value!r}: want a number of values")
    return value


def group_size(config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    """How many inputs share a scale; -1: all. Raises ValueError."""
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    return -1 if value == -1 else size(keys[0], value)


def require(parts: Parts, name: str, dtype: type[Any], shape: tuple[int, ...]) -> None:
    """Raises ValueError if a part has another shape, or a type that is no `dtype`."""
    part = parts[name]
    if not np.issubdtype(part.dtype, dtype) or part.shape != shape:
        want = "" if dtype is np.generic else f"{dtype.__name__} "
        raise ValueError(f"{name} is {part.dtype} {list(part.shape)}, not {want}{list(shape)}")


def packed_words(parts: Parts) -> tuple[int, int]:
    """The shape of `qweight`, words of 32 bits. Raises ValueError if it has none."""
    packed = parts["qweight"]
    if packed.ndim != 2 or packed.dtype != np.int32 or 0 in packed.shape:
        raise ValueError(f"qweight is {packed.dtype} {list(packed.shape)}: want int32, 2 dims")
    return packed.shape[0], packed.shape[1]
