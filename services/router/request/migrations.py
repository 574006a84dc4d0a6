"""Chooses which running requests migrate to another decode worker with their KV.

A draining worker sends all its requests away, as far as other workers have room. A live worker
sends one away only while it preempts: each preemption frees blocks for one request by recomputing
another, over and over. So the criterion is not load, but a lasting lack of blocks at one worker
while another has some free. Each request runs its migration itself (migration_machine.py). Time is
an argument.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdserve.protos.fleet_pb2 import DECODE
from pdserve.services.router.fleet import Fleet, State, Worker
from pdserve.services.router.request.placer import Placer
from pdserve.services.router.request.request import RoutedRequest

WINDOW_S = 1.0
MIN_WINDOWS = 2  # in a row with preemptions, for each request that a worker sends away
MIN_REMAINING = 32  # tokens that a request may still generate; with fewer it is soon over
COPIED_PER_TOKEN = 64  # tokens whose KV is copied in about one decode step


@dataclass(frozen=True, slots=True)
class Running:
    """A running request that can migrate, with the facts by which requests are chosen."""

    ordinal: int  # order of arrival; unique
    num_tokens: int  # tokens whose KV would move
    remaining: int | None  # tokens that it may still generate; None: as many as fit


def drain_order(running: Iterable[Running]) -> list[Running]:
    """Sort the requests of a draining worker by urgency: those that may run longest first."""
    return sorted(running, key=lambda r: (r.remaining is not None, -(r.remaining or 0), r.ordinal))


def pays(request: Running) -> bool:
    """Return whether generating the rest of the request takes longer than its migration, so that
    migrating it is worthwhile."""
    remaining = request.remaining
    return remaining is None or (
        remaining >= MIN_REMAINING and remaining * COPIED_PER_TOKEN >= request.num_tokens
    )


def relief_order(running: Iterable[Running]) -> list[Running]:
    """Return the requests worth migrating away from a worker that lacks blocks, sorted: those with
    the most tokens first, then the youngest."""
    worthwhile = [r for r in running if pays(r)]
    return sorted(worthwhile, key=lambda r: (-r.num_tokens, -r.ordinal))


class Pressure:
    """Finds decode workers that lack blocks: they preempted requests in each of the last
    MIN_WINDOWS windows of WINDOW_S seconds."""

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}  # preemptions, by incarnation
        self._windows: dict[bytes, int] = {}  # windows in a row with more of them, by incarnation
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Return whether the current window is over, so that `look` has something to do."""
        return now >= self._next

    def look(self, preemptions: Mapping[bytes, int], now: float) -> list[bytes]:
        """End the current window if it is over. Returns the incarnations of the workers that should
        send a request away now, because they preempted in MIN_WINDOWS windows in a row.
        `preemptions`: total number of preemptions of each worker, by incarnation."""
        if not self.due(now):
            return []
        self._next = now + WINDOW_S
        pressed = []
        for incarnation, count in preemptions.items():
            more = count > self._seen.get(incarnation, count)
            self._windows[incarnation] = self._windows.get(incarnation, 0) + 1 if more else 0
            if self._windows[incarnation] >= MIN_WINDOWS:
                self._windows[incarnation] = 0
                pressed.append(incarnation)
        self._seen = dict(preemptions)
        self._windows = {incarnation: self._windows[incarnation] for incarnation in preemptions}
        return pressed

    def calm(self, incarnation: bytes) -> bool:
        """Return whether the worker preempted no request in the last window."""
        return not self._windows.get(incarnation)


class Migrations:
    """Begins the migrations of a router's requests and counts them."""

    def __init__(self, fleet: Fleet, placer: Placer) -> None:
        self.num_begun = 0
        self.num_done = 0
        self.failed: Counter[str] = Counter()  # by the step they reached
        self.num_bytes = 0
        self.num_tokens = 0  # tokens whose KV has moved
        self.num_under_way = 0
        self._fleet = fleet
        self._placer = placer
        self._pressure = Pressure()

    def tick(self, requests: Iterable[RoutedRequest], now: float) -> None:
        """Begin the migrations that are due among the given requests: those away from draining
        workers first, then those away from workers that lack blocks."""
        workers = [w for w in self._fleet.workers.values() if w.role == DECODE]
        draining = [w for w in workers if w.state is State.DRAINING and w.connected]
        if draining:
            self._empty(draining, requests, now)
        if self._pressure.due(now):
            preemptions = {w.incarnation: w.load.preemptions for w in workers}
            for incarnation in self._pressure.look(preemptions, now):
                self._relieve(incarnation, requests, now)

    def _relieve(self, incarnation: bytes, requests: Iterable[RoutedRequest], now: float) -> None:
        """Migrate one request away from a worker that preempts, to a worker with room for all
        tokens that the request has and may still generate."""
        candidates = {
            running(request): request
            for request in requests
            if request.state.attempt is not None
            and request.state.attempt.decode == incarnation
            and not request.state.num_failed_migrations
            and may_migrate(request, now)
        }
        for candidate in relief_order(candidates):
            target = self._placer.target_for(candidates[candidate], now)
            if target is None or not self._placer.budget.has_room:
                return
            has_room = target.facts.free_tokens >= candidate.num_tokens + (
                candidate.remaining or candidate.num_tokens
            )
            if has_room and self._pressure.calm(target.incarnation):
                candidates[candidate].migrate(target, now)
                return

    def _empty(self, draining: list[Worker], requests: Iterable[RoutedRequest], now: float) -> None:
        """Migrate the requests of draining workers, as far as other workers and the recompute
        budget have room."""
        candidates: dict[Running, RoutedRequest] = {}
        for request in requests:
            assignment = request.assignment
            leaves = assignment is not None and assignment.decode in draining
            if leaves and may_migrate(request, now):
                candidates[running(request)] = request
        for candidate in drain_order(candidates):
            if not self._placer.budget.has_room:
                return
            request = candidates[candidate]
            target = self._placer.target_for(request, now)
            if target is not None:
                request.migrate(target, now)

    def begun(self, request: RoutedRequest) -> None:
        """Count a migration of the request that has begun."""
        self.num_begun += 1
        self.num_under_way += 1
        self._placer.budget.migration_begun(request)

    def done(self, request: RoutedRequest, num_tokens: int) -> None:
        """Count a completed migration of the request, which moved the KV of `num_tokens` tokens."""
        self.num_done += 1
        self.num_tokens += num_tokens
        self._over(request)

    def failed_at(self, step: str, request: RoutedRequest) -> None:
        """Count a migration that did not complete. `step`: the step in which it failed; empty if
        the request left the source for another reason."""
        if step:
            self.failed[step] += 1
        self._over(request)

    def _over(self, request: RoutedRequest) -> None:
        self.num_under_way -= 1
        self._placer.budget.migration_over(request)


def may_migrate(request: RoutedRequest, now: float) -> bool:
    """Return whether the request may migrate now: it generates, and has exactly one unfinished
    choice, so that its KV is a single sequence."""
    progress = request.progress
    one_chain = progress.num_unfinished == 1 and progress.may_go_remote
    return one_chain and request.state.may_migrate(now)


def running(request: RoutedRequest) -> Running:
    """Return the facts about a running request by which requests are chosen to migrate."""
    progress = request.progress
    generated = sum(len(c.generated_ids) for c in progress.choices if not c.finish)
    max_tokens = progress.start.params.max_tokens
    remaining = max(0, max_tokens - generated) if max_tokens else None
    return Running(request.ordinal, len(progress.prompt_ids) + generated, remaining)
