"""The decoder on the CUDA kernels. It launches the fused parts of a model one after the other, or
replays a CUDA graph of a whole decode step, which is one launch in place of hundreds.

The decoder owns the weights, which never change; keys and values belong to the caller's KvCache. A
graph is recorded for a number of rows and a maximum number of keys per row. A decode step replays
the smallest graph that has room for it, padded with rows that have no keys and write nothing. All
graphs read their inputs from one integer array, at offsets that only the graph's shape determines.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.execution import Batch, GroupTable, Ints, UnreadTokens
from pdserve.engine.kv import KvSpec, LayerGroup
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.config import ModelConfig, UnsupportedModel
from pdserve.engine.models.cuda.fuse import fused_parts
from pdserve.engine.models.cuda.launches import LaunchedHeads, LaunchedNorm, LaunchSetup, launch_of
from pdserve.engine.models.cuda.step import InputBuffer, Run, StepInputs, upload
from pdserve.engine.models.cuda.weights import DeviceWeights
from pdserve.engine.models.layer import EMBEDDING, final_norm, head
from pdserve.engine.models.positions import POSITIONS
from pdserve.engine.models.rope import RopeConfig, RopeTable
from pdserve.engine.models.torch_parts import Weights
from pdserve.kernels.cuda.layer import Rotation

KEYS_FACTOR = 4  # ratio of the keys of successive graphs
FIRST_KEYS = 512


class Recorder(Protocol):
    """The interface of a recorder, which turns the kernel launches of a function into one CUDA
    graph."""

    def record(self, launch: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record the kernel launches of `launch`. The returned function replays them and returns
        the tensor that `launch` returned, with new contents."""


class CudaRecorder:
    """Records CUDA graphs on one stream. The graphs share the memory of their results, so read the
    result of one graph before the next one runs."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, launch: Callable[[], Tensor]) -> Callable[[], Tensor]:
        launch()  # compiles and allocates, which a recording must not do
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may call CUDA during the recording.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = launch()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The capacity of a recorded decode graph: its number of rows, and the most keys that a row may
    have."""

    rows: int
    keys: int  # maximum of a row


class DecodeGraphs:
    """The CUDA graphs of a decoder's decode steps over one KV cache, one graph for each
    GraphShape."""

    def __init__(
        self,
        launch: Callable[[StepInputs], Tensor],
        recorder: Recorder,
        device: torch.device,
        spec: KvSpec,
        max_rows: int,
        context_len: int,
    ) -> None:
        """Record a graph for each shape up to `max_rows` rows and `context_len` keys. `launch`
        computes the final hidden states of a whole decode step."""
        self._buffer = buffer = InputBuffer(device)
        self._block_size = block_size = spec.block_size
        num_groups = len(spec.groups)
        self._rows = row_counts(max_rows)
        self._keys = key_counts(context_len)
        self._replays: dict[GraphShape, Callable[[], Tensor]] = {}
        for rows in reversed(self._rows):  # the largest first: the others fit into its memory
            for keys in reversed(self._keys):
                shape = GraphShape(rows, keys)
                inputs = buffer.put(_empty_batch(shape, num_groups, block_size), keys)
                self._replays[shape] = recorder.record(partial(launch, inputs))

    def shape_of(self, batch: Batch[Ints]) -> GraphShape | None:
        """Return the shape of the smallest graph that can run a step; None if the step has other
        rows than decode rows, or exceeds every graph."""
        rows, keys = batch.num_decode_rows, max(batch.kv_lens)
        is_plain = rows == len(batch.kv_lens) == len(batch.logit_tokens)
        if not is_plain or rows > self._rows[-1] or keys > self._keys[-1]:
            return None
        return GraphShape(
            self._rows[bisect_left(self._rows, rows)], self._keys[bisect_left(self._keys, keys)]
        )

    def run(self, batch: Batch[Ints], shape: GraphShape) -> Tensor:
        """Replay the graph of `shape` on a step's inputs and return the final hidden states [rows,
        hidden] of the step's rows."""
        self._buffer.put(padded(batch, shape, self._block_size), shape.keys)
        return self._replays[shape]()[: batch.num_decode_rows]


