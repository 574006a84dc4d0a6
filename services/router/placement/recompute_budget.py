"""How many running requests may change their worker at once; pure counting.

When a decode worker dies, all its requests want to be prefilled elsewhere, prompt and answer; at
once they would delay what runs there. So a share of the running moves at a time, the oldest first.
Those that move with their KV (moves.py) count too: a copy takes memory bandwidth on both sides.
"""

import heapq
from typing import Generic, Protocol, TypeVar

SHARE = 0.2  # of the requests that have tokens


class Ordered(Protocol):
    """A request, by its order of arrival."""

    @property
    def ordinal(self) -> int: ...


RequestT = TypeVar("RequestT", bound=Ordered)


class RecomputeBudget(Generic[RequestT]):
    """Invariant: at most max(1, SHARE of the running) are under way; each waits or is under way."""

    def __init__(self) -> None:
        self._running: set[RequestT] = set()  # that have tokens, wherever they stand
        self._under_way: set[RequestT] = set()
        self._moving: set[RequestT] = set()  # with their KV, so nothing is computed
        self._waiting: list[tuple[int, RequestT]] = []  # a heap

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def room(self) -> bool:
        """Whether one more may begin."""
        under_way = len(self._under_way) + len(self._moving)
        return under_way < max(1, int(SHARE * len(self._running)))

    def runs(self, request: RequestT) -> None:
        """It has tokens: its migration, if it was one, is over."""
        self._running.add(request)
        self._under_way.discard(request)

    def begun(self, request: RequestT) -> None:
        """A running request is computed again."""
        self._under_way.add(request)

    def stopped(self, request: RequestT) -> None:
        """That try is over, whatever came of it."""
        self._under_way.discard(request)

    def moves(self, request: RequestT) -> None:
        """It goes to another worker with its KV."""
        self._moving.add(request)

    def moved(self, request: RequestT) -> None:
        """That is over, whatever came of it."""
        self._moving.discard(request)

    def wait(self, request: RequestT) -> None:
        """It is to be computed again when there is room."""
        heapq.heappush(self._waiting, (request.ordinal, request))

    def take_waiting(self) -> list[RequestT]:
        """All that wait, the oldest first; the caller begins them or has them wait again."""
        waiting, self._waiting = sorted(self._waiting, key=lambda entry: entry[0]), []
        return [request for _, request in waiting]

    def forget(self, request: RequestT) -> None:
        """It has ended."""
        self._running.discard(request)
        self._under_way.discard(request)
        self._waiting = [entry for entry in self._waiting if entry[1] is not request]
        heapq.heapify(self._waiting)
