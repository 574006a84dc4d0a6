"""The tensors of the KV pool. Who may write which block is decided elsewhere: the engine thread, or
a connection of a hand-off the blocks that are reserved for it.

Per layer group one tensor [layers, blocks, 2, kv_heads, block_size, head_dim], the canonical order,
so blocks leave and enter as they lie. Block 0 is the null block: it pads tables and holds zeros.
"""

import math
import mmap
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.kv.block_pool import BlockCopy
from pdserve.engine.kv.pages import Pages
from pdserve.engine.kv.spec import KvSpec
from pdserve.kernels._native import copy_past_caches


class KvCache:
    """`num_blocks` blocks per group beside the null block; memory is committed when touched."""

    def __init__(self, spec: KvSpec, num_blocks: int, device: str = "cpu") -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.data: list[Tensor] = []
        self._layers: dict[int, tuple[Tensor, int]] = {}
        for number, group in enumerate(spec.groups):
            two, heads, head_dim = group.block_shape
            block: tuple[int, ...] = (two, heads, spec.block_size, head_dim)
            if group.dtype == "int8":
                block = (group.block_bytes(spec.block_size),)
            shape = (len(group.layers), num_blocks + 1, *block)
            data = _zeros(shape, getattr(torch, group.dtype), device)
            self.data.append(data)
            for i, layer in enumerate(group.layers):
                self._layers[layer] = (data[i], number)
        # [layers, blocks, bytes of a block]: what read and write move
        self._bytes = [d.view(*d.shape[:2], -1).view(torch.uint8) for d in self.data]
        self._block_bytes = [int(b.shape[2]) for b in self._bytes]
        self._host = [b.numpy() for b in self._bytes if not b.is_cuda]

    def layer(self, n: int) -> tuple[Tensor, int]:
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
        if self._host:
            pool, runs = self._host[group], _runs(tuple(blocks))
            return [
                pool[n, run.start : run.stop].reshape(-1).data for n in layers for _, run in runs
            ]
        source = self._bytes[group]
        index = torch.tensor(list(blocks), device=source.device)
        copies = [source[layer].index_select(0, index).cpu() for layer in layers]
        return [copy.flatten().numpy().data for copy in copies if blocks]

    def write(self, group: int, layers: range, blocks: Sequence[int], payload: memoryview) -> None:
        """Copies `payload`, in the order of `read`, into whole blocks; any thread. On a device the
        copy is queued where the engine computes: what is launched later sees it. Raises like
        `read`, and ValueError if it has another size."""
        self._check(group, layers, blocks, payload.nbytes)
        if not blocks or not layers:
            return
        shape = len(layers), len(blocks), -1
        if self._host:
            pool, buffer = self._host[group], np.frombuffer(payload, np.uint8).reshape(shape)
            for at, run in _runs(tuple(blocks)):
                for i, n in enumerate(layers):
                    source = buffer[i, at : at + len(run)].reshape(-1)
                    copy_past_caches(pool[n, run.start : run.stop].reshape(-1), source)
            return
        target = self._bytes[group]
        # torch cannot wrap read-only memory; such a payload takes one more copy.
        data = bytearray(payload) if payload.readonly else payload
        rows = torch.frombuffer(data, dtype=torch.uint8).view(shape).to(target.device)
        index = torch.tensor(list(blocks), device=target.device)
        for i, layer in enumerate(layers):
            target[layer].index_copy_(0, index, rows[i])

    def pages(self, group: int, layers: range, blocks: Sequence[int]) -> Pages:
        """Where whole blocks lie, for a copy on the device; call on the thread that computes:
        what it has launched comes before the copy. Raises like `read`; ValueError without one."""
        self._check(group, layers, blocks, self.num_bytes(group, layers, blocks))
        if not layers or not blocks:
            raise ValueError("no blocks")
        data = self._bytes[group]
        ready = None
        if data.is_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(data.device))
        return Pages(
            data.data_ptr(), data.stride(0), int(data.shape[2]), layers, tuple(blocks), ready
        )

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Block copies in order, over all layers of their group."""
        for one in copies:
            data = self.data[one.group]
            data[:, one.target].copy_(data[:, one.source])

    def _check(self, group: int, layers: range, blocks: Sequence[int], nbytes: int) -> None:
        if not 0 <= group < len(self.data):
            raise ValueError(f"no layer group {group}")
        num_layers = len(self.spec.groups[group].layers)
        if layers and not (min(layers) >= 0 and max(layers) < num_layers):
            raise ValueError(f"layers {layers} of a group of {num_layers}")
        runs = _runs(tuple(blocks))
        if not all(run.start > 0 and run.stop <= self.num_blocks + 1 for _, run in runs):
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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """On CPU anonymous pages, which the kernel zeroes when they are touched; torch.zeros would
    touch them all, and a pool as large as the free memory took 40 s to start."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a shared page takes half as long again
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=private)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
