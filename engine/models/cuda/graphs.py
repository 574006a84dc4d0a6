"""Recorded decode steps: one launch in place of hundreds.

A graph is recorded for a number of rows and for the keys that its rows may have. A step uses the
smallest graph that holds it, padded with rows that have no keys and write nothing. All graphs read
their numbers from one array, at offsets that the graph's shape determines.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.execution import Batch, GroupTable, Ints, UnreadTokens
from pdserve.engine.kv import KvSpec
from pdserve.engine.models.cuda.step import InputBuffer, StepInputs

KEYS_FACTOR = 4  # ratio of the keys of successive graphs
FIRST_KEYS = 512


class Recorder(Protocol):
    """Records the launches of a function."""

    def record(self, launch: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that repeats the launches; it returns the recorded tensor."""


class CudaRecorder:
    """CUDA graphs, which share the memory of their results: read one before the next runs."""

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
    """The capacity of a graph."""

    rows: int
    keys: int  # maximum of a row


class DecodeGraphs:
    """The graphs of a decoder over one KV cache."""

    def __init__(
        self,
        launch: Callable[[StepInputs], Tensor],
        recorder: Recorder,
        device: torch.device,
        spec: KvSpec,
        max_rows: int,
        context_len: int,
    ) -> None:
        """Record the graphs. `launch` runs a whole step of decode rows on its inputs and returns
        their final hidden states."""
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
        """Return the smallest graph that holds a step; None if no graph does."""
        rows, keys = batch.num_decode_rows, max(batch.kv_lens)
        is_plain = rows == len(batch.kv_lens) == len(batch.logit_tokens)
        if not is_plain or rows > self._rows[-1] or keys > self._keys[-1]:
            return None
        return GraphShape(
            self._rows[bisect_left(self._rows, rows)], self._keys[bisect_left(self._keys, keys)]
        )

    def run(self, batch: Batch[Ints], shape: GraphShape) -> Tensor:
        """Return the final hidden states [rows, hidden] of a step that `shape` holds."""
        self._buffer.put(padded(batch, shape, self._block_size), shape.keys)
        return self._replays[shape]()[: batch.num_decode_rows]


def row_counts(max_rows: int) -> list[int]:
    """Return powers of two, from 16 on with one count between, up to one that holds `max_rows`."""
    counts = [1, 2, 4, 8, 16]
    while counts[-1] < max_rows:
        power = 1 << counts[-1].bit_length() - 1
        counts.append(counts[-1] + power // 2)
    return [count for n, count in enumerate(counts) if n == 0 or counts[n - 1] < max_rows]


def key_counts(context_len: int) -> list[int]:
    """Return key counts from FIRST_KEYS, each KEYS_FACTOR times the previous; the last is the
    context."""
    counts = [min(FIRST_KEYS, context_len)]
    while counts[-1] < context_len:
        counts.append(min(counts[-1] * KEYS_FACTOR, context_len))
    return counts


def padded(batch: Batch[Ints], shape: GraphShape, block_size: int) -> Batch[Ints]:
    """Return the step with as many rows, and as wide tables, as the graph has."""
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
        unread = UnreadTokens(unread.tokens, padded_array(unread.picks))
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
    """Return a step without rows, padded."""
    empty = np.zeros(0, np.int64)
    group = GroupTable(np.zeros((0, 0), np.int64), empty)
    batch = Batch(empty, empty, (0,), (), 0, (group,) * num_groups, empty)
    return padded(batch, shape, block_size)
