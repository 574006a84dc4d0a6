"""Turns a plan into a flat batch, runs the model on it, and attaches hidden states to pool to the
outcomes.

Block tables are arrays with one row per slot of the batch; each step updates only the entries that
have changed.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.kv import blocks_for
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import Outcome, Plan, Row, Sequence

Ints = NDArray[np.int64]
T = TypeVar("T")  # Ints, or a backend's arrays of int64


@dataclass(frozen=True, slots=True)
class GroupTable(Generic[T]):
    """Where the keys and values of a batch lie in the KV pool of one layer group."""

    block_table: T  # [rows, max_blocks]; padded with 0, the null block
    slots: T  # [tokens]: block * block_size + offset, where each new token's KV goes


@dataclass(frozen=True, slots=True)
class UnreadTokens:
    """Tokens that the previous step sampled on the device and that the host has not read yet; row r
    of the new step computes tokens[indices[r]]."""

    tokens: Any  # [sampled tokens of the previous step], on the device
    indices: Ints  # [rows]


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Input of one forward pass, with the tokens of all rows in flat arrays. Each row belongs to
    one sequence; row r has the tokens [starts[r], starts[r + 1])."""

    token_ids: T  # [tokens]
    positions: T  # [tokens], absolute
    starts: tuple[int, ...]  # rows + 1 offsets
    kv_lens: tuple[int, ...]  # per row: keys visible to its last token, this step's included
    num_decode_rows: int  # rows at the start, with one token each
    groups: tuple[GroupTable[T], ...]  # in the order of KvSpec.groups
    logit_tokens: T  # [outputs]: flat indices of the hidden states to return
    kv_only: bool = False  # no outputs: the last layer computes only K and V
    unread: UnreadTokens | None = None  # replaces token_ids if all rows are decode rows


class Model(Protocol):
    """Interface of a decoder: the methods that the engine calls."""

    def forward(self, batch: Batch[Ints], kv: KvCache) -> Any:
        """Run the model on a batch and write the KV of its tokens. Return the final hidden states
        [len(batch.logit_tokens), hidden] of the tokens in `batch.logit_tokens`."""

    def logits(self, hidden: Any) -> Any:
        """Return the float32 logits [n, vocab] of n final hidden states, as an array that the
        backend can sample from."""

    def states(self, hidden: Any) -> NDArray[np.float32]:
        """Copy n final hidden states into host memory; return them as float32 [n, hidden]."""


@runtime_checkable
class DeviceModel(Protocol):
    """Model on a device such as a GPU, whose `forward` returns before the result is computed."""

    def synchronize(self) -> None:
        """Wait for all work launched on the device so far."""


class DeviceLost(Exception):
    """The device fails every further operation, for example after an illegal memory access; only a
    restart of the process helps."""


