"""Stored weights as the CUDA kernels hold them: packed on the device, or expanded to plain numbers
where the kernels have no packed form."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.models.layers.stored import HELD, Weights
from pdserve.engine.models.parts import TensorSpec
from pdserve.engine.weights.format import VALUES, RawTensor, same_order
from pdserve.engine.weights.formats import formats
from pdserve.engine.weights.plain import PLAIN, empty, write_rounded
from pdserve.engine.weights.unpack import as_plain, unpack
from pdserve.kernels.cuda.linear.packing import BITS, DeviceMatrix, pack
from pdserve.kernels.cuda.linear.product import SplitSums, linear, split_linear

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Product:
    """Matrices over one input, side by side: x [T, N] to [T, rows of all]."""

    matrices: tuple[DeviceMatrix, ...]
    bias: Tensor | None  # float32 [rows of all]
    columns: Tensor | None  # int64 [N]: the input's values in the order that the matrices want

    def __call__(
        self, x: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """In x's dtype, or in another one, or into `out`."""
        if self.columns is not None:
            x = x.index_select(1, self.columns)
        if out is None:
            rows = sum(matrix.rows for matrix in self.matrices)
            out = torch.empty((len(x), rows), dtype=out_dtype or x.dtype, device=x.device)
        at = 0
        for matrix in self.matrices:
            end = at + matrix.rows
            bias = None if self.bias is None else self.bias[at:end]
            linear(x, matrix, bias, out[:, at:end])
            at = end
        return out

    def split(self, x: Tensor) -> Tensor | SplitSums:
        """The same, or the sums of splits of a single matrix."""
        if len(self.matrices) > 1:
            return self(x)
        if self.columns is not None:
            x = x.index_select(1, self.columns)
        return split_linear(x, self.matrices[0], self.bias)


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """Where the weights of a model go. Asks `stored` once for each name."""

    stored: Weights
    dtype: torch.dtype  # that is computed in
    device: torch.device
    expanded: Counter[str] = field(default_factory=Counter)  # by format: held as plain numbers

    def vector(self, spec: TensorSpec, offset: float = 0.0) -> Tensor:
        """Float32, with the offset added."""
        return torch.from_numpy(unpack(self.stored(spec.name))).to(self.device) + offset

    def plain(self, name: str) -> Tensor:
        """A matrix in the dtype that is computed in."""
        values = as_plain(self.stored(name), HELD[self.dtype]).parts[VALUES]
        return torch.from_numpy(np.ascontiguousarray(values)).view(self.dtype).to(self.device)

    def product(self, weights: Sequence[TensorSpec], biases: Sequence[TensorSpec] = ()) -> Product:
        """The matrices of that name over one input; rows of one format become one matrix."""
        raws = [self.stored(spec.name) for spec in weights]
        bias = torch.cat([self.vector(spec) for spec in biases]) if biases else None
        return self.product_of(raws, bias)

    def product_of(self, raws: Sequence[RawTensor], bias: Tensor | None = None) -> Product:
        """The same of matrices at hand."""
        columns = raws[0].columns
        order = None if columns is None else torch.from_numpy(columns).to(self.device)
        return Product(self.matrices(raws, columns), bias, order)

    def matrices(
        self, raws: Sequence[RawTensor], columns: NDArray[np.int64] | None
    ) -> tuple[DeviceMatrix, ...]:
        """The same for an input whose values are in the order of `columns`; None: in their own."""
        held = [self._ordered(raw, columns) for raw in raws]
        joined = [_joined(held)] if _can_join(held) else held
        return tuple(map(self._packed, joined))

    def float32_product(self, spec: TensorSpec, bias: Tensor | None = None) -> Product:
        """A matrix whose products are computed in float32."""
        raw = as_plain(self.stored(spec.name), "F32")
        return Product((self._pack(raw, torch.float32),), bias, None)

    def _ordered(self, raw: RawTensor, columns: NDArray[np.int64] | None) -> RawTensor:
        """In a form that `pack` may take, for an input whose values are in the order of
        `columns`."""
        if raw.format not in PLAIN:
            raw = formats()[raw.format].packable(raw)
            if raw.format in BITS and same_order(raw.columns, columns):
                return raw
            self._note_expanded(raw.format)
        plain = HELD[self.dtype]
        if columns is None:
            return as_plain(raw, plain)
        values = empty(raw.shape, plain)
        write_rounded(unpack(raw)[:, columns], values, plain)
        return RawTensor({VALUES: values}, plain, raw.shape)

    def _packed(self, raw: RawTensor) -> DeviceMatrix:
        """Plain numbers where the kernels have not its sizes of groups."""
        try:
            return self._pack(raw, self.dtype)
        except ValueError:
            if raw.format in PLAIN:
                raise
            self._note_expanded(raw.format)
            stored = RawTensor(raw.parts, raw.format, raw.shape)  # columns as they lie
            return self._pack(as_plain(stored, HELD[self.dtype]), self.dtype)

    def _note_expanded(self, format: str) -> None:
        if not self.expanded[format]:
            log.info("weights of %s are held as %s", format, HELD[self.dtype])
        self.expanded[format] += 1

    def _pack(self, raw: RawTensor, dtype: torch.dtype) -> DeviceMatrix:
        rows, cols = raw.shape
        return pack(raw.format, rows, cols, raw.parts, dtype, self.device)


def _can_join(raws: Sequence[RawTensor]) -> bool:
    """Whether their rows can be those of one matrix."""
    kinds = {
        (raw.format, *((name, p.shape[1:], p.dtype) for name, p in sorted(raw.parts.items())))
        for raw in raws
    }
    return len(kinds) == 1


def _joined(raws: Sequence[RawTensor]) -> RawTensor:
    """The rows of all, in order."""
    if len(raws) == 1:
        return raws[0]
    parts = {name: np.concatenate([raw.parts[name] for raw in raws]) for name in raws[0].parts}
    rows = sum(raw.shape[0] for raw in raws)
    return RawTensor(parts, raws[0].format, (rows, raws[0].shape[1]), raws[0].columns)
