"""The methods by which weights of Hugging Face checkpoints are quantized, by the config's
`quant_method`.

Each module of this package holds one method, in a class that it names METHOD, and is found by
discovery; modules elsewhere call `register`.
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
    """Reads weights that are stored as several tensors, their parts: `x.qweight` and `x.scales` in
    place of `x.weight`, for example. `layout` is called often and must read only the parts'
    sizes."""

    names: ClassVar[tuple[str, ...]]  # values of quant_method
    forms: ClassVar[tuple[tuple[str, ...], ...]]  # alternative sets of parts; the largest applies
    optional: ClassVar[tuple[str, ...]] = ()  # further parts that may exist
    unused: ClassVar[tuple[str, ...]] = ()  # stored next to the parts, but not read
    adds_zero_biases: ClassVar[bool] = False  # files may have zero biases for modules without bias
    quantizes: bool = True  # False: the config quantizes no weights

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None:
        """Read the checkpoint's quantization_config. Raises ValueError for unsupported settings."""

    @abstractmethod
    def layout(self, parts: Parts) -> Layout:
        """Return format and shape of the weight with these parts. Raises ValueError if they do not
        fit together."""

    @abstractmethod
    def read(self, parts: Parts) -> RawTensor:
        """Read the weight with these parts. Raises ValueError if they do not fit together."""

    def find(self, stored: Collection[str]) -> dict[str, dict[str, str]]:
        """Find the quantized weights among the names of stored tensors; return weight name -> part
        name -> name of the stored tensor."""
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
    """Add quantization methods. Raises ValueError if a name already belongs to another method."""
    for method in methods:
        for name in method.names:
            if _added.setdefault(name, method) is not method:
                raise ValueError(f"quantization method {name} is registered twice")


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        register(import_module(module.name).METHOD)


def methods() -> Mapping[str, type[QuantizationMethod]]:
    """Return quant_method -> class of all quantization methods, discovered or registered."""
    _discover()
    return _added


def choice(
    config: Mapping[str, Any], keys: tuple[str, ...], allowed: tuple[Any, ...], default: Any = None
) -> Any:
    """Return the setting under the first of `keys` that a quantization config sets, or `default`.
    Raises ValueError if the value is not in `allowed`."""
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if not isinstance(value, int | str) or value not in allowed:
        expected = " or ".join(map(str, allowed))
        raise ValueError(f"{keys[0]} is {value!r}: expected {expected}")
    return value


def size(name: str, value: Any) -> int:
    """Return a number of rows or columns from a config, once checked. Raises ValueError if it is
    not a positive integer."""
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"{name} is {value!r}: expected a positive integer")
    return value


def group_size(config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    """Return how many inputs of a weight share one scale; -1: all. `keys` are alternative settings
    of the config. Raises ValueError if it is no positive integer."""
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    return -1 if value == -1 else size(keys[0], value)


def require(parts: Parts, name: str, dtype: type[Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the part `name` has this shape and a type that is a subtype of
    `dtype`."""
    part = parts[name]
    if not np.issubdtype(part.dtype, dtype) or part.shape != shape:
        expected_type = "" if dtype is np.generic else f"{dtype.__name__} "
        raise ValueError(
            f"{name} is {part.dtype} {list(part.shape)}, expected {expected_type}{list(shape)}"
        )


def packed_words(parts: Parts) -> tuple[int, int]:
    """Return the shape of the part `qweight`, counted in 32-bit words. Raises ValueError if it is
    not a 2-D int32 tensor."""
    packed = parts["qweight"]
    if packed.ndim != 2 or packed.dtype != np.int32 or 0 in packed.shape:
        raise ValueError(f"qweight is {packed.dtype} {list(packed.shape)}: expected int32, 2 dims")
    return packed.shape[0], packed.shape[1]
