"""How many running requests may change their worker at once; pure counting.

When a decode worker dies, all its requests want to be prefilled elsewhere, prompt and answer; at
once they would delay what runs there. So a share of the running changes at a time. Migrations,
which go with their KV, count too: a copy takes memory bandwidth on both sides.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

SHARE = 0.2  # of the requests that have tokens
RequestT = TypeVar("RequestT", bound=Hashable)


class RecomputeBudget(Generic[RequestT]):
    """Invariant: at most max(1, SHARE of the running) are under way."""

    def __init__(self) -> None:
        self._running: set[RequestT] = set()  # that have tokens, wherever they stand
        self._recomputed: set[RequestT] = set()
        self._migrating: set[RequestT] = set()  # with their KV, so nothing is computed

    @property
    def num_under_way(self) -> int:
        """Running requests that are being computed again."""
        return len(self._recomputed)

    @property
    def room(self) -> bool:
        """Whether one more may begin."""
        under_way = len(self._recomputed) + len(self._migrating)
        return under_way < max(1, int(SHARE * len(self._running)))

    def runs(self, request: RequestT) -> None:
        """It has tokens: if it was computed again, that is over."""
        self._running.add(request)
        self._recomputed.discard(request)

    def recompute_begun(self, request: RequestT) -> None:
        """A running request is computed again."""
        self._recomputed.add(request)

    def recompute_over(self, request: RequestT) -> None:
        """That try is over, whatever came of it."""
        self._recomputed.discard(request)

    def migration_begun(self, request: RequestT) -> None:
        """It goes to another worker with its KV."""
        self._migrating.add(request)

    def migration_over(self, request: RequestT) -> None:
        """That is over, whatever came of it."""
        self._migrating.discard(request)

    def forget(self, request: RequestT) -> None:
        """It has ended."""
        self._running.discard(request)
        self._recomputed.discard(request)
