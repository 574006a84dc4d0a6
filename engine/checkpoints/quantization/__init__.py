"""Quantization methods of Hugging Face checkpoints, by `quant_method` of the config.

A method is one module in this package with a class METHOD, found by discovery; modules elsewhere
call `register`.
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
from pdserve.engine.weights import RawTensor

Parts = Mapping[str, NDArray[Any]]  # by the name that replaces "weight"; read-only


class QuantizationMethod(ABC):
    """A reader of weights that are stored as several tensors, such as `x.qweight` and `x.scales`
    in place of `x.weight`. `layout` is called often and must read only the stored sizes."""

    names: ClassVar[tuple[str, ...]]  # values of quant_method
    forms: ClassVar[tuple[tuple[str, ...], ...]]  # alternative sets of parts; the largest applies
    optional: ClassVar[tuple[str, ...]] = ()  # further parts that may exist
    unused: ClassVar[tuple[str, ...]] = ()  # stored next to the parts, but not read
    adds_zero_biases: ClassVar[bool] = False  # files may have zero biases for modules without bias
    quantizes: bool = True  # False: the config quantizes no weights

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None:
        """Read quantization_config. Raises ValueError for unsupported settings."""

    @abstractmethod
    def layout(self, parts: Parts) -> Layout:
        """Return format and shape of a weight. Raises ValueError if the parts do not match."""

    @abstractmethod
    def read(self, parts: Parts) -> RawTensor:
        """Return the weight. Raises ValueError if the parts do not match."""

    def find(self, stored: Collection[str]) -> dict[str, dict[str, str]]:
        """Find the weights among the `stored` names: name -> part -> stored name."""
        weights: dict[str, dict[str, str]] = {}
        for name in stored:
            prefix, _, leaf = name.rpartition(".")
            for form in self.forms:
                parts = {part: f"{prefix}.{part}" for part in form}
                if prefix and leaf == form[-1] and all(full in stored for full in parts.values()):
                    optional = {part: f"{prefix}.{part}" for part in self.optional}
                    parts |= {part: full for part, full in optional.items() if full in stored}
                    if len(parts) > len(weights.get(f"{prefix}.weight", ())):
                        weights[f"{prefix}.weight"] = parts
        return weights


_added: dict[str, type[QuantizationMethod]] = {}


def register(*methods: type[QuantizationMethod]) -> None:
    """Register methods. Raises ValueError if one of their names is taken."""
    for method in methods:
        for name in method.names:
            if _added.setdefault(name, method) is not method:
                raise ValueError(f"quantization method {name} is registered twice")


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        register(import_module(module.name).METHOD)


def methods() -> Mapping[str, type[QuantizationMethod]]:
    """Return all methods by quant_method."""
    _discover()
    return _added


def choice(
    config: Mapping[str, Any], keys: tuple[str, ...], allowed: tuple[Any, ...], default: Any = None
) -> Any:
    """Return the first of `keys` that is set, or `default`. Raises ValueError if not `allowed`."""
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if not isinstance(value, int | str) or value not in allowed:
        expected = " or ".join(map(str, allowed))
        raise ValueError(f"{keys[0]} is {value!r}: expected {expected}")
    return value


def size(name: str, value: Any) -> int:
    """Check a number of rows or columns and return it. Raises ValueError."""
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"{name} is {value!r}: expected a positive integer")
    return value


def group_size(config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    """Return the number of inputs that share a scale; -1: all. Raises ValueError."""
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    return -1 if value == -1 else size(keys[0], value)


def require(parts: Parts, name: str, dtype: type[Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError if a part has another shape, or a type that is not a subtype of `dtype`."""
    part = parts[name]
    if not np.issubdtype(part.dtype, dtype) or part.shape != shape:
        expected_type = "" if dtype is np.generic else f"{dtype.__name__} "
        raise ValueError(
            f"{name} is {part.dtype} {list(part.shape)}, expected {expected_type}{list(shape)}"
        )


def packed_words(parts: Parts) -> tuple[int, int]:
    """Return the shape of `qweight` in 32-bit words. Raises ValueError if it is not 2-D int32."""
    packed = parts["qweight"]
    if packed.ndim != 2 or packed.dtype != np.int32 or 0 in packed.shape:
        raise ValueError(f"qweight is {packed.dtype} {list(packed.shape)}: expected int32, 2 dims")
    return packed.shape[0], packed.shape[1]
