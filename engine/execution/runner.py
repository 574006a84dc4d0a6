"""Turns a plan into the flat batch, runs the model on it, and pools hidden states.

Block tables are arrays with one row per slot of the batch; a step updates only what has changed.
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
    """Location of one layer group's keys and values for this batch."""

    block_table: T  # [rows, max_blocks]; padded with 0, the null block
    slots: T  # [tokens]: block * block_size + offset, where each new token's KV goes


@dataclass(frozen=True, slots=True)
class UnreadTokens:
    """Sampled tokens that the host has not read: row r continues with tokens[indices[r]]."""

    tokens: Any  # [sampled tokens of the previous step], on the device
    indices: Ints  # [rows]


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Flat batch: rows are sequences; row r has tokens [starts[r], starts[r + 1])."""

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
    """Methods of a decoder that the engine calls."""

    def forward(self, batch: Batch[Ints], kv: KvCache) -> Any:
        """Return final hidden states [len(batch.logit_tokens), hidden]; write the KV."""

    def logits(self, hidden: Any) -> Any:
        """Return float32 logits [n, vocab] of n final hidden states, for the backend's sampling."""

    def states(self, hidden: Any) -> NDArray[np.float32]:
        """Return n final hidden states as float32 [n, hidden], in host memory."""


@runtime_checkable
class DeviceModel(Protocol):
    """A model whose `forward` returns before the result is computed."""

    def synchronize(self) -> None:
        """Wait for everything launched before."""


class DeviceLost(Exception):
    """The device fails every operation, as after an illegal access; the process must restart."""


class ModelRunner:
    """Runs plans on the model; owns the block tables of the batch's slots, not the KvCache."""

    def __init__(self, model: Model, kv: KvCache, num_slots: int, context_len: int) -> None:
        self._model = model
        self._kv = kv
        self._block_size = kv.spec.block_size
        width = blocks_for(context_len, self._block_size)
        self._tables: list[Ints] = [
            np.zeros((num_slots, width), dtype=np.int64) for _ in kv.spec.groups
        ]

    def launch(self, plan: Plan, unread: UnreadTokens | None = None) -> Any:
        """Run the block copies, then the forward pass; on CPU both are complete on return.

        `unread`: the tokens of the rows, if the sequences do not have them yet. Returns hidden
        states [outputs, hidden] in the order of the rows; None without outputs.
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
        """Update the slot's tables with what has changed in the sequence's since its last step."""
        for group, start in enumerate(sequence.rewritten_from):
            blocks = sequence.block_tables[group]
            if start < len(blocks):
                table_row = self._tables[group][sequence.slot]
                table_row[start : len(blocks)] = blocks[start:]
                if not start:
                    table_row[len(blocks) :] = 0  # another sequence had the slot before
                sequence.rewritten_from[group] = len(blocks)


def _slots(blocks: Seq[int], start: int, end: int, size: int) -> list[int]:
    """Return the slots of tokens start .. end - 1 of a sequence: block * size + offset."""
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
    """Return the outcomes, those of pooled rows with the states of their outputs.

    `hidden`: [outputs, hidden], the outputs of row after row; None without outputs.
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
