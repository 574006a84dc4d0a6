"""Sequences of known tokens over one KV pool: a step gets the ranges of tokens that it computes."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.execution import Batch, GroupTable, Ints
from pdserve.engine.kv import KvSpec, LayerGroup, blocks_for
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.torch_cache import DeviceKvCache, TorchKvCache
from pdserve.engine.models.cuda import CudaDecoder

BLOCK_SIZE = 16


class Row(NamedTuple):
    """Tokens [start, end) of a sequence."""

    sequence: int
    start: int
    end: int


def make_pool(
    device: str, groups: tuple[LayerGroup, ...], num_blocks: int, block_size: int = BLOCK_SIZE
) -> KvCache:
    kind = TorchKvCache if device == "cpu" else DeviceKvCache
    return kind(KvSpec(block_size, groups), [num_blocks] * len(groups))


class Sequences:
    """Block tables of sequences, which this object owns. The pool is the caller's."""

    def __init__(
        self, decoder: CudaDecoder, kv: KvCache, tokens: Ints, lens: Sequence[int] = ()
    ) -> None:
        """`tokens` [sequences, most]; sequence n has blocks for lens[n] tokens, or for `most`."""
        self.decoder, self.kv, self.tokens = decoder, kv, tokens
        count, most = tokens.shape
        needed = [blocks_for(n, kv.spec.block_size) for n in lens or [most] * count]
        if min(kv.num_blocks) < sum(needed):
            raise ValueError(f"a pool of {kv.num_blocks} blocks, not {sum(needed)}")
        blocks = iter(np.random.default_rng(0).permutation(sum(needed)) + 1)
        self._table = np.zeros((count, max(needed)), np.int64)
        for row, own in enumerate(needed):
            self._table[row, :own] = [next(blocks) for _ in range(own)]

    def clear(self) -> None:
        """Clear the pool, so that no key or value of an earlier step can be reused in the next."""
        for n in range(self.decoder.config.num_layers):
            self.kv.layer(n)[0].fill_(math.nan)

    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """Final hidden states of each row's last token; rows of one token are first."""
        return self.decoder.forward(self.batch(rows), self.kv)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Logits, float32 [rows, vocab]."""
        return self.decoder.logits(self.hidden(rows))

    def batch(self, rows: Sequence[Row]) -> Batch[Ints]:
        positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
        of_row = np.concatenate([np.full(row.end - row.start, row.sequence) for row in rows])
        starts = np.cumsum([0, *(row.end - row.start for row in rows)])
        size = self.kv.spec.block_size
        blocks = self._table[of_row, positions // size]
        width = blocks_for(max(row.end for row in rows), size)
        group = GroupTable(
            self._table[[row.sequence for row in rows], :width],
            blocks * size + positions % size,
        )
        return Batch(
            token_ids=self.tokens[of_row, positions],
            positions=positions,
            starts=tuple(map(int, starts)),
            kv_lens=tuple(row.end for row in rows),
            num_decode_rows=sum(row.end - row.start == 1 for row in rows),
            groups=(group,) * len(self.kv.spec.groups),
            logit_tokens=starts[1:] - 1,
        )


def drawn_tokens(count: int, most: int, vocab: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, vocab, (count, most))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, including NaN."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
