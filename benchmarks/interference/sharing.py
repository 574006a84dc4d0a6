"""A model of requests that share a worker, to find the rate at which a given number is in flight.
Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STEPS = 40  # of bisection


@dataclass(frozen=True, slots=True)
class Sharing:
    """A request takes a + b n seconds among n; all get equal shares."""

    a: float
    b: float

    @classmethod
    def of(cls, measured: Sequence[tuple[int, float]]) -> "Sharing":
        """Fit `measured`: (requests always in flight, requests per second) twice. Raises
        RuntimeError if a request does not take longer among more."""
        (few, few_s), (many, many_s) = ((n, n / rate) for n, rate in measured)
        b = (many_s - few_s) / (many - few)
        if b <= 0:
            text = f"{few_s:.2f} s among {few} and {many_s:.2f} s among {many} requests"
            raise RuntimeError(text)
        return cls(max(0.0, few_s - b * few), b)

    def in_flight(self, arrivals: Sequence[float], seconds: float) -> float:
        """The mean number in flight over `seconds` for these ordered arrival times; requests left
        at the end are served to completion and counted."""
        waiting = deque(arrivals)
        ends: deque[float] = deque()  # cumulative service at which each request ends, in order
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
        """Requests per second that keep `wanted` in flight on average, where `arrivals(rate)` are
        the arrival times."""
        low, high = 0.0, 2.0 / self.b
        for _ in range(STEPS):
            rate = (low + high) / 2
            if self.in_flight(arrivals(rate), seconds) < wanted:
                low = rate
            else:
                high = rate
        return (low + high) / 2

    def seen(self, there: float, arrivals: Sequence[float], seconds: float) -> "Sharing":
        """The same model, faster or slower, so that these arrivals have `there` in flight."""
        low, high = 0.25, 4.0
        for _ in range(STEPS):
            factor = (low * high) ** 0.5
            if Sharing(self.a * factor, self.b * factor).in_flight(arrivals, seconds) < there:
                low = factor
            else:
                high = factor
        return Sharing(self.a * low, self.b * low)
