"""A model without weights whose next token depends on every bit of KV that it can see.

A token's KV holds its id, its position and a running hash, which is read back from the KV of the
token before it. A next token is a keyed sum over all visible words. The model asserts nothing:
missing, corrupted, foreign or misplaced KV gives other tokens, which the oracle detects.
"""

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np

from pdserve.engine.execution import Batch, Ints
from pdserve.engine.kv import KvSpec, LayerGroup
from pdserve.engine.kv.cache import KvCache
from pdserve.kernels.sampling_ops import Mask, StreamSettings, TokenScores

VOCAB = 64
EOS = 0
CONTEXT = 256
WORDS = 4  # per token and layer: two of keys, two of values
MASK = (1 << 32) - 1


def spec(block_size: int, window: int) -> KvSpec:
    """Return two layers with full attention and, with a window, a third with window attention."""
    groups = [LayerGroup((0, 1), "full", 0, 1, 2, "float32", 0, 1)]
    if window:
        groups.append(LayerGroup((2,), "window", window, 1, 2, "float32", 0, 1))
    return KvSpec(block_size, tuple(groups))


def _mixed(value: int) -> int:
    value = (value ^ (value >> 16)) * 0x7FEB352D & MASK
    value = (value ^ (value >> 15)) * 0x846CA68B & MASK
    return value ^ (value >> 16)


def _words(token: int, position: int, state: int, layer: int) -> tuple[int, int, int, int]:
    """Return two words of keys and two of values."""
    return token, position, state, _mixed(state + layer + 1)


def _state(before: int, token: int, position: int, group: int) -> int:
    return _mixed((before * 31 + token * 0x9E3779B1 + position * 0x85EBCA6B + group + 1) & MASK)


@lru_cache
def _weights(block_size: int) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    """Return weights [layer, block, 2, 1, block_size, 2]. They are odd, so that a change of any
    single word changes the sum."""
    rng = Random(4)
    blocks = CONTEXT // block_size + 1
    odd = [rng.getrandbits(32) | 1 for _ in range(4 * blocks * block_size * WORDS)]
    return np.array(odd, dtype=np.uint32).reshape(4, blocks, 2, 1, block_size, 2)


def _token(digest: int, seed: int, choice: int, position: int) -> int:
    key = (seed * 0x9E3779B1 + choice * 0x85EBCA6B + position * 0xC2B2AE35) & MASK
    return _mixed((digest + _mixed(key)) & MASK) % VOCAB


class Model:
    """Implements Model of engine/execution/runner.py."""

    def __init__(self, spec: KvSpec) -> None:
        self._spec = spec
        self._data: list[Any] = []

    def forward(self, batch: Batch[Ints], kv: KvCache) -> Any:
        if not self._data:
            self._data = [data.view(np.uint32) for data in kv.data]
        size = self._spec.block_size
        ids = batch.token_ids.tolist()
        positions = batch.positions.tolist()
        digests: dict[int, int] = dict.fromkeys(batch.logit_tokens.tolist(), 0)
        for number, group in enumerate(self._spec.groups):
            data, table = self._data[number], batch.groups[number].block_table
            for row in range(len(batch.kv_lens)):
                blocks = table[row].tolist()
                for at in range(batch.starts[row], batch.starts[row + 1]):
                    p = positions[at]
                    before = 0
                    if p:
                        before = int(data[0, blocks[(p - 1) // size], 1, 0, (p - 1) % size, 0])
                    state = _state(before, ids[at], p, number)
                    for i, layer in enumerate(group.layers):
                        data[i, blocks[p // size], :, 0, p % size, :].flat[:] = _words(
                            ids[at], p, state, layer
                        )
                    if at in digests:
                        digests[at] += self._digest(number, group, blocks, p + 1)
        return np.array([[digests[at] & MASK] for at in batch.logit_tokens.tolist()], np.int64)

    def _digest(self, number: int, group: LayerGroup, blocks: list[int], end: int) -> int:
        size = self._spec.block_size
        low = max(0, end - group.window) if group.window else 0
        first, last = low // size, (end - 1) // size
        words = self._data[number][:, blocks[first : last + 1]]
        words[:, -1, :, :, (end - 1) % size + 1 :] = 0
        words[:, 0, :, :, : low % size] = 0
        weights = _weights(size)[list(group.layers), first : last + 1]
        return int((words * weights).sum(dtype=np.uint32))

    def logits(self, hidden: Any) -> Any:
        return hidden

    def states(self, hidden: Any) -> Any:
        return hidden.astype(np.float32)


class Sampling:
    """Implements SamplingOps: a token is a function of digest, seed, choice and
    position."""

    def stream(self, settings: StreamSettings, vocab: int) -> StreamSettings:
        return settings

    def sample(
        self,
        logits: Any,
        rows: list[int],
        streams: list[Any],
        generated: list[list[int]],
        masks: list[Mask | None] | None = None,
    ) -> list[int]:
        assert masks is None
        return [
            _token(int(logits[row, 0]), stream.seed, stream.choice, len(ids))
            for row, stream, ids in zip(rows, streams, generated, strict=True)
        ]

    def logprobs(
        self, logits: Any, tokens: list[int], count: int, also: Sequence[int] = ()
    ) -> list[TokenScores]:
        raise NotImplementedError


def reference(spec: KvSpec, prompt: list[int], seed: int, choice: int, most: int) -> list[int]:
    """Return the tokens of a choice, computed without a cache. They end with EOS or after `most`
    tokens."""
    size = spec.block_size
    weights = _weights(size)
    states = [0] * len(spec.groups)
    sums: list[list[int]] = [[] for _ in spec.groups]  # per token: its part of the digest
    ids = list(prompt)
    generated: list[int] = []
    done = 0
    while True:
        for p in range(done, len(ids)):
            for number, group in enumerate(spec.groups):
                states[number] = _state(states[number], ids[p], p, number)
                part = 0
                for layer in group.layers:
                    words = _words(ids[p], p, states[number], layer)
                    some = weights[layer, p // size, :, 0, p % size, :].ravel().tolist()
                    part += sum(w * x for w, x in zip(words, some, strict=True))
                sums[number].append(part & MASK)
        done = len(ids)
        digest = 0
        for number, group in enumerate(spec.groups):
            low = max(0, done - group.window) if group.window else 0
            digest += sum(sums[number][low:]) & MASK
        token = _token(digest & MASK, seed, choice, len(generated))
        generated.append(token)
        ids.append(token)
        if token == EOS or len(generated) == most:
            return generated
