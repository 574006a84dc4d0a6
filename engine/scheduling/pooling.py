"""Pooled hidden state of one prompt, updated as its chunks are computed. Pure.

It is bitwise the same however the prompt is cut into chunks: the mean adds one token after the
other.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray


class PooledState:
    """Mean of a prompt's final hidden states, or the last state alone."""

    def __init__(self, kind: str) -> None:
        """`kind`: "mean" or "last"."""
        # The mean needs the states of all tokens, so none may come from the prefix cache.
        self.needs_all: Final = kind == "mean"
        self._total: NDArray[np.float64] | None = None
        self._count = 0

    def take(self, states: NDArray[np.float32], start: int) -> None:
        """Add the states, float32 [tokens, hidden], of the next tokens from `start` on, or of the
        last token if only that one counts. After a preemption a prompt starts again with token
        0."""
        if self._total is None or not start or not self.needs_all:
            self._total, self._count = np.zeros(states.shape[1]), 0
        for state in states:  # in this order; numpy's sum may use another
            self._total += state
        self._count += len(states)

    def values(self) -> tuple[float, ...] | None:
        """Return the pooled state as float32 numbers; None if one of them is not finite."""
        assert self._total is not None  # a prompt has tokens
        values = (self._total / self._count).astype(np.float32)
        return tuple(values.tolist()) if np.isfinite(values).all() else None