class ModelRunner:
    """Runs the plans of steps on the model. Owns the arrays of block tables of the batch's slots;
    the KvCache belongs to the engine."""

    def __init__(self, model: Model, kv: KvCache, num_slots: int, context_len: int) -> None:
        self._model = model
        self._kv = kv
        self._block_size = kv.spec.block_size
        width = blocks_for(context_len, self._block_size)
        self._tables: list[Ints] = [
            np.zeros((num_slots, width), dtype=np.int64) for _ in kv.spec.groups
        ]

    def launch(self, plan: Plan, unread: UnreadTokens | None = None) -> Any:
        """Run the plan's block copies, then the model's forward pass. On a CPU both are complete on
        return, on a device they may not be.

        `unread`: the rows' tokens if they are still on the device and not yet in the sequences.
        Returns the hidden states [outputs, hidden] that the plan's rows need, row after row; None
        if no row needs any.
        """
        self._kv.copy(plan.copies)
        if not plan.rows:
            return None
        batch = self._batch(plan.rows, plan.num_decode_rows, unread)
        hidden = self._model.forward(batch, self._kv)
        return None if batch.kv_only else hidden

    def _batch(
        self, rows: Seq[Row], num_decode_rows: int, unread: UnreadTokens | None
    ) -> Batch[Ints]:
        starts, kv_lens, table_rows = [0], list[int](), list[int]()
        ids, positions, outputs = list[int](), list[int](), list[int]()
        slots: list[list[int]] = [[] for _ in self._tables]
        size = self._block_size
        # Most rows are decode rows: one token each, some without an output.
        for sequence, start, end, _, first_output in rows[:num_decode_rows]:
            self._sync(sequence)
            if first_output == start:
                outputs.append(len(ids))
            table_rows.append(sequence.slot)
            kv_lens.append(end)
            ids.append(sequence.ids[start] if unread is None else 0)
            positions.append(start)
            for row_slots, blocks in zip(slots, sequence.block_tables, strict=True):
                row_slots.append(blocks[start // size] * size + start % size)
        starts += range(1, num_decode_rows + 1)
        offset = num_decode_rows  # of the row's first token in the flat batch
        for sequence, start, end, _, first_output in rows[num_decode_rows:]:
            self._sync(sequence)
            table_rows.append(sequence.slot)
            kv_lens.append(end)
            ids += sequence.ids[start:end]
            positions += range(start, end)
            outputs += range(offset + first_output - start, offset + end - start)
            for row_slots, blocks in zip(slots, sequence.block_tables, strict=True):
                row_slots += _slots(blocks, start, end, size)
            offset += end - start
            starts.append(offset)
        # One numpy call for all arrays: separate calls dominate the engine's time in a short step.
        token_ids, position, *token_slots = np.array([ids, positions, *slots])
        width = blocks_for(max(kv_lens), size)
        groups = tuple(
            GroupTable(table[table_rows, :width], new_slots)
            for table, new_slots in zip(self._tables, token_slots, strict=True)
        )
        return Batch(
            token_ids=token_ids,
            positions=position,
            starts=tuple(starts),
            kv_lens=tuple(kv_lens),
            num_decode_rows=num_decode_rows,
            groups=groups,
            logit_tokens=np.array(outputs, dtype=np.int64),
            kv_only=not outputs,
            unread=unread,
        )

    def _sync(self, sequence: Sequence) -> None:
        """Copy the entries of a sequence's block tables that changed since its last step into the
        arrays of its slot."""
        for group, start in enumerate(sequence.rewritten_from):
            blocks = sequence.block_tables[group]
            if start < len(blocks):
                table_row = self._tables[group][sequence.slot]
                table_row[start : len(blocks)] = blocks[start:]
                if not start:
                    table_row[len(blocks) :] = 0  # another sequence had the slot before
                sequence.rewritten_from[group] = len(blocks)


def _slots(blocks: Seq[int], start: int, end: int, size: int) -> list[int]:
    """Return where the KV of a sequence's tokens `start` to `end` - 1 lies, as pool slots (block *
    size + offset). `blocks`: the sequence's block table; `size`: tokens per block."""
    slots: list[int] = []
    while start < end:
        block, offset = divmod(start, size)
        count = min(end - start, size - offset)
        first = blocks[block] * size + offset
        slots += range(first, first + count)
        start += count
    return slots


def with_states(
    rows: Seq[Row], outcomes: list[Outcome], hidden: Any, model: Model
) -> list[Outcome]:
    """Return the outcomes, with the hidden states of their tokens added to those of embedding
    requests.

    `hidden`: hidden states [outputs, hidden] of all rows, row after row; None if no row needs any.
    """
    if hidden is None or not any(row.sequence.job.pooled for row in rows):
        return outcomes
    pooled, output = list(outcomes), 0
    for i, row in enumerate(rows):
        end = output + row.end - row.first_output
        if row.sequence.job.pooled is not None and end > output:
            pooled[i] = outcomes[i]._replace(states=model.states(hidden[output:end]))
        output = end
    return pooled
