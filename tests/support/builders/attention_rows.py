"""Rows of a step for the paged attention of kernels/cuda."""

import torch
from torch import Tensor

from pdserve.kernels.cuda.attention import Rows, chunk_tiles


def plan_rows(
    starts: tuple[int, ...],
    kv_lens: tuple[int, ...],
    num_decode_rows: int,
    block_table: Tensor,
    max_kv_len: int = 0,
) -> Rows:
    """Return the plan of rows and their block table; `max_kv_len`: for decode rows whose lengths
    will change.
    """
    return Rows(
        block_table,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(kv_lens, dtype=torch.int32),
        torch.from_numpy(chunk_tiles(starts, kv_lens, num_decode_rows)).int(),
        num_decode_rows,
        max(max_kv_len, *kv_lens[:num_decode_rows], 0),
    )
