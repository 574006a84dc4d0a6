"""Log-probabilities of the model's own distribution, before anything edits the logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.kernels.streams import TokenScores


@torch.inference_mode()
def logprobs(
    logits: Tensor, tokens: Sequence[int], count: int, also: Sequence[int] = ()
) -> list[TokenScores]:
    """Of tokens[r] under row r of raw logits [rows, vocab], with the `count` best of each row and
    then the ids of `also`."""
    picked = torch.tensor(tokens, device=logits.device)
    total = logits.logsumexp(dim=-1)
    own = (logits.gather(1, picked[:, None])[:, 0] - total).tolist()
    best = _best(logits, total, count) if count else [()] * len(own)
    if also:
        named = (logits[:, torch.tensor(also, device=logits.device)] - total[:, None]).tolist()
        best = [
            (*some, *zip(also, row, strict=True)) for some, row in zip(best, named, strict=True)
        ]
    return list(zip(own, best, strict=True))


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
