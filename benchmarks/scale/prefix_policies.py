"""Placements that the router's policy is compared with. Each knows the current state of the
workers exactly, without a router in between.

- Round robin.
- Least load: the fewest requests; among equals the fewest waiting prompt tokens.
- An oracle: it knows every cache and what is about to be in it. It picks the worker with the lowest
  sum of the real backlog and `work_ratio` times the uncached part of the prompt. The higher the
  ratio, the more hits, until queues form at the workers with large caches. With prefill workers it
  picks the idlest decode worker, unless one lacks too little for a hand-off.
"""

from collections.abc import Callable, Sequence
from itertools import count

from prefix_fleet import MIN_SHARED, PlacedRequest, SimulatedFleet
from prefix_trace import BLOCK_TOKENS, TraceRequest
from prefix_worker import SimulatedWorker

Pick = Callable[[Sequence[SimulatedWorker], TraceRequest], SimulatedWorker]


class DirectPlacement:
    """Admit requests where `pick_decode` says, with the prefill worker of `pick_prefill` if the
    uncached part of the prompt is worth a hand-off."""

    def __init__(self, fleet: SimulatedFleet, pick_decode: Pick, pick_prefill: Pick) -> None:
        self._fleet = fleet
        self._pick_decode = pick_decode
        self._pick_prefill = pick_prefill
        self._sides = {side.worker: side for side in fleet.decodes}

    def arrived(self, request: TraceRequest) -> None:
        fleet, prefill = self._fleet, None
        decode = self._pick_decode([side.worker for side in fleet.decodes], request)
        if fleet.prefills and missing(request, decode) >= MIN_SHARED:
            prefill = self._pick_prefill(fleet.prefills, request)
        self._sides[decode].admit(PlacedRequest(request, self._sides[decode], prefill, self))

    def admitted(self, placed: PlacedRequest, ticket: bool, follows: bool) -> None:
        if ticket:
            self._fleet.start_prefill(placed)

    def placed_again(self, placed: PlacedRequest, tokens: int) -> None:
        self.arrived(placed.request)

    def attached(self, placed: PlacedRequest) -> None:
        """Nothing to do."""

    def prefill_done(self, placed: PlacedRequest) -> None:
        """Nothing to do."""

    def first_token(self, placed: PlacedRequest) -> None:
        """Nothing to do."""

    def finished(self, placed: PlacedRequest) -> None:
        """Nothing to do."""


def missing(request: TraceRequest, worker: SimulatedWorker) -> int:
    """Prompt tokens that a worker will have to compute: neither cached nor in transfer."""
    return request.num_tokens - worker.num_expected(request.full_blocks) * BLOCK_TOKENS


def round_robin(fleet: SimulatedFleet) -> DirectPlacement:
    decodes, prefills = count(), count()

    def pick_decode(workers: Sequence[SimulatedWorker], request: TraceRequest) -> SimulatedWorker:
        return workers[next(decodes) % len(workers)]

    def pick_prefill(workers: Sequence[SimulatedWorker], request: TraceRequest) -> SimulatedWorker:
        return workers[next(prefills) % len(workers)]

    return DirectPlacement(fleet, pick_decode, pick_prefill)


def least_load(fleet: SimulatedFleet) -> DirectPlacement:
    def pick(workers: Sequence[SimulatedWorker], request: TraceRequest) -> SimulatedWorker:
        return min(workers, key=lambda w: (w.num_requests, w.waiting_tokens))

    return DirectPlacement(fleet, pick, pick)


def oracle(fleet: SimulatedFleet, work_ratio: int) -> DirectPlacement:
    def pick(workers: Sequence[SimulatedWorker], request: TraceRequest) -> SimulatedWorker:
        def cost(worker: SimulatedWorker) -> tuple[float, float]:
            ahead = worker.true_backlog + work_ratio * missing(request, worker)
            return ahead, worker.work.seconds

        return min(workers, key=cost)

    def pick_decode(workers: Sequence[SimulatedWorker], request: TraceRequest) -> SimulatedWorker:
        warm = [w for w in workers if missing(request, w) < MIN_SHARED]
        if fleet.prefills and not warm:
            return min(workers, key=lambda w: w.num_requests)
        return pick(warm if fleet.prefills else workers, request)

    return DirectPlacement(fleet, pick_decode, pick)
