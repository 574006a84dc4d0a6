"""A model's weights on the device: packed for the CUDA kernels, or expanded to plain numbers if the
kernels have no packed form of their format."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.models.parts import TensorSpec
from pdserve.engine.models.torch_parts import PLAIN_FORMATS, Weights
from pdserve.engine.weights import (
    PLAIN,
    VALUES,
    RawTensor,
    as_plain,
    empty,
    same_order,
    write_rounded,
)
from pdserve.engine.weights.convert import unpack
from pdserve.engine.weights.formats import formats
from pdserve.kernels.cuda.linear import BITS, DeviceMatrix, SplitSums, linear, pack, split_linear

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Product:
    """A product of one input with several matrices, side by side: x [T, N] to [T, rows of all
    matrices]."""

    matrices: tuple[DeviceMatrix, ...]
    bias: Tensor | None  # float32 [rows of all]
    columns: Tensor | None  # int64 [N]: the order of the input's values for the matrices

    def __call__(
        self, x: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Multiply x [T, N] with all matrices and add the bias. The result is `out` if given, else
        a new tensor of `out_dtype` or x's dtype."""
        if self.columns is not None:
            x = x.index_select(1, self.columns)
        if out is None:
            rows = sum(matrix.rows for matrix in self.matrices)
            out = torch.empty((len(x), rows), dtype=out_dtype or x.dtype, device=x.device)
        begin = 0
        for matrix in self.matrices:
            end = begin + matrix.rows
            bias = None if self.bias is None else self.bias[begin:end]
            linear(x, matrix, bias, out[:, begin:end])
            begin = end
        return out

    def split(self, x: Tensor) -> Tensor | SplitSums:
        """Multiply x like `__call__`, but if there is a single matrix, leave the sums of its splits
        for the next part to add."""
        if len(self.matrices) > 1:
            return self(x)
        if self.columns is not None:
            x = x.index_select(1, self.columns)
        return split_linear(x, self.matrices[0], self.bias)


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """Places a model's weights on the device in the form that the kernels read. Calls `stored`,
    which returns a stored weight by name, once for each name."""

    stored: Weights
    dtype: torch.dtype  # of the computation
    device: torch.device
    expanded: Counter[str] = field(default_factory=Counter)  # by format: held as plain numbers

    def vector(self, spec: TensorSpec, offset: float = 0.0) -> Tensor:
        """Return a tensor as float32 on the device, with `offset` added to each value."""
        return torch.from_numpy(unpack(self.stored(spec.name))).to(self.device) + offset

    def plain(self, name: str) -> Tensor:
        """Return a matrix on the device as plain numbers in the dtype of the computation."""
        values = as_plain(self.stored(name), PLAIN_FORMATS[self.dtype]).parts[VALUES]
        return torch.from_numpy(np.ascontiguousarray(values)).view(self.dtype).to(self.device)

    def product(self, weights: Sequence[TensorSpec], biases: Sequence[TensorSpec] = ()) -> Product:
        """Load the matrices and biases of a product. Matrices that have the same format become one
        matrix."""
        raws = [self.stored(spec.name) for spec in weights]
        bias = torch.cat([self.vector(spec) for spec in biases]) if biases else None
        return self.product_of(raws, bias)

    def product_of(self, raws: Sequence[RawTensor], bias: Tensor | None = None) -> Product:
        """Return the product with stored matrices that are already loaded, plus `bias`."""
        columns = raws[0].columns
        order = None if columns is None else torch.from_numpy(columns).to(self.device)
        return Product(self.matrices(raws, columns), bias, order)

    def matrices(
        self, raws: Sequence[RawTensor], columns: NDArray[np.int64] | None
    ) -> tuple[DeviceMatrix, ...]:
        """Pack stored matrices, joined to one if their formats are equal. `columns` is the order of
        the values in the product's input; None is the original order."""
        ordered = [self._ordered(raw, columns) for raw in raws]
        joined = [_joined(ordered)] if _can_join(ordered) else ordered
        return tuple(map(self._packed, joined))

    def float32_product(self, spec: TensorSpec, bias: Tensor | None = None) -> Product:
        """Return the product with one matrix, computed in float32."""
        raw = as_plain(self.stored(spec.name), "F32")
        return Product((self._pack(raw, torch.float32),), bias, None)

    def _ordered(self, raw: RawTensor, columns: NDArray[np.int64] | None) -> RawTensor:
        """Convert a stored weight to a form that `pack` may accept, for inputs in the order of
        `columns`. A weight in another order or without such a form becomes plain numbers."""
        if raw.format not in PLAIN:
            raw = formats()[raw.format].packable(raw)
            if raw.format in BITS and same_order(raw.columns, columns):
                return raw
            self._note_expanded(raw.format)
        plain = PLAIN_FORMATS[self.dtype]
        if columns is None:
            return as_plain(raw, plain)
        values = empty(raw.shape, plain)
        write_rounded(unpack(raw)[:, columns], values, plain)
        return RawTensor({VALUES: values}, plain, raw.shape)

    def _packed(self, raw: RawTensor) -> DeviceMatrix:
        """Pack a stored weight; as plain numbers if the kernels do not support its group sizes."""
        try:
            return self._pack(raw, self.dtype)
        except ValueError:
            if raw.format in PLAIN:
                raise
            self._note_expanded(raw.format)
            stored = RawTensor(raw.parts, raw.format, raw.shape)  # columns stay in stored order
            return self._pack(as_plain(stored, PLAIN_FORMATS[self.dtype]), self.dtype)

    def _note_expanded(self, format: str) -> None:
        if not self.expanded[format]:
            log.info(
                "weights of format %s are expanded to %s on the device: "
                "the cuda kernels cannot read them as stored",
                format,
                PLAIN_FORMATS[self.dtype],
            )
        self.expanded[format] += 1

    def _pack(self, raw: RawTensor, dtype: torch.dtype) -> DeviceMatrix:
        rows, cols = raw.shape
        return pack(raw.format, rows, cols, raw.parts, dtype, self.device)


def _can_join(raws: Sequence[RawTensor]) -> bool:
    """Return whether stored weights have equal formats, so that their rows can form one matrix."""
    kinds = {
        (raw.format, *((name, p.shape[1:], p.dtype) for name, p in sorted(raw.parts.items())))
        for raw in raws
    }
    return len(kinds) == 1


def _joined(raws: Sequence[RawTensor]) -> RawTensor:
    """Join the rows of several stored weights to one weight, in order."""
    if len(raws) == 1:
        return raws[0]
    parts = {name: np.concatenate([raw.parts[name] for raw in raws]) for name in raws[0].parts}
    rows = sum(raw.shape[0] for raw in raws)
    return RawTensor(parts, raws[0].format, (rows, raws[0].shape[1]), raws[0].columns)
