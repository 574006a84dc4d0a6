"""The pooled hidden state of one prompt, as its chunks are computed. Pure.

It is the same bit for bit however the prompt was cut: the mean adds one token after the other.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray


class PooledState:
    """The mean of the final hidden states of a prompt, or the last one alone."""

    def __init__(self, kind: str) -> None:
        """`kind`: "mean" or "last"."""
        # The states of all tokens count, so that none may come from the prefix cache.
        self.needs_all: Final = kind == "mean"
        self._total: NDArray[np.float64] | None = None
        self._count = 0

    def take(self, states: NDArray[np.float32], start: int) -> None:
        """float32 [tokens, hidden], of token `start` on: the next ones, or if only the last one
        counts, that one. A prompt that begins anew, after a preemption, does so with token 0."""
        if self._total is None or not start or not self.needs_all:
            self._total, self._count = np.zeros(states.shape[1]), 0
        for state in states:  # in this order, whatever numpy would choose
            self._total += state
        self._count += len(states)

    def values(self) -> tuple[float, ...] | None:
        """The pooled state as float32 numbers; None if one of them is not finite."""
        assert self._total is not None  # a prompt has tokens
        values = (self._total / self._count).astype(np.float32)
        return tuple(values.tolist()) if np.isfinite(values).all() else None
