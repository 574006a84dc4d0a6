"""top_k, top_p and min_p: the tokens of one row that may be sampled.

Each filter is a lower bound on the scaled logits, so equal logits are kept or removed together.
"""

import math

import torch
from torch import Tensor

from pdserve.kernels.streams import StreamSettings

FIRST_SORT = 256  # top_p rarely needs more tokens; sorting the whole vocabulary is slow


def candidates(scaled: Tensor, settings: StreamSettings) -> Tensor:
    """Return the ids that the filters keep of logits / T [vocab]: int64 [n], ascending.

    In this order: the k best; of those, the best whose probabilities sum to top_p; of those, the
    ones with at least min_p times the best probability. The best token always stays.
    """
    vocab = len(scaled)
    peak = scaled.max()
    floor, remaining = torch.full_like(peak, -math.inf), scaled
    if 0 < settings.top_k < vocab:
        floor = scaled.topk(settings.top_k).values[-1]
        remaining = scaled[scaled >= floor]
    if settings.top_p < 1:
        floor = torch.maximum(floor, _nucleus_floor(remaining, settings.top_p))
    if settings.min_p > 0:
        floor = torch.maximum(floor, peak + math.log(settings.min_p))
    return (scaled >= torch.minimum(floor, peak)).nonzero()[:, 0]


def _nucleus_floor(scaled: Tensor, top_p: float) -> Tensor:
    """Return the logit of the last token of the nucleus (Holtzman et al., arXiv:1904.09751)."""
    total = scaled.double().logsumexp(0)
    count = min(len(scaled), FIRST_SORT)
    while True:
        best = scaled.topk(count).values
        mass = (best.double() - total).exp().cumsum(0)
        num_inside = int((mass < top_p).sum())
        if num_inside < count or count == len(scaled):
            return best[min(num_inside, count - 1)]
        count = len(scaled)
