"""Requests that share a worker, in time; for the rate at which so many are in flight. Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STEPS = 40  # of halving


@dataclass(frozen=True, slots=True)
class Sharing:
    """A request takes a + b n seconds among n; all are served alike."""

    a: float
    b: float

    @classmethod
    def of(cls, measured: Sequence[tuple[int, float]]) -> "Sharing":
        """`measured`: (requests always in flight, requests a second) twice. Raises RuntimeError if
        a request does not take longer among more."""
        (few, few_s), (many, many_s) = ((n, n / rate) for n, rate in measured)
        b = (many_s - few_s) / (many - few)
        if b <= 0:
            text = f"{few_s:.2f} s among {few} and {many_s:.2f} s among {many} requests"
            raise RuntimeError(text)
        return cls(max(0.0, few_s - b * few), b)

    def in_flight(self, arrivals: Sequence[float], seconds: float) -> float:
        """How many are there, on the mean of `seconds`, if they come at these times, in order; what
        is left then is served to its end and counted."""
        waiting = deque(arrivals)
        ends: deque[float] = deque()  # in service received by each since the start, in order
        now = served = total = 0.0
        while waiting or ends:
            pace = self.a + self.b * len(ends)
            leaves = now + (ends[0] - served) * pace if ends else float("inf")
            comes = waiting[0] if waiting else float("inf")
            then = min(leaves, comes)
            total += len(ends) * (then - now)
            if ends:
                served += (then - now) / pace
            now = then
            if comes <= leaves:
                waiting.popleft()
                ends.append(served + 1.0)
            else:
                served = ends.popleft()
        return total / seconds

    def rate_for(
        self, wanted: float, arrivals: Callable[[float], Sequence[float]], seconds: float
    ) -> float:
        """Requests a second that keep `wanted` in flight on the mean, if `arrivals(rate)` are when
        they come."""
        low, high = 0.0, 2.0 / self.b
        for _ in range(STEPS):
            rate = (low + high) / 2
            if self.in_flight(arrivals(rate), seconds) < wanted:
                low = rate
            else:
                high = rate
        return (low + high) / 2

    def seen(self, there: float, arrivals: Sequence[float], seconds: float) -> "Sharing":
        """The same, faster or slower, so that these arrivals have `there` in flight."""
        low, high = 0.25, 4.0
        for _ in range(STEPS):
            factor = (low * high) ** 0.5
            if Sharing(self.a * factor, self.b * factor).in_flight(arrivals, seconds) < there:
                low = factor
            else:
                high = factor
        return Sharing(self.a * low, self.b * low)
