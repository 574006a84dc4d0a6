"""Placements that the router's policy is compared with; each knows the workers' state exactly.

- Round robin and least load (the fewest requests; of equals the fewest prompt tokens that wait).
- The oracle of hits knows every cache, and what is about to be in it, at this instant. It takes the
  worker with the longest prefix among those whose work, with this prompt, stays within BOUND of the
  mean; of equals the one with the least backlog. So nobody who must place requests as they come has
  more hits under that bound, but for luck in what is evicted.
- The oracle of times takes the worker whose backlog and the rest of the prompt are the shortest.
"""

from collections.abc import Callable, Sequence
from itertools import count

from prefix_fleet import MIN_SHARED, DecodeWorker, PlacedRequest, SimulatedFleet
from prefix_trace import BLOCK_TOKENS, TraceRequest
from prefix_worker import SimulatedWorker

BOUND = 1.3  # of a worker's work to the mean
SLACK_S = 30.0  # of work beside that, so that the first requests have a choice

Choose = Callable[[TraceRequest], tuple[DecodeWorker, SimulatedWorker | None]]


class DirectPlacement:
    """Sends requests where `choose` says, without a router between."""

    def __init__(self, fleet: SimulatedFleet, choose: Choose) -> None:
        self._fleet = fleet
        self._choose = choose

    def arrived(self, request: TraceRequest) -> None:
        decode, prefill = self._choose(request)
        placed = PlacedRequest(request, decode, prefill, self)
        decode.admit(placed)

    def admitted(self, placed: PlacedRequest, ticket: bool, follows: bool) -> None:
        if ticket:
            self._fleet.start_prefill(placed)

    def attached(self, placed: PlacedRequest) -> None:
        pass

    def placed_again(self, placed: PlacedRequest, tokens: int) -> None:
        self.arrived(placed.request)

    def prefill_done(self, placed: PlacedRequest) -> None:
        pass

    def first_token(self, placed: PlacedRequest) -> None:
        pass

    def finished(self, placed: PlacedRequest) -> None:
        pass


def missing(request: TraceRequest, worker: SimulatedWorker) -> int:
    """Prompt tokens that a worker will have to compute: not in its cache, nor on their way."""
    known = 0
    for block in request.full_blocks:
        if block not in worker.cache and worker.coming[block] <= 0:
            break
        known += 1
    return request.num_tokens - known * BLOCK_TOKENS


def _with_prefill(
    fleet: SimulatedFleet, request: TraceRequest, decode: DecodeWorker, pick: Callable[[], int]
) -> tuple[DecodeWorker, SimulatedWorker | None]:
    """A prefill worker too, if there are any and the rest of the prompt is worth a hand-off."""
    if not fleet.prefills or missing(request, decode.worker) < MIN_SHARED:
        return decode, None
    return decode, fleet.prefills[pick()]


def round_robin(fleet: SimulatedFleet) -> DirectPlacement:
    decodes, prefills = count(), count()

    def choose(request: TraceRequest) -> tuple[DecodeWorker, SimulatedWorker | None]:
        decode = fleet.decodes[next(decodes) % len(fleet.decodes)]
        pick = lambda: next(prefills) % len(fleet.prefills)  # noqa: E731
        return _with_prefill(fleet, request, decode, pick)

    return DirectPlacement(fleet, choose)


def least_load(fleet: SimulatedFleet) -> DirectPlacement:
    def load(worker: SimulatedWorker, claims: int = 0) -> tuple[int, int]:
        return worker.num_running + worker.num_waiting + claims, worker.waiting_tokens

    def choose(request: TraceRequest) -> tuple[DecodeWorker, SimulatedWorker | None]:
        decode = min(fleet.decodes, key=lambda d: load(d.worker, d.num_claims))
        pick = lambda: _least([load(w) for w in fleet.prefills])  # noqa: E731
        return _with_prefill(fleet, request, decode, pick)

    return DirectPlacement(fleet, choose)


def oracle_of_hits(fleet: SimulatedFleet) -> DirectPlacement:
    speed = fleet.shape.speed
    promised = dict.fromkeys([*(d.worker for d in fleet.decodes), *fleet.prefills], 0.0)

    def best(workers: Sequence[SimulatedWorker], request: TraceRequest) -> int:
        works = [promised[w] for w in workers]
        costs = [missing(request, w) / speed.prefill_tokens_s for w in workers]
        bound = BOUND * sum(works) / len(works) + SLACK_S
        able = [n for n, work in enumerate(works) if work + costs[n] <= bound] or [
            _least(works)
        ]
        return min(able, key=lambda n: (costs[n], workers[n].true_backlog, works[n]))

    def choose(request: TraceRequest) -> tuple[DecodeWorker, SimulatedWorker | None]:
        workers = [d.worker for d in fleet.decodes]
        decode = fleet.decodes[best(workers, request)]
        found = _with_prefill(fleet, request, decode, lambda: best(fleet.prefills, request))
        computes = found[1] or decode.worker
        promised[computes] += missing(request, computes) / speed.prefill_tokens_s
        promised[decode.worker] += request.output_len * speed.row_s
        return found

    return DirectPlacement(fleet, choose)


def oracle_of_times(fleet: SimulatedFleet) -> DirectPlacement:
    def time(worker: SimulatedWorker, request: TraceRequest) -> tuple[int, int]:
        return worker.true_backlog + missing(request, worker), worker.num_running

    def choose(request: TraceRequest) -> tuple[DecodeWorker, SimulatedWorker | None]:
        decode = min(fleet.decodes, key=lambda d: time(d.worker, request))
        pick = lambda: _least([time(w, request) for w in fleet.prefills])  # noqa: E731
        return _with_prefill(fleet, request, decode, pick)

    return DirectPlacement(fleet, choose)


def _least(values: Sequence[object]) -> int:
    return min(range(len(values)), key=values.__getitem__)  # type: ignore[type-var,arg-type]
