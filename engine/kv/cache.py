"""The arrays of the KV pool. Who may write which block is decided elsewhere: the engine thread, or
a connection of a hand-off the blocks that are reserved for it.

Per layer group one array [layers, blocks, 2, kv_heads, block_size, head_dim], the canonical order
(1 in place of 2 if it is latent), so blocks leave and enter as they lie. Block 0 is the null block:
it pads tables and holds zeros.
"""

import math
import mmap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from pdserve.engine.kv.block_pool import BlockCopy
from pdserve.engine.kv.pages import Pages
from pdserve.engine.kv.spec import KvSpec, LayerGroup
from pdserve.kernels._native import copy_past_caches

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}


class KvCache:
    """`num_blocks[g]` blocks of group g beside its null block, in the memory of the host, which is
    committed when it is touched. bfloat16 is kept as the uint16 of its bits."""

    device: int | None = None  # number of the CUDA device that holds the pool

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
        """(kv [blocks, 2, kv_heads, block_size, head_dim] of model layer n, its group's index).

        int8 blocks are [blocks, bytes], their scales behind the values.
        """
        return self._layers[n]

    def num_bytes(self, group: int, layers: range, blocks: Sequence[int]) -> int:
        """Size of what read and write move."""
        return len(layers) * len(blocks) * self._block_bytes[group]

    def read(self, group: int, layers: range, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of whole blocks, in order: [layers, blocks, 2, kv_heads, block_size, head_dim].
        On a CPU they are the pool's own memory, which must not be written meanwhile.

        `layers` counts within the group: layer i is model layer spec.groups[group].layers[i].
        Raises ValueError if a layer or block does not exist.
        """
        self._check(group, layers, blocks, self.num_bytes(group, layers, blocks))
        pool, runs = self._bytes[group], _runs(tuple(blocks))
        return [pool[n, run.start : run.stop].reshape(-1).data for n in layers for _, run in runs]

    def write(self, group: int, layers: range, blocks: Sequence[int], payload: memoryview) -> None:
        """Copies `payload`, in the order of `read`, into whole blocks; any thread. On a device the
        copy is queued where the engine computes: what is launched later sees it. Raises like
        `read`, and ValueError if it has another size."""
        self._check(group, layers, blocks, payload.nbytes)
        if not blocks or not layers:
            return
        pool = self._bytes[group]
        buffer = np.frombuffer(payload, np.uint8).reshape(len(layers), len(blocks), -1)
        for at, run in _runs(tuple(blocks)):
            for i, n in enumerate(layers):
                source = buffer[i, at : at + len(run)].reshape(-1)
                copy_past_caches(pool[n, run.start : run.stop].reshape(-1), source)

    def pages(self, group: int, layers: range, blocks: Sequence[int], ready: Any = None) -> Pages:
        """Where whole blocks lie, for a copy on the device, which comes behind the event `ready`.
        Raises like `read`; ValueError without a block."""
        self._check(group, layers, blocks, self.num_bytes(group, layers, blocks))
        if not layers or not blocks:
            raise ValueError("no blocks")
        base, layer_bytes = self._address(group)
        return Pages(base, layer_bytes, self._block_bytes[group], layers, tuple(blocks), ready)

    def ready(self) -> Any:
        """The event behind what the thread that computes, which calls this, has launched. None: it
        is complete."""
        return None

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Block copies in order, over all layers of their group."""
        for one in copies:
            data = self.data[one.group]
            data[:, one.target] = data[:, one.source]

    def _zeros(self, shape: tuple[int, ...], group: LayerGroup) -> Any:
        """Anonymous pages, which the operating system zeroes when they are touched; np.zeros would
        not promise that, and a pool as large as the free memory takes 40 s to touch."""
        dtype = np.dtype(TYPES[group.dtype])
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a shared page takes half as long again
        pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=private)
        return np.frombuffer(pages, dtype).reshape(shape)

    def _as_bytes(self) -> list[Any]:
        """Of each group [layers, blocks, bytes of a block]: what read and write move."""
        return [data.reshape(*data.shape[:2], -1).view(np.uint8) for data in self.data]

    def _address(self, group: int) -> tuple[int, int]:
        """(address of a group's first block, bytes from a layer to the next)."""
        data = self._bytes[group]
        return data.ctypes.data, data.strides[0]

    def _block_shape(self, group: LayerGroup) -> tuple[int, ...]:
        planes, heads, head_dim = group.block_shape
        if group.dtype == "int8":
            return (group.block_bytes(self.spec.block_size),)
        return (planes, heads, self.spec.block_size, head_dim)

    def _check(self, group: int, layers: range, blocks: Sequence[int], nbytes: int) -> None:
        if not 0 <= group < len(self.data):
            raise ValueError(f"no layer group {group}")
        num_layers = len(self.spec.groups[group].layers)
        if layers and not (min(layers) >= 0 and max(layers) < num_layers):
            raise ValueError(f"layers {layers} of a group of {num_layers}")
        runs = _runs(tuple(blocks))
        if not all(run.start > 0 and run.stop <= self.num_blocks[group] + 1 for _, run in runs):
            raise ValueError("a block outside the pool")
        if nbytes != self.num_bytes(group, layers, blocks):
            raise ValueError(
                f"{nbytes} bytes for {len(layers)} layers of {len(blocks)} blocks, which are "
                f"{self.num_bytes(group, layers, blocks)}"
            )


@lru_cache(64)  # of some blocks layer after layer is read or written
def _runs(blocks: tuple[int, ...]) -> tuple[tuple[int, range], ...]:
    """(where it begins in `blocks`, ids) of the longest stretches of consecutive ids."""
    found, start = [], 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            found.append((start, range(blocks[start], blocks[at - 1] + 1)))
            start = at
    return tuple(found)
