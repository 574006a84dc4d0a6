"""A tiny decoder whose next token depends on every key that its block tables reach.

It writes each token's id and position into the KV cache and reads them back through the tables, so
a wrong table, slot, copy or shared block gives wrong tokens, and a wrong bit in any word of a key
or a value an error. It has no weights, and is exact in any batch.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.execution import Batch, Ints
from pdserve.engine.kv import KvSpec, LayerGroup
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.decoder import on

VOCAB = 64


def fake_spec(block_size: int = 4, window: int = 0) -> KvSpec:
    """Return one full group, and with a window a second one; float32, one head of four values."""
    groups = [LayerGroup((0,), "full", 0, 1, 4, "float32", 0, 1)]
    if window:
        groups.append(LayerGroup((1,), "window", window, 1, 4, "float32", 0, 1))
    return KvSpec(block_size, tuple(groups))


def words(ids: Tensor, positions: Tensor) -> Tensor:
    """Return key and value of each token, [tokens, 2, 4]: functions of both, a different one in
    each.
    """
    scale = torch.arange(1, 9).reshape(2, 4)
    return (ids[:, None, None] * scale + positions[:, None, None] * (scale**2)).float()


class LosableDevice:
    """A FakeDecoder as a device model whose steps fail from the third on; if it is `lost`, the
    device fails with them.
    """

    def __init__(self, lost: bool) -> None:
        self._inner = FakeDecoder(fake_spec())
        self._lost = lost
        self.failures = 0
        self.logits, self.states = self._inner.logits, self._inner.states

    def forward(self, batch: Any, kv: Any) -> Any:
        if self._inner.steps >= 2:
            self.failures += 1
            raise RuntimeError("an illegal memory access")
        return self._inner.forward(batch, kv)

    def synchronize(self) -> None:
        if self._lost and self.failures:
            raise RuntimeError("an earlier illegal memory access")


class FakeDecoder:
    """Computes logits of a token as a hash of the (id, position) pairs that it sees in every
    group.
    """

    def __init__(self, spec: KvSpec) -> None:
        self.spec = spec
        self.steps = 0
        self.widest = 0  # decode rows of the widest step
        self.kv_only_steps = 0

    def forward(self, host_batch: Batch[Ints], kv: KvCache) -> Tensor:
        batch = on(host_batch, "cpu")
        if host_batch.unread is not None:
            tokens = host_batch.unread.tokens[torch.from_numpy(host_batch.unread.indices)]
            batch = replace(batch, token_ids=tokens)
        self.steps += 1
        self.widest = max(self.widest, batch.num_decode_rows)
        self.kv_only_steps += batch.kv_only
        assert all(batch.starts[r + 1] - batch.starts[r] == 1 for r in range(batch.num_decode_rows))
        seen = torch.zeros(len(batch.token_ids))
        for number, group in enumerate(self.spec.groups):
            pool, at = kv.layer(group.layers[0])
            assert at == number
            data = torch.from_numpy(pool)
            table = batch.groups[number]
            block, offset = table.slots // self.spec.block_size, table.slots % self.spec.block_size
            assert (block > 0).all(), "a write into the null block"
            assert len(table.slots.unique()) == len(table.slots), "two writes into one slot"
            data[block, :, 0, offset] = words(batch.token_ids, batch.positions)
            for row in range(len(batch.kv_lens)):
                kept = data[table.block_table[row], :, 0]  # [max_blocks, 2, size, 4]
                kept = kept.transpose(1, 2).flatten(0, 1)  # [max_blocks * size, 2, 4]
                for token in range(batch.starts[row], batch.starts[row + 1]):
                    end = int(batch.positions[token]) + 1
                    low = max(0, end - group.window) if group.window else 0
                    wanted = torch.arange(low, end)
                    ids = kept[low:end, 0, 0] - wanted
                    assert torch.equal(kept[low:end], words(ids, wanted)), (
                        f"row {row} sees other keys"
                    )
                    mixed = (ids + 1) * ((wanted * 7 + number * 3) % 11 + 1)
                    seen[token] += float(mixed.sum() % 8191)
        wanted_tokens = seen[batch.logit_tokens]
        angle = wanted_tokens[:, None] * 0.37 + torch.arange(VOCAB)[None] * 1.7
        return torch.sin(angle) * 5

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden  # `forward` has made them

    def states(self, hidden: Tensor) -> Any:
        return hidden.numpy()


def reference(prompt: list[int], spec: KvSpec, count: int) -> list[int]:
    """Return the greedy continuation, computed without a cache."""
    ids = list(prompt)
    for _ in range(count):
        seen = 0.0
        for number, group in enumerate(spec.groups):
            low = max(0, len(ids) - group.window) if group.window else 0
            keys = range(low, len(ids))
            seen += sum((ids[p] + 1) * ((p * 7 + number * 3) % 11 + 1) for p in keys) % 8191
        logits = torch.sin(torch.tensor([seen])[:, None] * 0.37 + torch.arange(VOCAB) * 1.7) * 5
        ids.append(int(logits[0].argmax()))
    return ids[len(prompt) :]
