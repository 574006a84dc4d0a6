"""Bound on the running requests that change their worker at once; pure counting.

When a decode worker dies, all its requests must be prefilled elsewhere, prompt and answer. All at
once they would delay what runs there, so only a share of the running requests changes at a time.
Migrations with KV count too, since a copy takes memory bandwidth on both sides.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

SHARE = 0.2  # of the requests that have generated tokens
RequestT = TypeVar("RequestT", bound=Hashable)


class RecomputeBudget(Generic[RequestT]):
    """Running and changing requests. Invariant: at most max(1, SHARE of the running) change."""

    def __init__(self) -> None:
        self._running: set[RequestT] = set()  # that have tokens, in any stage
        self._recomputed: set[RequestT] = set()
        self._migrating: set[RequestT] = set()  # with their KV, so nothing is computed

    @property
    def num_under_way(self) -> int:
        """Number of running requests that are being recomputed."""
        return len(self._recomputed)

    @property
    def has_room(self) -> bool:
        """Whether one more may begin."""
        under_way = len(self._recomputed) + len(self._migrating)
        return under_way < max(1, int(SHARE * len(self._running)))

    def runs(self, request: RequestT) -> None:
        """Note that a request has tokens, which ends its recomputation if there was one."""
        self._running.add(request)
        self._recomputed.discard(request)

    def recompute_begun(self, request: RequestT) -> None:
        """Count a running request that is being recomputed."""
        self._recomputed.add(request)

    def recompute_over(self, request: RequestT) -> None:
        """Note that the attempt is over, whatever its result."""
        self._recomputed.discard(request)

    def migration_begun(self, request: RequestT) -> None:
        """Count a request that moves to another worker with its KV."""
        self._migrating.add(request)

    def migration_over(self, request: RequestT) -> None:
        """Note that the migration is over, whatever its result."""
        self._migrating.discard(request)

    def forget(self, request: RequestT) -> None:
        """Forget a request that has ended."""
        self._running.discard(request)
        self._recomputed.discard(request)
