"""A decoder driven through hand-made block tables: mixed batches, poisoned memory, freed windows.

Every slot that holds no key of a live sequence is NaN, including the null block, so that an
invalid read shows in the logits.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from pdserve.engine.architectures import find_spec
from pdserve.engine.checkpoints import check_names
from pdserve.engine.execution import Batch, GroupTable, Ints
from pdserve.engine.kv import KvSpec
from pdserve.engine.load import open_checkpoint
from pdserve.engine.models import HEAD, NativeDecoder, tensor_shapes
from pdserve.engine.models.cuda import CudaDecoder
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.torch_parts import PLAIN_FORMATS
from pdserve.engine.weights import PLAIN, VALUES, RawTensor
from pdserve.engine.weights.convert import unpack
from pdserve.kernels.cpu import CpuKernels

TORCH_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def read_tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def load_decoder(
    path: Path,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
    kernels: str = "reference",
) -> Decoder | NativeDecoder | CudaDecoder:
    """Load the decoder of a Hugging Face directory or a GGUF file, every tensor expanded to
    `dtype`.
    """
    opened = open_checkpoint(path)
    spec = find_spec(opened.hf_config)
    config = spec.parse(opened.hf_config)
    checkpoint = spec.view(opened, config)
    check_names(checkpoint, tensor_shapes(config), {HEAD} if config.tied_head else set())

    def weights(name: str) -> RawTensor:
        return as_raw(torch.from_numpy(np.array(unpack(checkpoint.tensor(name)))).to(dtype))

    kv = TORCH_NAMES[kv_dtype or dtype]
    if kernels == "native":
        return NativeDecoder(config, weights, CpuKernels(threads=2), kv)
    if kernels == "cuda":
        return CudaDecoder(config, weights, dtype, kv, torch.device(device))
    return Decoder(config, weights, dtype, kv, torch.device(device))


def as_raw(tensor: Tensor) -> RawTensor:
    """Return a tensor of plain numbers as a checkpoint would give it."""
    format = PLAIN_FORMATS[tensor.dtype]
    values = tensor.contiguous().view(-1).view(torch.uint8).numpy().view(PLAIN[format])
    return RawTensor({VALUES: values.reshape(tensor.shape)}, format, tuple(tensor.shape))


class PoisonedKv:
    """Caches of all layers, NaN where nothing was written."""

    def __init__(
        self,
        decoder: Decoder | NativeDecoder | CudaDecoder,
        num_blocks: int,
        block_size: int,
        device: str,
    ) -> None:
        self._native = isinstance(decoder, NativeDecoder)
        self.spec = KvSpec(block_size, decoder.kv_groups)
        self._layers: dict[int, tuple[Tensor, int]] = {}
        for index, group in enumerate(decoder.kv_groups):
            two, heads, size = group.block_shape
            shape = (num_blocks, two, heads, block_size, size)
            for n in group.layers:
                if group.dtype == "int8":  # all bits set: scales that are NaN
                    pool = torch.full((num_blocks, group.block_bytes(block_size)), -1).to(
                        torch.int8
                    )
                else:
                    dtype = getattr(torch, group.dtype)
                    pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
                self._layers[n] = (pool, index)

    def layer(self, n: int) -> tuple[Any, int]:
        """Return a layer, as a tensor for the torch decoder, as bytes for the native one."""
        pool, index = self._layers[n]
        return (pool.view(torch.uint8).numpy() if self._native else pool), index

    def values(self, n: int) -> Tensor:
        return self._layers[n][0]

    def poison(self, group: int, block: int) -> None:
        for pool, index in self._layers.values():
            if index == group:
                pool[block] = -1 if pool.dtype == torch.int8 else float("nan")


class PagedRunner:
    """Sequences by name; `step` runs some tokens of each in one batch."""

    def __init__(
        self,
        decoder: Decoder | NativeDecoder | CudaDecoder,
        num_blocks: int = 64,
        block_size: int = 0,
        device: str = "cpu",
    ) -> None:
        """Build the caches. `block_size` 0: the oddest size that the decoder accepts."""
        block_size = block_size or (5 if isinstance(decoder, Decoder) else 16)
        self.decoder = decoder
        self.kv = PoisonedKv(decoder, num_blocks, block_size, device)
        self.lens: dict[str, int] = {}
        self.mixed_steps = 0  # batches with decode rows and chunks
        self.freed_blocks = 0
        self._block_size = block_size
        self._tables: list[dict[str, list[int]]] = [{} for _ in decoder.kv_groups]
        self._free = [list(range(1, num_blocks)) for _ in decoder.kv_groups]
        for free in self._free:
            random.Random(0).shuffle(free)

    def step(self, tokens: dict[str, Sequence[int]], kv_only: bool = False) -> dict[str, Tensor]:
        """Append tokens to sequences; return float32 logits [tokens, vocab] of each."""
        names = sorted(tokens, key=lambda name: len(tokens[name]) > 1)  # decode rows first
        num_decode_rows = sum(len(tokens[name]) == 1 for name in names)
        self.mixed_steps += 0 < num_decode_rows < len(names)
        starts, positions = [0], []
        for name in names:
            done, new = self.lens.get(name, 0), len(tokens[name])
            positions += range(done, done + new)
            self.lens[name] = done + new
            starts.append(starts[-1] + new)
        ids = np.array([i for name in names for i in tokens[name]])
        kv_lens = tuple(self.lens[name] for name in names)
        batch = Batch(
            token_ids=ids,
            positions=np.array(positions),
            starts=tuple(starts),
            kv_lens=kv_lens,
            num_decode_rows=num_decode_rows,
            groups=tuple(
                self._group_table(group, names, starts, positions)
                for group in range(len(self._tables))
            ),
            logit_tokens=np.arange(0 if kv_only else len(ids)),
            kv_only=kv_only,
        )
        with torch.inference_mode():
            logits = self.decoder.logits(self.decoder.forward(batch, self.kv))
            logits = torch.as_tensor(logits).clone()
        self._free_behind_windows()
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(names)}

    def finish(self, name: str) -> None:
        """Free a sequence's blocks; their contents become NaN."""
        del self.lens[name]
        for group, tables in enumerate(self._tables):
            for block in tables.pop(name):
                if block:
                    self.kv.poison(group, block)
                    self._free[group].insert(0, block)

    def _group_table(
        self, group: int, names: list[str], starts: list[int], positions: list[int]
    ) -> GroupTable[Ints]:
        size = self._block_size
        tables = [self._tables[group].setdefault(name, []) for name in names]
        slots = []
        for row, name in enumerate(names):
            while len(tables[row]) * size < self.lens[name]:
                tables[row].append(self._free[group].pop())
            for position in positions[starts[row] : starts[row + 1]]:
                slots.append(tables[row][position // size] * size + position % size)
        widest = max(map(len, tables))
        padded = [table + [0] * (widest - len(table)) for table in tables]
        return GroupTable(np.array(padded), np.array(slots))

    def _free_behind_windows(self) -> None:
        for group, spec in enumerate(self.decoder.kv_groups):
            for name, table in self._tables[group].items():
                seen_next = max(0, self.lens[name] + 1 - spec.window) if spec.window else 0
                for column in range(seen_next // self._block_size):
                    if table[column]:
                        self.kv.poison(group, table[column])
                        self._free[group].insert(0, table[column])
                        self.freed_blocks += 1
                        table[column] = 0
