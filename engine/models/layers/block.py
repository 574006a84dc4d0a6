"""One layer of the decoder: attention and feed-forward, each between its norms."""

from dataclasses import dataclass

from torch import Tensor

from pdserve.engine.execution.batch import Batch
from pdserve.engine.models.layers.attention import Attention
from pdserve.engine.models.layers.feed_forward import FeedForward
from pdserve.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Norms:
    """Weights float32 [hidden] of the norms around the two parts; None: none there."""

    attn_in: Tensor | None
    attn_out: Tensor | None
    ffn_in: Tensor | None
    ffn_out: Tensor | None
    eps: float


class Block:
    """Works on (delta, residual): the stream is their sum, added within the next norm."""

    def __init__(self, ops: Ops, norms: Norms, attention: Attention, ffn: FeedForward) -> None:
        self._ops = ops
        self._norms = norms
        self._attention = attention
        self._ffn = ffn

    def __call__(
        self, delta: Tensor, residual: Tensor | None, batch: Batch[Tensor], kv: Tensor, group: int
    ) -> tuple[Tensor, Tensor]:
        """delta, residual [T, hidden] (no residual at the first layer) to the next pair."""
        x, residual = self._enter(delta, residual, self._norms.attn_in)
        delta = self._leave(self._attention(x, batch, kv, group), self._norms.attn_out)
        x, residual = self._enter(delta, residual, self._norms.ffn_in)
        return self._leave(self._ffn(x), self._norms.ffn_out), residual

    def store_kv(
        self, delta: Tensor, residual: Tensor | None, batch: Batch[Tensor], kv: Tensor, group: int
    ) -> None:
        """Only write this layer's keys and values: all that a last layer without logits does."""
        x, _ = self._enter(delta, residual, self._norms.attn_in)
        self._attention.store(x, batch, kv, group)

    def _enter(
        self, delta: Tensor, residual: Tensor | None, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(input of a part, stream so far)."""
        if weight is None:
            stream = delta if residual is None else delta + residual
            return stream, stream
        if residual is None:
            return self._ops.rms_norm(delta, weight, self._norms.eps), delta
        return self._ops.add_rms_norm(delta, residual, weight, self._norms.eps)

    def _leave(self, delta: Tensor, weight: Tensor | None) -> Tensor:
        return delta if weight is None else self._ops.rms_norm(delta, weight, self._norms.eps)
