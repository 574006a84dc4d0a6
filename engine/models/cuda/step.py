"""The data of one step on the device: its integer inputs (token ids, positions, block tables), and
the values that pass from launch to launch.

The integers are in one int32 array, so that a step costs one copy. The offset of each input in that
array depends only on the step's shape, so that a recorded graph finds it at the same address.
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
    """Where one group of layers reads and writes keys and values in the KV cache during a step."""

    rows: Rows
    slots: Tensor  # [tokens]; negative: not stored


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The integer inputs of one step; tensors are int32 on the device."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    outputs: Tensor  # [outputs]: tokens whose hidden states are returned
    groups: tuple[GroupInputs, ...]
    token_indices: Tensor  # [rows]: of UnreadTokens

    def take(self, tokens: Tensor) -> None:
        """Replace the token ids by sampled tokens that are on the device and not yet read by the
        host. A negative token, which could not be sampled, becomes 0: the result of its row is
        discarded."""
        self.token_ids.copy_(tokens.index_select(0, self.token_indices).clamp_(min=0))


class InputBuffer:
    """Device memory for the inputs of one step at a time, at constant addresses that recorded
    graphs can keep."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: Tensor | None = None

    def put(self, batch: Batch[Ints], max_kv_len: int) -> StepInputs:
        """Upload a batch's inputs over the previous ones. The first batch sets the size of the
        buffer, so it must be the largest."""
        arrays = _arrays(batch)
        staged, offsets = _staged(arrays, self._device)
        if self._numbers is None:
            self._numbers = torch.empty_like(staged, device=self._device)
        self._numbers[: len(staged)].copy_(staged, non_blocking=True)
        return _inputs(batch, _views(self._numbers, arrays, offsets), max_kv_len)


def upload(batch: Batch[Ints], device: torch.device) -> StepInputs:
    """Upload a batch's inputs to newly allocated device memory."""
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
    """Copy arrays into one host array that the device can read, int32; return it and the offset of
    each array."""
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
    """The values of one pass over a model's parts. x is the value passed from part to part;
    `residual` is the residual stream [tokens, hidden], which sums change in place; `kv` has the
    cache blocks and the group number of each layer."""

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
        """The input of the next part, as a tensor; must not be split sums that no part has
        added."""
        assert not isinstance(self._x, SplitSums), "the split sums of x have not been added"
        return self._x

    @x.setter
    def x(self, x: Tensor | SplitSums) -> None:
        self._x = x

    @property
    def sums(self) -> Tensor | SplitSums:
        """The input of the next part, for a part that also accepts split sums and adds them
        itself."""
        return self._x


class Launch(Protocol):
    """The interface of a part that is ready to run on CUDA: a call launches its kernels, which
    replace x in `run`."""

    def __call__(self, run: Run) -> None: ...
