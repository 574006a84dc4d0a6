"""The interface of classes that compute a part on torch, and the registry of these classes by kind.

Every module of this folder is discovered; a module elsewhere uses `computes` as well.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pdserve.engine.execution import Batch
from pdserve.engine.models.config import UnsupportedModel
from pdserve.engine.models.layers.stored import Weights, expand
from pdserve.engine.models.parts import Part, TensorSpec
from pdserve.engine.models.rope import RopeConfig, RopeTable
from pdserve.kernels.ops import Ops


@dataclass(slots=True)
class RopeTensors:
    """cos and sin on a device, float32 [positions, rotary_dim / 2]; layers with equal settings
    share one."""

    table: RopeTable
    device: torch.device
    cos: Tensor
    sin: Tensor

    def reserve(self, num_positions: int) -> None:
        """Make the tables hold positions [0, num_positions)."""
        if num_positions > len(self.cos):
            self.table.reserve(num_positions)
            self.cos = torch.from_numpy(self.table.cos).to(self.device)
            self.sin = torch.from_numpy(self.table.sin).to(self.device)


@dataclass(frozen=True, slots=True)
class Setup:
    """The objects that parts are made from."""

    ops: Ops
    weights: Weights
    dtype: torch.dtype
    device: torch.device
    ropes: dict[RopeConfig, RopeTensors]

    def vector(self, spec: TensorSpec, offset: float = 0.0) -> Tensor:
        """Return a tensor in the form that norms need: float32, with the architecture's offset
        added."""
        return expand(self.weights(spec.name), torch.float32, self.device) + offset


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One step as a layer sees it."""

    batch: Batch[Tensor]
    kv: Tensor  # of this layer, [blocks, 2, K, block_size, D]
    group: int  # index of the layer's group in batch.groups
    kv_only: bool = False  # compute only keys and values in this layer


class TorchPart(Protocol):
    """A part, ready to run."""

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """Map x [tokens, ...] to the part's result; it may change x."""


_kinds: dict[type[Part], Callable[[Any, Setup], TorchPart]] = {}
Maker = TypeVar("Maker", bound=Callable[[Any, Setup], TorchPart])


def computes(kind: type[Part]) -> Callable[[Maker], Maker]:
    """Register the decorated class as the one that computes a kind of part; it is called with
    (part, setup). Raises ValueError if another class computes that kind."""

    def note(maker: Maker) -> Maker:
        if kind in _kinds:
            raise ValueError(f"part {kind.__name__} is registered twice")
        _kinds[kind] = maker
        return maker

    return note


@cache
def _discover() -> None:
    folder = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(import_module(folder).__path__, f"{folder}."):
        import_module(module.name)


def make_part(part: Part, setup: Setup) -> TorchPart:
    """Make the object that computes a part. Raises UnsupportedModel for a kind that no class
    computes."""
    _discover()
    if type(part) not in _kinds:
        raise UnsupportedModel(f"the reference kernels cannot compute {type(part).__name__}")
    return _kinds[type(part)](part, setup)
