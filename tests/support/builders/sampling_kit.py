"""Tests of a backend's sampled tokens against the reference's: logits, calls, and edits of them."""

from typing import Any

import torch

from pdserve.kernels.sampling_ops import StreamSettings

EDITS: list[dict[str, Any]] = [
    {"logit_bias": {3: 0.5, 40: -1e6, 0: 1e-3}},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "logit_bias": {5: 0.1}},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.31, "repetition_penalty": 1.9},
    {"frequency_penalty": 0.31, "repetition_penalty": 1.9, "penalty_window": 3},
    {"presence_penalty": 1.5, "frequency_penalty": -0.3, "penalty_window": 8},
    {"repetition_penalty": 0.7, "penalty_window": 1000},
    {"masked_ids": (1, 2, 3, 4), "min_tokens": 6},
    {"masked_ids": tuple(range(100)), "min_tokens": 6},
    {"masked_ids": tuple(range(100)), "min_tokens": 6, "temperature": 1.0},
    {"masked_ids": tuple(range(100)), "min_tokens": 6, "frequency_penalty": 0.3},
]


def some_logits(seed: int, rows: int, vocab: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * spread


def sample(
    ops: Any,
    logits: torch.Tensor,
    kinds: list[StreamSettings],
    generated: list[list[int]] | None = None,
    rows: list[int] | None = None,
    masks: Any = None,
) -> list[int]:
    """Sample with new streams of these kinds."""
    streams = [ops.stream(kind, logits.shape[1]) for kind in kinds]
    ids = generated or [[] for _ in kinds]
    tokens: list[int] = ops.sample(logits, rows or list(range(len(kinds))), streams, ids, masks)
    return tokens
