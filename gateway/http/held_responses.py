"""Accounting of answers that are made but not yet taken by their clients, over all connections.

Beyond the bound, the key that holds most loses its oldest answer, with the connection; the answer
that needs the room is exempt. So a new answer is always sent, and slow clients of one key do not
cost another key's answers before their own.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_HELD_BYTES = 512 << 20


@dataclass(eq=False, slots=True)
class HeldAnswer:
    """One held answer; `dropped` has a result when its client is to lose it."""

    owner: bytes
    dropped: asyncio.Future[None]
    num_bytes: int = 0


class HeldAnswers:
    """The held answers of one server."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._answers: dict[HeldAnswer, None] = {}  # the oldest first
        self.total = 0

    @contextmanager
    def answer(self, owner: bytes) -> Iterator[HeldAnswer]:
        """Register an answer of a key, which holds nothing yet, for the block; then release it."""
        answer = HeldAnswer(owner, asyncio.get_running_loop().create_future())
        self._answers[answer] = None
        try:
            yield answer
        finally:
            self.release(answer, answer.num_bytes)
            del self._answers[answer]

    def hold(self, answer: HeldAnswer, num_bytes: int) -> None:
        """Count `num_bytes` more of the answer as made."""
        answer.num_bytes += num_bytes
        self.total += num_bytes
        while self.total > self._max_bytes:
            others = [other for other in self._answers if other.num_bytes and other is not answer]
            if not others:
                return
            bytes_by_owner: Counter[bytes] = Counter()
            for other in others:
                bytes_by_owner[other.owner] += other.num_bytes
            ((largest_owner, _),) = bytes_by_owner.most_common(1)
            oldest = next(other for other in others if other.owner == largest_owner)
            self.release(oldest, oldest.num_bytes)
            if not oldest.dropped.done():
                oldest.dropped.set_result(None)

    def release(self, answer: HeldAnswer, num_bytes: int) -> None:
        """Count `num_bytes` of the answer as taken."""
        freed = min(num_bytes, answer.num_bytes)  # nothing, once it is dropped
        answer.num_bytes -= freed
        self.total -= freed
