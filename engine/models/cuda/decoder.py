"""The decoder on the CUDA kernels: the fused parts of a model, launched one after the other.

Owns the weights, which never change; keys and values belong to the KvCache of the caller.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.execution import Batch, Ints
from pdserve.engine.kv import LayerGroup
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.cuda.fuse import fused_parts
from pdserve.engine.models.cuda.graphs import DecodeGraphs, Recorder
from pdserve.engine.models.cuda.launches import LaunchedHeads, LaunchedNorm, LaunchSetup, launch_of
from pdserve.engine.models.cuda.step import Run, StepInputs, upload
from pdserve.engine.models.cuda.weights import DeviceWeights
from pdserve.engine.models.decoder import LayerKv
from pdserve.engine.models.layer import EMBEDDING, final_norm, head
from pdserve.engine.models.layers import Weights
from pdserve.engine.models.rope import RopeConfig, RopeTable
from pdserve.kernels.cuda.layer import Rotation


class CudaDecoder:
    """The counterpart of `Decoder` on pdserve's CUDA kernels.

    A token's result has the same bits whatever else is in the batch, and however its sequence is
    cut into chunks.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        kv_dtype: str,
        device: torch.device,
        numerics: str = "",
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`stream`: the stream to launch on. It becomes the current stream of each thread that
        calls a method, so that operations on the results are in order. None: the current stream."""
        self.config = config
        self.kv_groups: tuple[LayerGroup, ...] = config.kv_groups(kv_dtype)
        self.numerics = numerics
        self._device = device
        self._stream = stream
        self._make_current()
        self._graphs: DecodeGraphs | None = None
        self._graphs_kv: LayerKv | None = None
        device_weights = DeviceWeights(
            _tied(weights) if config.tied_head else weights, dtype, device
        )
        ropes = {layer.rope for layer in config.layers if layer.rope}
        setup = LaunchSetup(
            device_weights, {rope: _rotation(rope, config.context_len, device) for rope in ropes}
        )
        self._launches = [launch_of(part, setup) for part in fused_parts(config)]
        kv_launches = [
            n
            for n, launch in enumerate(self._launches)
            if isinstance(launch, LaunchedHeads) and launch.stores
        ]
        self._num_kv_launches = (
            kv_launches[-1] + 1
        )  # this many launches produce all keys and values
        self._norm = LaunchedNorm(final_norm(config), setup)
        self._head = device_weights.product(head(config).weights, head(config).biases)
        plain = self._head.matrices[0].plain if config.tied_head else None
        self._embedding = device_weights.plain(EMBEDDING) if plain is None else plain
        # Rounded like the other weights, as in the training of the models.
        self._embed_scale = torch.tensor(config.embed_scale, dtype=dtype).item()

    @torch.inference_mode()
    def forward(self, batch: Batch[Ints], kv: LayerKv) -> Tensor:
        """Run a step like Decoder.forward."""
        self._make_current()
        graphs = self._graphs if kv is self._graphs_kv else None
        if graphs is not None and (shape := graphs.shape_of(batch)) is not None:
            return graphs.run(batch, shape)
        return self._run(upload(batch, self._device), kv, batch.kv_only)

    @torch.inference_mode()
    def record(self, recorder: Recorder, kv: KvCache, max_rows: int) -> None:
        """Record the steps that have only decode rows, up to max_rows of them, over that cache."""
        self._make_current()
        self._graphs = DecodeGraphs(
            lambda inputs: self._run(inputs, kv, False),
            recorder,
            self._device,
            kv.spec,
            max_rows,
            self.config.context_len,
        )
        self._graphs_kv = kv

    def _run(self, inputs: StepInputs, kv: LayerKv, kv_only: bool) -> Tensor:
        residual = self._embedding.index_select(0, inputs.token_ids)
        if self._embed_scale != 1:
            residual = residual * self._embed_scale
        pools = [kv.layer(n) for n in range(self.config.num_layers)]
        run = Run(residual, inputs, pools)
        for launch in self._launches[: self._num_kv_launches] if kv_only else self._launches:
            launch(run)
        if kv_only:
            return residual.new_empty((0, self.config.hidden_size))
        return self._norm.of(run.residual.index_select(0, inputs.outputs))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits like Decoder.logits."""
        self._make_current()
        logits = self._head(hidden, out_dtype=torch.float32)
        if self.config.logit_scale != 1:
            logits *= self.config.logit_scale
        cap = self.config.logit_soft_cap
        return torch.tanh(logits / cap).mul_(cap) if cap else logits

    def states(self, hidden: Tensor) -> NDArray[np.float32]:
        """Return the states like Decoder.states."""
        self._make_current()
        states: NDArray[np.float32] = hidden.float().cpu().numpy()
        return states

    def synchronize(self) -> None:
        """Wait for the stream like DeviceModel.synchronize."""
        if self._device.type == "cuda":
            (self._stream or torch.cuda.current_stream(self._device)).synchronize()

    def _make_current(self) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)


def _tied(weights: Weights) -> Weights:
    """Return weights that load the embedding once and use it for the head as well."""
    embedding = weights(EMBEDDING)
    return lambda name: embedding if name == EMBEDDING else weights(name)


def _rotation(rope: RopeConfig, context_len: int, device: torch.device) -> Rotation:
    """Return the tables of all positions, since a recorded graph keeps the tables' addresses."""
    table = RopeTable(rope, context_len)
    table.reserve(context_len)
    return Rotation(torch.from_numpy(table.cos).to(device), torch.from_numpy(table.sin).to(device))
