"""The pooled hidden state of one prompt, as its chunks are computed. Pure.

It is the same bit for bit however the prompt was cut: the mean adds one token after the other.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

LAST, MEAN = "last", "mean"
KINDS = (LAST, MEAN)


class PooledState:
    """Takes the final hidden states of a prompt in order, from token 0 on."""

    def __init__(self, kind: str) -> None:
        self.kind: Final = kind
        self._total: NDArray[np.float64] | None = None
        self._count = 0

    @property
    def needs_all(self) -> bool:
        """Whether the states of all tokens count, so that none may come from the prefix cache."""
        return self.kind == MEAN

    def take(self, states: NDArray[np.float32], start: int) -> None:
        """float32 [tokens, hidden], of token `start` on; for LAST only that of the last token is
        wanted. A prompt that begins anew, after a preemption, does so with token 0."""
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
