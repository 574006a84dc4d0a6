"""The flat batch of one step: decode rows first, then prefill chunks.

Passed to every layer; layers read nothing else about the step.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupTable:
    """Where one layer group's keys and values of this batch lie."""

    block_table: Tensor  # [rows, max_blocks] int64; padded with 0, the null block
    slots: Tensor  # [tokens] int64: block * block_size + offset, where each new token's KV goes


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows are sequences; row r has tokens [starts[r], starts[r + 1]) of the flat batch."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, absolute
    starts: tuple[int, ...]  # rows + 1 offsets
    kv_lens: tuple[int, ...]  # per row: keys visible to its last token, this step's included
    num_decode_rows: int  # the first rows, with one token each
    groups: tuple[GroupTable, ...]  # in the order of KvSpec.groups
    logit_tokens: Tensor  # [outputs] int64: flat indices whose hidden states are wanted
    kv_only: bool = False  # no logits wanted: of the last layer only K and V are computed

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    @property
    def num_rows(self) -> int:
        return len(self.starts) - 1
