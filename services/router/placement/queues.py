"""Requests that wait for a worker: in order of arrival for each model. Pure."""

import heapq
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What is said of a request in line."""

    @property
    def ordinal(self) -> int:
        """Of its arrival, kept over retries."""

    @property
    def model(self) -> str:
        """Whose workers it waits for."""


R = TypeVar("R", bound=Waiting)


class Queues(Generic[R]):
    """One line per model."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[int, R]]] = {}  # heaps; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[R]:
        return (request for line in self._lines.values() for _, request in line)

    @property
    def models(self) -> list[str]:
        """Those somebody waits for."""
        return list(self._lines)

    def head(self, model: str) -> R | None:
        """The first in line."""
        line = self._lines.get(model)
        return line[0][1] if line else None

    def add(self, request: R) -> None:
        """It has the place of its arrival, however late it comes back."""
        heapq.heappush(self._lines.setdefault(request.model, []), (request.ordinal, request))

    def remove(self, request: R) -> None:
        """It no longer waits; without effect if it did not."""
        line = self._lines.get(request.model, [])
        entry = (request.ordinal, request)
        if line and line[0] == entry:
            heapq.heappop(line)
        elif entry in line:
            line.remove(entry)
            heapq.heapify(line)
        if not line:
            self._lines.pop(request.model, None)
