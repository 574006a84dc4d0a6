"""The arrays that hold the keys and values of the KV pool.

Callers ensure that only one thread writes a block: the thread of a KV transfer's connection writes
the blocks that are reserved for the transfer, and the engine's thread all others. Each layer group
has one array [layers, blocks, 2, kv_heads, block_size, head_dim] (1 instead of 2 for latent
attention), so that blocks are sent and received without reordering. Block 0 is the null block: it
pads block tables and holds zeros.
"""

import math
import mmap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from pdserve.engine.kv.block_pool import BlockCopy
from pdserve.engine.kv.spec import KvSpec, LayerGroup, Pages
from pdserve.kernels._native import copy_past_caches

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}


class KvCache:
    """KV pool in host memory, with `num_blocks[g]` blocks and a null block for layer group g. The
    operating system commits the memory when it is first touched. bfloat16 is stored as the uint16
    of its bits."""

    device: int | None = None  # number of the CUDA device that holds the pool; None: the host

    def __init__(self, spec: KvSpec, num_blocks: Sequence[int]) -> None:
        self.spec = spec
        self.num_blocks = tuple(num_blocks)
        self.data: list[Any] = []
        self._layers: dict[int, tuple[Any, int]] = {}
        self._block_bytes = [group.block_bytes(spec.block_size) for group in spec.groups]
        for number, (group, count) in enumerate(zip(spec.groups, self.num_blocks, strict=True)):
            data = self._zeros((len(group.layers), count + 1, *self._block_shape(group)), group)
            self.data.append(data)
            for i, layer in enumerate(group.layers):
                self._layers[layer] = (data[i], number)
        self._bytes = self._as_bytes()

    def layer(self, n: int) -> tuple[Any, int]:
        """Return the KV array of model layer `n`, [blocks, 2, kv_heads, block_size, head_dim], and
        the index of its layer group. The array of an int8 layer is [blocks, bytes], with a block's
        scales after its values."""
        return self._layers[n]

    def num_bytes(self, group: int, layers: range, blocks: Sequence[int]) -> int:
        """Return the size in bytes of these blocks in these layers of a group, as `read` and
        `write` transfer them."""
        return len(layers) * len(blocks) * self._block_bytes[group]

    def read(self, group: int, layers: range, blocks: Sequence[int]) -> list[memoryview]:
        """Return the bytes of whole blocks in these layers, in the order [layers, blocks, 2,
        kv_heads, block_size, head_dim].

        On a CPU the returned views are the pool's memory, which must not be written while they are
        in use. `layers` counts within the group: layer i is model layer
        spec.groups[group].layers[i]. Raises ValueError if a layer group, layer or block does not
        exist.
        """
        self._check(group, layers, blocks, self.num_bytes(group, layers, blocks))
        pool, runs = self._bytes[group], _runs(tuple(blocks))
        return [pool[n, run.start : run.stop].reshape(-1).data for n in layers for _, run in runs]

    def write(self, group: int, layers: range, blocks: Sequence[int], payload: memoryview) -> None:
        """Copy `payload`, bytes in the order of `read`, into whole blocks; any thread may call this
        method.

        On a device the copy is queued on the engine's stream, so work that is launched later sees
        it. Raises ValueError if a layer group, layer or block does not exist, or if the payload has
        another size than these blocks.
        """
        self._check(group, layers, blocks, payload.nbytes)
        if not blocks or not layers:
            return
        pool = self._bytes[group]
        buffer = np.frombuffer(payload, np.uint8).reshape(len(layers), len(blocks), -1)
        for index, run in _runs(tuple(blocks)):
            for i, n in enumerate(layers):
                source = buffer[i, index : index + len(run)].reshape(-1)
                copy_past_caches(pool[n, run.start : run.stop].reshape(-1), source)

    def pages(self, group: int, layers: range, blocks: Sequence[int], ready: Any = None) -> Pages:
        """Return the addresses of whole blocks, for a direct copy on the device that begins after
        the event `ready`. Raises ValueError if a layer group, layer or block does not exist, or if
        no layer or no block is given."""
        self._check(group, layers, blocks, self.num_bytes(group, layers, blocks))
        if not layers or not blocks:
            raise ValueError("pages need at least one layer and one block")
        base, layer_bytes = self._address(group)
        return Pages(base, layer_bytes, self._block_bytes[group], layers, tuple(blocks), ready)

    def ready(self) -> Any:
        """Return a device event that occurs when all work launched so far by the calling thread,
        the engine's, is done; None in host memory, where work is done at once."""
        return None

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Run block copies in order, each over all layers of its layer group."""
        for block_copy in copies:
            data = self.data[block_copy.group]
            data[:, block_copy.target] = data[:, block_copy.source]

    def _zeros(self, shape: tuple[int, ...], group: LayerGroup) -> Any:
        """Return an array of zeros for one layer group. Its anonymous memory pages are zeroed by
        the operating system when they are touched; np.zeros does not promise that, and touching a
        pool as large as the free memory takes 40 s."""
        dtype = np.dtype(TYPES[group.dtype])
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages take 1.5 times as long
        pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=private)
        return np.frombuffer(pages, dtype).reshape(shape)

    def _as_bytes(self) -> list[Any]:
        """Return a byte view [layers, blocks, bytes of a block] of each group's array, for `read`
        and `write`."""
        return [data.reshape(*data.shape[:2], -1).view(np.uint8) for data in self.data]

    def _address(self, group: int) -> tuple[int, int]:
        """Return the address of block 0 in the first layer of a group, and the distance in bytes
        from one layer to the next."""
        data = self._bytes[group]
        return data.ctypes.data, data.strides[0]

    def _block_shape(self, group: LayerGroup) -> tuple[int, ...]:
        planes, heads, head_dim = group.block_shape
        if group.dtype == "int8":
            return (group.block_bytes(self.spec.block_size),)
        return (planes, heads, self.spec.block_size, head_dim)

    def _check(self, group: int, layers: range, blocks: Sequence[int], nbytes: int) -> None:
        if not 0 <= group < len(self.data):
            raise ValueError(f"layer group {group} does not exist")
        num_layers = len(self.spec.groups[group].layers)
        if layers and not (min(layers) >= 0 and max(layers) < num_layers):
            raise ValueError(f"layers {layers} are not all within the group's {num_layers} layers")
        runs = _runs(tuple(blocks))
        if not all(run.start > 0 and run.stop <= self.num_blocks[group] + 1 for _, run in runs):
            raise ValueError(
                f"a block is outside the pool of layer group {group}, which has blocks 1 to "
                f"{self.num_blocks[group]}"
            )
        if nbytes != self.num_bytes(group, layers, blocks):
            raise ValueError(
                f"the payload's {nbytes} bytes do not match {len(layers)} layers of {len(blocks)} "
                f"blocks, which take {self.num_bytes(group, layers, blocks)} bytes"
            )


@lru_cache(64)  # the same blocks are read or written layer after layer
def _runs(blocks: tuple[int, ...]) -> tuple[tuple[int, range], ...]:
    """Split block ids into the longest runs of consecutive ids. Return, for each run, its index in
    `blocks` and its range of ids."""
    runs, start = [], 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            runs.append((start, range(blocks[start], blocks[index - 1] + 1)))
            start = index
    return tuple(runs)
