"""The data that passes to and between the launches of a step: its integers on the device, and the
values of each launch.

The integers are in one array of int32, so that a step costs one copy. The offsets of a launch's
numbers depend only on the step's shape, so that a recorded graph finds them again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.execution import Batch, Ints
from pdserve.kernels.cuda.attention import Rows, chunk_tiles
from pdserve.kernels.cuda.linear import SplitSums

ALIGNED = 16  # numbers: launches are compiled for pointers to multiples of 16 bytes
Numbers = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """The locations of keys and values of one layer group."""

    rows: Rows
    slots: Tensor  # [tokens]; negative: not stored


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step; tensors are int32 on the device."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    outputs: Tensor  # [outputs]: tokens whose hidden states are returned
    groups: tuple[GroupInputs, ...]
    token_indices: Tensor  # [rows]: of UnreadTokens

    def take(self, tokens: Tensor) -> None:
        """Replace the token ids by tokens that the host has not read. A token that could not be
        sampled, which is negative, becomes an arbitrary one: its row is discarded."""
        self.token_ids.copy_(tokens.index_select(0, self.token_indices).clamp_(min=0))


class InputBuffer:
    """Memory for the inputs of one step at a time, at constant addresses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: Tensor | None = None

    def put(self, batch: Batch[Ints], max_kv_len: int) -> StepInputs:
        """Upload a batch to the same addresses; the first batch must be the largest."""
        arrays = _arrays(batch)
        staged, offsets = _staged(arrays, self._device)
        if self._numbers is None:
            self._numbers = torch.empty_like(staged, device=self._device)
        self._numbers[: len(staged)].copy_(staged, non_blocking=True)
        return _inputs(batch, _views(self._numbers, arrays, offsets), max_kv_len)


def upload(batch: Batch[Ints], device: torch.device) -> StepInputs:
    """Upload a batch to newly allocated memory."""
    arrays = _arrays(batch)
    staged, offsets = _staged(arrays, device)
    on_device = staged.to(device, non_blocking=True)
    decode_lens = batch.kv_lens[: batch.num_decode_rows]
    return _inputs(batch, _views(on_device, arrays, offsets), max(decode_lens, default=0))


def _arrays(batch: Batch[Ints]) -> list[Numbers]:
    arrays: list[Numbers] = [
        batch.token_ids,
        batch.positions,
        batch.logit_tokens,
        np.array(batch.starts),
        np.array(batch.kv_lens),
        chunk_tiles(batch.starts, batch.kv_lens, batch.num_decode_rows),
    ]
    rows = len(batch.kv_lens)
    arrays.append(batch.unread.indices if batch.unread else np.zeros(rows, np.int64))
    for group in batch.groups:
        arrays += [group.block_table, group.slots]
    return arrays


def _staged(arrays: Sequence[Numbers], device: torch.device) -> tuple[Tensor, list[int]]:
    """Return all numbers in one array that the device can read, and the offset of each."""
    offsets, total = list[int](), 0
    for array in arrays:
        offsets.append(total)
        total += -(-array.size // ALIGNED) * ALIGNED
    staged = torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers = staged.numpy()
    for offset, array in zip(offsets, arrays, strict=True):
        numbers[offset : offset + array.size] = array.reshape(-1)
    return staged, offsets


def _views(numbers: Tensor, arrays: Sequence[Numbers], offsets: Sequence[int]) -> list[Tensor]:
    return [
        numbers[offset : offset + array.size].view(array.shape)
        for offset, array in zip(offsets, arrays, strict=True)
    ]


def _inputs(batch: Batch[Ints], tensors: Sequence[Tensor], max_kv_len: int) -> StepInputs:
    token_ids, positions, outputs, starts, kv_lens, tiles, indices, *rest = tensors
    groups = tuple(
        GroupInputs(
            Rows(
                table,
                starts,
                kv_lens,
                tiles,
                batch.num_decode_rows,
                max_kv_len,
            ),
            slots,
        )
        for table, slots in zip(rest[::2], rest[1::2], strict=True)
    )
    inputs = StepInputs(token_ids, positions, outputs, groups, indices)
    if batch.unread is not None:
        inputs.take(batch.unread.tokens)
    return inputs


class Run:
    """The values of one pass over the parts. `residual` is the residual stream [tokens, hidden],
    which sums change in place; `kv` has, by model layer, its blocks and its group."""

    def __init__(
        self,
        residual: Tensor,
        inputs: StepInputs,
        kv: Sequence[tuple[Tensor, int]],
    ) -> None:
        self.residual, self.inputs, self.kv = residual, inputs, kv
        self.held: Tensor | None = None
        self._x: Tensor | SplitSums = residual

    @property
    def x(self) -> Tensor:
        """The input of the next part."""
        assert not isinstance(self._x, SplitSums), "the split sums of x have not been added"
        return self._x

    @x.setter
    def x(self, x: Tensor | SplitSums) -> None:
        self._x = x

    @property
    def sums(self) -> Tensor | SplitSums:
        """x, for a part that adds the splits itself."""
        return self._x


class Launch(Protocol):
    """A part, ready to run."""

    def __call__(self, run: Run) -> None: ...
