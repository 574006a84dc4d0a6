"""Requests that wait for a worker, each for one reason, in order of arrival; pure."""

import heapq
from collections.abc import Iterator
from enum import Enum
from typing import Generic, Protocol, TypeVar


class WaitReason(Enum):
    """Why a request waits."""

    TURN = "turn"  # every worker of its model is busy, or others came before it
    BUDGET = "budget"  # it has generated already, and too many are being computed again now
    COMPATIBLE_WORKER = "compatible worker"  # none may go on with what it has generated


class WaitingRequest(Protocol):
    """What the queue needs to know of a request."""

    @property
    def ordinal(self) -> int:
        """Of its arrival, kept over retries; unique."""

    @property
    def model(self) -> str:
        """Whose workers it waits for."""


R = TypeVar("R", bound=WaitingRequest)
_Line = tuple[WaitReason, str]  # why, and for which model


class WaitingQueue(Generic[R]):
    """One line for each reason and model. A request is in at most one of them."""

    def __init__(self) -> None:
        self._lines: dict[_Line, list[tuple[int, R]]] = {}  # heaps; none is empty
        self._since: dict[R, tuple[WaitReason, float]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[R]:
        return iter(self._since)

    def num(self, reason: WaitReason) -> int:
        """How many wait for that reason."""
        return sum(len(line) for (why, _), line in self._lines.items() if why is reason)

    @property
    def models(self) -> list[str]:
        """Models whose turn somebody waits for."""
        return [model for why, model in self._lines if why is WaitReason.TURN]

    def head(self, model: str) -> R | None:
        """The request whose turn is next."""
        line = self._lines.get((WaitReason.TURN, model))
        return line[0][1] if line else None

    def of(self, reason: WaitReason) -> list[R]:
        """All that wait for that reason, the oldest first."""
        lines = [line for (why, _), line in self._lines.items() if why is reason]
        return [request for _, request in sorted(entry for line in lines for entry in line)]

    def since(self, request: R) -> float:
        """When it began to wait."""
        return self._since[request][1]

    def add(self, request: R, reason: WaitReason, now: float) -> None:
        """Let it wait. It has the place of its arrival, however late it comes back."""
        self.remove(request)
        line = self._lines.setdefault((reason, request.model), [])
        heapq.heappush(line, (request.ordinal, request))
        self._since[request] = reason, now

    def remove(self, request: R) -> None:
        """It no longer waits; without effect if it did not."""
        found = self._since.pop(request, None)
        if found is None:
            return
        key = found[0], request.model
        line = self._lines[key]
        entry = (request.ordinal, request)
        if line[0] == entry:
            heapq.heappop(line)
        else:
            line.remove(entry)
            heapq.heapify(line)
        if not line:
            del self._lines[key]
