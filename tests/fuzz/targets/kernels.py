"""The native bindings: valid shapes with arbitrary contents (noise as weights, NaN, infinities,
block numbers and token ids out of range). They compute or raise; a crash ends the process.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuzz.mutate import EDGES
from pdserve.engine.weights import BlockFormat
from pdserve.engine.weights.formats import formats
from pdserve.kernels import _native
from pdserve.kernels.copy_hash import KEY_BYTES, expand_key

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # bytes per number
TYPES = ("float32", "bfloat16", "float16", "int8")
ODD = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 0.0, -0.0], np.float32)


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        self._contexts = [
            _native.Context(threads, isa=isa) for isa in _native.isas() for threads in (1, 2)
        ]
        self._parts: list[Callable[[Random, np.random.Generator], Any]] = [
            self._linear,
            self._groups,
            self._attention,
            self._sampling,
            self._copy,
        ]

    def case(self, rng: Random) -> str:
        part = rng.choice(self._parts)
        try:
            part(rng, np.random.default_rng(rng.getrandbits(60)))
        except (ValueError, IndexError, OverflowError, TypeError):
            return f"{part.__name__} refused"
        return f"{part.__name__} computed"

    def _linear(self, rng: Random, numbers: np.random.Generator) -> None:
        context = rng.choice(self._contexts)
        kind = rng.choice(_native.formats())
        rows, blocks, tokens = rng.randint(1, 70), rng.randint(1, 4), rng.randint(1, 40)
        if kind in FLOATS:
            cols = blocks * 32
            row_bytes = cols * FLOATS[kind]
        else:
            form = formats()[kind]
            assert isinstance(form, BlockFormat)
            cols = blocks * form.block_values
            row_bytes = form.row_bytes(cols)
        data = numbers.integers(0, 256, (rows, row_bytes), np.uint8)
        matrix = _native.Matrix.pack(context, kind, data, rows, cols)
        self._product(rng, numbers, context, matrix, tokens)

    def _groups(self, rng: Random, numbers: np.random.Generator) -> None:
        """Draw levels, scales and zeros of arbitrary bytes; sizes may not match."""
        context, kind = rng.choice(self._contexts), rng.choice(_native.grouped_formats())
        rows, groups = rng.randint(1, 70), rng.randint(1, 5)
        width = rng.choice((8, 16, 32, 64, 96, 128)) * (2 if kind.endswith("8") else 1)
        codes = numbers.integers(0, 127 if kind == "FP8" else 256, (rows, groups * width), np.uint8)
        sizes = {"E4M3": 1} if kind == "FP4" else FLOATS
        dtype = rng.choice(tuple(sizes))
        scales = numbers.integers(0, 127, (rows, groups * sizes[dtype]), np.uint8)
        zeros = numbers.integers(0, 256, (rows, groups), np.uint8) if rng.random() < 0.3 else None
        divisors = np.abs(_values(rng, numbers, (rows,))) if dtype == "E4M3" else None
        matrix = _native.Matrix.pack_groups(context, kind, codes, dtype, scales, zeros, divisors)
        self._product(rng, numbers, context, matrix, rng.randint(1, 40))

    def _product(
        self,
        rng: Random,
        numbers: np.random.Generator,
        context: _native.Context,
        matrix: _native.Matrix,
        tokens: int,
    ) -> None:
        rows, cols = matrix.rows, matrix.cols
        ids = numbers.integers(0, rows, 5) if rng.random() < 0.7 else _ids(rng, 5)
        matrix.row_values(context, ids)
        out = np.empty((tokens, rows), np.float32)
        _native.linear_into(context, _values(rng, numbers, (tokens, cols)), [matrix], out)

    def _attention(self, rng: Random, numbers: np.random.Generator) -> None:
        context = rng.choice(self._contexts)
        kind, heads, group = rng.choice(TYPES), rng.randint(1, 3), rng.randint(1, 4)
        head_dim, size = rng.choice((16, 48, 64, 80, 128)), rng.choice((16, 32))
        num_blocks, tokens = rng.randint(1, 8), rng.randint(1, 20)
        block_bytes = _native.kv_block_bytes(kind, heads, size, head_dim)
        pool = numbers.integers(0, 256, (num_blocks, block_bytes), np.uint8)
        k, v = (_values(rng, numbers, (tokens, heads, head_dim)) for _ in range(2))
        slots = numbers.integers(0, num_blocks * size, tokens)
        if rng.random() < 0.3:
            slots = _ids(rng, tokens)
        _native.write_kv(context, pool, kind, size, k, v, slots)  # type: ignore[arg-type]
        rows = rng.randint(1, tokens)
        table = numbers.integers(0, num_blocks, (rows, num_blocks))
        if rng.random() < 0.3:
            table[rng.randrange(rows), 0] = rng.choice(EDGES) % 2**63
        cuts = sorted(rng.sample(range(1, tokens), rows - 1)) if rows > 1 else []
        starts = np.array([0, *cuts, tokens])
        lens = np.array([rng.randint(1, num_blocks * size + 5) for _ in range(rows)], np.int64)
        q = _values(rng, numbers, (tokens, heads * group, head_dim))
        out = np.empty_like(q)
        scale, window, cap = 0.1, rng.choice((0, 1, 40)), rng.choice((0.0, 30.0))
        _native.paged_attention(
            context, q, pool, kind, heads, size, table, starts, lens, scale, window, cap, out,
        )  # type: ignore[arg-type]  # fmt: skip

    def _sampling(self, rng: Random, numbers: np.random.Generator) -> None:
        context = rng.choice(self._contexts)
        vocab, rows = rng.choice((1, 2, 17, 64, 1000)), rng.randint(1, 6)
        logits = _values(rng, numbers, (rows, vocab))
        streams = [
            _native.Stream(
                vocab,
                temperature=rng.choice((0.0, 0.7, 1e-30, 1e30)),
                top_k=rng.choice((0, 1, 5, 10**6)),
                top_p=rng.choice((1.0, 0.5, 1e-9)),
                min_p=rng.choice((0.0, 0.5)),
                seed=rng.getrandbits(63),
                repetition_penalty=rng.choice((1.0, 1.3, 1e-3)),
                presence_penalty=rng.choice((0.0, 2.0)),
                penalty_window=rng.choice((0, 1, 7, 2**31 - 1)),
                logit_bias={rng.randrange(vocab + 3): rng.choice((-100.0, 100.0))},
                prompt_ids=[rng.randrange(vocab) for _ in range(5)],
            )
            for _ in range(rows)
        ]
        generated = [[rng.randrange(vocab) for _ in range(4)] for _ in range(rows)]
        sampler = _native.NativeSampler(context)
        tokens = sampler.sample(logits, list(range(rows)), streams, generated)
        for row, token in zip(logits, tokens, strict=True):
            assert 0 <= token < vocab or not (np.abs(row) < 1e30).all(), (row, token)
        if all(token >= 0 for token in tokens):
            sampler.logprobs(logits, tokens, rng.randrange(6))

    def _copy(self, rng: Random, numbers: np.random.Generator) -> None:
        layers, blocks, block_bytes = rng.randint(1, 3), rng.randint(1, 5), rng.choice((64, 4096))
        pool = numbers.integers(0, 256, layers * blocks * block_bytes, np.uint8)
        chosen = np.array([rng.randrange(blocks + 1) for _ in range(rng.randint(1, 4))], np.int32)
        slot = np.zeros(layers * len(chosen) * block_bytes, np.uint8)
        key = expand_key(rng.randbytes(KEY_BYTES))
        per_layer = blocks * block_bytes
        _native.copy_and_hash(
            pool, per_layer, block_bytes, 0, layers, chosen, slot, key, rng.random() < 0.5
        )


def _values(
    rng: Random, numbers: np.random.Generator, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Draw ordinary numbers, some of them unusual."""
    found = numbers.normal(size=shape).astype(np.float32)
    if rng.random() < 0.4:
        flat = found.reshape(-1)
        flat[numbers.integers(0, flat.size, 3)] = numbers.choice(ODD, 3)
    return found


def _ids(rng: Random, count: int) -> NDArray[np.int64]:
    """Draw numbers out of range."""
    return np.array([rng.choice(EDGES) % 2**63 - rng.choice((0, 2**62)) for _ in range(count)])
