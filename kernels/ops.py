"""The interface of the torch decoder's operations; a backend is an object or module with all.

Shapes: T tokens, N inputs, M outputs, H query heads, K kv heads, D head_dim. kernels/reference
documents each operation.
"""

from typing import Literal, Protocol

from torch import Tensor

from pdserve.kernels.sampling_ops import SamplingOps


class Ops(SamplingOps, Protocol):
    """A backend: an object or a module with these functions."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def gated(
        self,
        gate: Tensor,
        up: Tensor,
        activation: Literal["silu", "gelu_tanh", "gelu", "swiglu_oai"],
    ) -> Tensor: ...

    def activated(self, x: Tensor, activation: Literal["silu", "gelu_tanh", "gelu"]) -> Tensor: ...

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def write_kv(self, kv: Tensor, k: Tensor, v: Tensor | None, slots: Tensor) -> None: ...

    def paged_attention(
        self,
        q: Tensor,
        kv: Tensor,
        block_table: Tensor,
        starts: tuple[int, ...],
        kv_lens: tuple[int, ...],
        num_decode_rows: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor: ...
