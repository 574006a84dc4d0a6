"""Shares resources fairly between owners (clients): a queue and a semaphore that serve owners in
turn, and a bounded resource of which each owner has a share.

No owner waits for everything that another has queued, or is refused because of what another holds.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Generic, TypeVar

from pdserve.protos.common_pb2 import OVERLOADED
from pdserve.services.common.errors import ServiceError

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue that serves its owners in turn, one item each; the items of one owner keep their
    order."""

    def __init__(self) -> None:
        self._queues: dict[bytes, deque[T]] = {}  # the next owner first; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, owner: bytes, item: T) -> None:
        self._queues.setdefault(owner, deque()).append(item)

    def pop(self) -> T:
        """Remove and return the oldest item of the owner whose turn it is. Raises KeyError if the
        queue is empty."""
        if not self._queues:
            raise KeyError("cannot take an item: the queue is empty")
        owner = next(iter(self._queues))
        queue = self._queues.pop(owner)
        item = queue.popleft()
        if queue:
            self._queues[owner] = queue
        return item


class FairShare:
    """Counts how much of a bounded resource each owner holds, and decides who may take more.

    Once the bound is reached, an owner gets more only while it holds less than its share: the bound
    divided by the number of owners. So an owner that takes all it can get is itself refused, and
    the others are not. A 64th of the bound is available to every owner, whatever the others hold.
    The total is at most twice the bound, plus a 64th of the bound for each owner that arrives once
    it is reached.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[bytes, int] = {}  # none is 0
        self.total = 0

    def has_room(self, owner: bytes, amount: int = 1) -> bool:
        """Return whether the owner may take `amount` more of the resource."""
        if self.total + amount <= self._limit:
            return True
        owner_amount = self._held.get(owner, 0)
        owners = len(self._held) + (owner not in self._held)
        share = self._limit // owners
        within_share = owner_amount + amount <= share and self.total + amount <= 2 * self._limit
        return within_share or owner_amount + amount <= self._limit // 64

    @contextmanager
    def holding(self, owner: bytes, amount: int, resource: str) -> Iterator[None]:
        """A context in which the owner holds `amount` of the resource. Raises ServiceError
        OVERLOADED, whose text names `resource`, if the owner may not take that much."""
        if not self.has_room(owner, amount):
            raise ServiceError(OVERLOADED, f"too many {resource} at once", retry_after_s=1.0)
        self.take(owner, amount)
        try:
            yield
        finally:
            self.give_back(owner, amount)

    def take(self, owner: bytes, amount: int = 1) -> None:
        if amount:
            self._held[owner] = self._held.get(owner, 0) + amount
        self.total += amount

    def give_back(self, owner: bytes, amount: int = 1) -> None:
        remaining = self._held.pop(owner, 0) - amount
        if remaining:
            self._held[owner] = remaining
        self.total -= amount


class FairSemaphore:
    """A semaphore for at most `capacity` holders at once; owners with waiting tasks are served in
    turn."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def turn(self, owner: bytes) -> AsyncIterator[None]:
        """A context manager that waits until the owner may run, and holds the semaphore during the
        block."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(owner)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: bytes) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(owner, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came at the same time
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
