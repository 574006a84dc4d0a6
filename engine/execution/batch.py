"""The flat batch of one step: decode rows first, then prefill chunks.

Every layer receives it and reads nothing else about the step. The runner builds it from host
arrays; a decoder that computes with torch moves it to its device.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
T = TypeVar("T")  # Ints, or a backend's arrays of int64


@dataclass(frozen=True, slots=True)
class GroupTable(Generic[T]):
    """Location of one layer group's keys and values for this batch."""

    block_table: T  # [rows, max_blocks]; padded with 0, the null block
    slots: T  # [tokens]: block * block_size + offset, where each new token's KV goes


@dataclass(frozen=True, slots=True)
class UnreadTokens:
    """Tokens that the host has not read yet: the token of row r is tokens[picks[r]]."""

    tokens: Any  # [picks of the previous step], on the device
    picks: Ints  # [rows]


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
