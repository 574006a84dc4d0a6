"""Log-probabilities in the model's distribution, from unedited logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.kernels.streams import TokenScores


@torch.inference_mode()
def logprobs(
    logits: Tensor, tokens: Sequence[int], count: int, also: Sequence[int] = ()
) -> list[TokenScores]:
    """Return the log-probability of tokens[r] under row r of raw logits [rows, vocab], with those
    of the `count` best tokens of the row and then of the ids in `also`."""
    token_ids = torch.tensor(tokens, device=logits.device)
    total = logits.logsumexp(dim=-1)
    token_logprobs = (logits.gather(1, token_ids[:, None])[:, 0] - total).tolist()
    best = _best(logits, total, count) if count else [()] * len(token_logprobs)
    if also:
        extra_logprobs = (
            logits[:, torch.tensor(also, device=logits.device)] - total[:, None]
        ).tolist()
        best = [
            (*pairs, *zip(also, row, strict=True))
            for pairs, row in zip(best, extra_logprobs, strict=True)
        ]
    return list(zip(token_logprobs, best, strict=True))


def _best(rows: Tensor, total: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Return the best tokens of each row, best first; ties go to the lowest id."""
    floors = rows.topk(min(count, rows.shape[1])).values[:, -1]
    best = []
    for row, floor, log_sum in zip(rows, floors, total.tolist(), strict=True):
        ids = (row >= floor).nonzero()[:, 0]
        pairs = sorted(
            zip(row[ids].tolist(), ids.tolist(), strict=True), key=lambda p: (-p[0], p[1])
        )
        best.append(tuple((i, value - log_sum) for value, i in pairs[:count]))
    return best
