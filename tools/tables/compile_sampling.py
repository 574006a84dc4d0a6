"""The launches of sampling, for the table of compiled kernels."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from pdserve.kernels.cuda.sampling import CudaSampling
from pdserve.kernels.cuda.sampling.logprobs import launch
from pdserve.kernels.sampling_ops import StreamSettings

VOCABS = (151_936, 50_257)  # the second is odd: no two rows have the same alignment


def launches() -> list[tuple[str, Callable[[], object]]]:
    """Labels, and calls that launch every kernel with tensors on the CPU."""
    return [
        (f"{name}, {vocab} tokens", partial(call, vocab))
        for vocab in VOCABS
        for name, call in (("every kind of pick", _step), ("log-probabilities", _logprobs))
    ]


def _step(vocab: int) -> None:
    kinds = [
        StreamSettings(),
        StreamSettings(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05),
        StreamSettings(presence_penalty=1.0, logit_bias={1: 1.0}),
    ]
    ops = CudaSampling()
    streams = [ops.stream(kind, vocab) for kind in kinds]
    masks = [np.zeros((vocab + 31) // 32, np.uint32), None, None]
    ops.launch(torch.zeros(3, vocab), [0, 1, 2], streams, [[5], [5], [5]], masks)


def _logprobs(vocab: int) -> None:
    launch(torch.zeros(3, vocab), torch.zeros(5, dtype=torch.int32), 20)