def row_counts(max_rows: int) -> list[int]:
    """Return the numbers of rows to record graphs for: powers of two and, from 16 on, also the
    numbers halfway between two powers. The last number is at least `max_rows`."""
    counts = [1, 2, 4, 8, 16]
    while counts[-1] < max_rows:
        power = 1 << counts[-1].bit_length() - 1
        counts.append(counts[-1] + power // 2)
    return [count for n, count in enumerate(counts) if n == 0 or counts[n - 1] < max_rows]


def key_counts(context_len: int) -> list[int]:
    """Return the maximum numbers of keys per row to record graphs for: FIRST_KEYS, then each
    KEYS_FACTOR times the previous one, up to `context_len`."""
    counts = [min(FIRST_KEYS, context_len)]
    while counts[-1] < context_len:
        counts.append(min(counts[-1] * KEYS_FACTOR, context_len))
    return counts


def padded(batch: Batch[Ints], shape: GraphShape, block_size: int) -> Batch[Ints]:
    """Pad a decode step to the shape of a graph: `shape.rows` rows, and block tables wide enough
    for `shape.keys` keys. Added rows have no keys and write to no slot."""
    missing = shape.rows - batch.num_decode_rows
    width = -(-shape.keys // block_size)

    def padded_array(array: Ints, value: int = 0) -> Ints:
        return np.pad(array, (0, missing), constant_values=value)

    groups = []
    for group in batch.groups:
        table = np.zeros((shape.rows, width), group.block_table.dtype)
        table[: batch.num_decode_rows, : group.block_table.shape[1]] = group.block_table
        groups.append(GroupTable(table, padded_array(group.slots, -1)))
    unread = batch.unread
    if unread is not None:
        unread = UnreadTokens(unread.tokens, padded_array(unread.indices))
    return replace(
        batch,
        token_ids=padded_array(batch.token_ids),
        positions=padded_array(batch.positions),
        starts=tuple(range(shape.rows + 1)),
        kv_lens=(*batch.kv_lens, *(0,) * missing),
        num_decode_rows=shape.rows,
        groups=tuple(groups),
        logit_tokens=np.arange(shape.rows),
        unread=unread,
    )


def _empty_batch(shape: GraphShape, num_groups: int, block_size: int) -> Batch[Ints]:
    """Return a decode step that consists of padding rows only, with which a graph is recorded."""
    empty = np.zeros(0, np.int64)
    group = GroupTable(np.zeros((0, 0), np.int64), empty)
    batch = Batch(empty, empty, (0,), (), 0, (group,) * num_groups, empty)
    return padded(batch, shape, block_size)


class CudaDecoder:
    """A decoder-only transformer on pdserve's CUDA kernels, with the methods of `Decoder`.

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
        """Load the weights. `stream` is the CUDA stream to launch on, None the current one. It
        becomes the current stream of each thread that calls a method, so that operations on the
        results run in order."""
        if config.encoder:
            raise UnsupportedModel("--kernels cuda does not compute encoders: use --device cpu")
        assert config.positions is None or config.positions.is_plain  # others are of encoders
        self.config = config
        self.kv_groups: tuple[LayerGroup, ...] = config.kv_groups(kv_dtype)
        self.numerics = numerics
        self._device = device
        self._stream = stream
        self._make_current()
        self._graphs: DecodeGraphs | None = None
        self._graphs_kv: KvCache | None = None
        device_weights = DeviceWeights(
            _tied(weights) if config.tied_head else weights, dtype, device
        )
        setup = LaunchSetup(
            device_weights,
            {rope: _rotation(rope, config.context_len, device) for rope in config.ropes},
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
        self._positions = device_weights.plain(POSITIONS) if config.positions else None

    @torch.inference_mode()
    def forward(self, batch: Batch[Ints], kv: KvCache) -> Tensor:
        """Compute one step like Decoder.forward: write the keys and values of the batch's tokens to
        `kv`, and return the final hidden states. Replays a recorded graph if one fits."""
        self._make_current()
        graphs = self._graphs if kv is self._graphs_kv else None
        if graphs is not None and (shape := graphs.shape_of(batch)) is not None:
            return graphs.run(batch, shape)
        return self._run(upload(batch, self._device), kv, batch.kv_only)

    @torch.inference_mode()
    def record(self, recorder: Recorder, kv: KvCache, max_rows: int) -> None:
        """Record CUDA graphs of the decode steps with up to `max_rows` rows over the cache `kv`;
        `forward` then replays them."""
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

    def _run(self, inputs: StepInputs, kv: KvCache, kv_only: bool) -> Tensor:
        residual = self._embedding.index_select(0, inputs.token_ids)
        if self._embed_scale != 1:
            residual = residual * self._embed_scale
        if self._positions is not None:
            residual = residual + self._positions.index_select(0, inputs.positions)
        pools = [kv.layer(n) for n in range(self.config.num_layers)]
        run = Run(residual, inputs, pools)
        for launch in self._launches[: self._num_kv_launches] if kv_only else self._launches:
            launch(run)
        if kv_only:
            return residual.new_empty((0, self.config.hidden_size))
        return self._norm.of(run.residual.index_select(0, inputs.outputs))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, float32 [n, vocab], like Decoder.logits."""
        self._make_current()
        logits = self._head(hidden, out_dtype=torch.float32)
        if self.config.logit_scale != 1:
            logits *= self.config.logit_scale
        cap = self.config.logit_soft_cap
        return torch.tanh(logits / cap).mul_(cap) if cap else logits

    def states(self, hidden: Tensor) -> NDArray[np.float32]:
        """Copy hidden states to host memory, as float32 [n, hidden], like Decoder.states."""
        self._make_current()
        states: NDArray[np.float32] = hidden.float().cpu().numpy()
        return states

    def synchronize(self) -> None:
        """Wait until all work launched on the decoder's stream has ended."""
        if self._device.type == "cuda":
            (self._stream or torch.cuda.current_stream(self._device)).synchronize()

    def _make_current(self) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)


def _tied(weights: Weights) -> Weights:
    """Wrap the weights of a model whose head is its embedding: the embedding is loaded once and
    returned whenever its name is requested."""
    embedding = weights(EMBEDDING)
    return lambda name: embedding if name == EMBEDDING else weights(name)


def _rotation(rope: RopeConfig, context_len: int, device: torch.device) -> Rotation:
    """Return a rope's tables of cos and sin for all positions of a context. They never grow,
    because a recorded graph keeps their addresses."""
    table = RopeTable(rope, context_len)
    table.reserve(context_len)
    return Rotation(torch.from_numpy(table.cos).to(device), torch.from_numpy(table.sin).to(device))
