"""The decoder on torch, which computes the parts of any architecture one after the other.

Owns the weights, which never change; keys and values belong to the KvCache of the caller.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.execution import Batch, GroupTable, Ints
from pdserve.engine.kv import LayerGroup
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.layer import EMBEDDING, HEAD, HEAD_BIAS, final_norm, layer_parts
from pdserve.engine.models.parts import Add, Attention, Hold, Replace
from pdserve.engine.models.rope import RopeTable
from pdserve.engine.models.torch_parts import (
    LayerStep,
    RopeTensors,
    Setup,
    TorchPart,
    Weights,
    expand,
    make_part,
    rows,
    to_device,
)
from pdserve.engine.weights.convert import unpack
from pdserve.kernels import reference


class Decoder:
    """A transformer on torch, on one device, computing in one dtype.

    `weights` returns a stored weight by name and is called once for each name of
    `tensor_shapes(config)`. Weights stored as plain numbers of `dtype` are held on `device`; all
    others are expanded at each use.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        kv_dtype: str,
        device: torch.device,
        numerics: str = "",
    ) -> None:
        self.config = config
        self.kv_groups: tuple[LayerGroup, ...] = config.kv_groups(kv_dtype)
        self.dtype = dtype
        self.numerics = numerics
        self._device = device
        empty = torch.empty(0)
        self._ropes = {
            rope: RopeTensors(RopeTable(rope, config.context_len), device, empty, empty)
            for rope in config.ropes
        }
        self._embedding = to_device(weights(EMBEDDING), dtype, device)
        self._positions = config.positions
        if self._positions:
            table = self._positions.table(lambda name: unpack(weights(name)))
            self._added = torch.from_numpy(table).to(device, dtype)
        setup = Setup(weights, dtype, device, self._ropes)
        self._layers = [_Layer(config, n, setup) for n in range(config.num_layers)]
        self._norm = make_part(final_norm(config), setup)
        self._head = (
            self._embedding if config.tied_head else to_device(weights(HEAD), dtype, device)
        )
        self._head_bias = expand(weights(HEAD_BIAS), dtype, device) if config.head_bias else None
        # Rounded like the other weights, as in the training of the models.
        self._embed_scale = torch.tensor(config.embed_scale, dtype=dtype).item()

    @torch.inference_mode()
    def forward(self, host_batch: Batch[Ints], kv: KvCache) -> Tensor:
        """Compute one step: write the keys and values of the batch's tokens to the cache, and
        return the final hidden states [len(batch.logit_tokens), hidden].

        With `batch.kv_only` the last layer stops after its keys and values, and the result has no
        rows.
        """
        batch = on(host_batch, self._device)
        for rope in self._ropes.values():
            rope.reserve(max(batch.kv_lens))
        stream = rows(self._embedding, host_batch.token_ids, self.dtype, self._device)
        if self._embed_scale != 1:
            stream = stream * self._embed_scale
        if self._positions:
            added = self._positions.rows(
                host_batch.token_ids, host_batch.positions, host_batch.starts
            )
            stream = stream + self._added.index_select(0, torch.from_numpy(added).to(self._device))
        for n, layer in enumerate(self._layers):
            last = n == len(self._layers) - 1
            step = LayerStep(batch, *kv.layer(n), batch.kv_only and last)
            stream = layer(stream, step)
        if batch.kv_only:
            return stream.new_empty((0, self.config.hidden_size))
        return self._norm(stream.index_select(0, batch.logit_tokens), step)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [n, vocab], of hidden states that `forward` returned. Pass a
        slice of the states where the logits of all would need too much memory."""
        weight = expand(self._head, self.dtype, self._device)
        logits = reference.linear(hidden, weight, self._head_bias).float()
        if self.config.logit_scale != 1:
            logits *= self.config.logit_scale
        cap = self.config.logit_soft_cap
        return torch.tanh(logits / cap).mul_(cap) if cap else logits

    def states(self, hidden: Tensor) -> NDArray[np.float32]:
        """Copy hidden states that `forward` returned to host memory, as float32 [n, hidden]."""
        states: NDArray[np.float32] = hidden.float().cpu().numpy()
        return states


class _Layer:
    """One layer of the decoder: runs the layer's parts over the residual stream."""

    def __init__(self, config: ModelConfig, n: int, setup: Setup) -> None:
        parts = layer_parts(config, n)
        self._parts: list[TorchPart | Add | Hold | Replace] = [
            part if isinstance(part, Add | Hold | Replace) else make_part(part, setup)
            for part in parts
        ]
        self._num_kv_parts = 1 + next(i for i, p in enumerate(parts) if isinstance(p, Attention))

    def __call__(self, stream: Tensor, step: LayerStep) -> Tensor:
        """Return the residual stream [tokens, hidden] after this layer. With `step.kv_only` the
        layer only stores keys and values, and the result is meaningless."""
        x = held = stream
        for part in self._parts[: self._num_kv_parts] if step.kv_only else self._parts:
            match part:
                case Hold():
                    x, held = stream, x
                case Replace():
                    stream = x
                case Add():
                    x = stream = stream + (held + x if part.held else x)
                case _:
                    x = part(x, step)
        return x


def on(batch: Batch[Ints], device: torch.device | str) -> Batch[Tensor]:
    """Copy a batch's arrays to a device, as tensors."""

    def tensor(array: Ints) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Batch(
        token_ids=tensor(batch.token_ids),
        positions=tensor(batch.positions),
        starts=batch.starts,
        kv_lens=batch.kv_lens,
        num_decode_rows=batch.num_decode_rows,
        groups=tuple(GroupTable(tensor(g.block_table), tensor(g.slots)) for g in batch.groups),
        logit_tokens=tensor(batch.logit_tokens),
        kv_only=batch.kv_only,
    )
