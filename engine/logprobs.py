"""Log-probabilities of the model's own distribution, before anything edits the logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.engine.request import TokenLogprob

SLICE = 64  # rows at a time: a chunk of float32 rows of a large vocabulary is hundreds of MB


def logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Of tokens[r] under row r of raw logits [rows, vocab], with the `count` best of each row."""
    found: list[TokenLogprob] = []
    for start in range(0, len(tokens), SLICE):
        rows = logits[start : start + SLICE]
        picked = torch.tensor(tokens[start : start + SLICE], device=rows.device)
        total = rows.logsumexp(dim=-1)
        own = (rows.gather(1, picked[:, None])[:, 0] - total).tolist()
        best = _best(rows, total, count) if count else [()] * len(own)
        found += [TokenLogprob(o, b) for o, b in zip(own, best, strict=True)]
    return found


def _best(rows: Tensor, total: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The best of each row, best first; of equal ones the lowest id."""
    floors = rows.topk(min(count, rows.shape[1])).values[:, -1]
    best = []
    for row, floor, log_sum in zip(rows, floors, total.tolist(), strict=True):
        ids = (row >= floor).nonzero()[:, 0]
        pairs = sorted(
            zip(row[ids].tolist(), ids.tolist(), strict=True), key=lambda p: (-p[0], p[1])
        )
        best.append(tuple((i, value - log_sum) for value, i in pairs[:count]))
    return best
