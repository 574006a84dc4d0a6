"""Runs the flights of a decode worker (flights.py) on its engine thread.

Followers are requests that the engine does not know yet. When the KV that one waits for is there it
is submitted like any other and finds the blocks by ordinary prefix matching; when its wait was in
vain, or when what is left is worth a hand-off of its own, whoever admitted it is told `again`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.engine.api.errors import QueueFull
from pdserve.engine.api.request import (
    Evicted,
    Finished,
    PrefillComputed,
    Request,
    RequestFailed,
    Scheduled,
    Step,
    prefix_ids,
)
from pdserve.engine.engine import Engine
from pdserve.engine.handoff.recorder.event_log import EventLog
from pdserve.services.decode.single_flight.promised_prefixes import Common, PromisedPrefixes

LOST = "what it waited for is lost"
TAIL = "the rest is worth a hand-off"


@dataclass(slots=True)
class SingleFlightStats:
    """Counters since the start."""

    attached: int = 0
    placed_again: int = 0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What a router says of an admission."""

    min_tokens: int = 0  # missing ones worth waiting for, and a tail worth a hand-off; 0: none is
    local: bool = True  # decode computes it itself if it does not wait
    leads: bool = True  # its KV will be of decode's own identity


@dataclass(slots=True)
class _Waiting:
    request: Request
    chain: Sequence[bytes]
    sharing: SharedPrefix
    parked: bool = False
    cancelled: set[int] = field(default_factory=set)  # choices


class SingleFlight:
    """`attached(attempt)` and `again(attempt, tokens cached, reason)` are called in `poll`."""

    def __init__(
        self,
        engine: Engine,
        attached: Callable[[bytes], None],
        again: Callable[[bytes, int, str], None],
        trace: EventLog,
    ) -> None:
        self.figures = SingleFlightStats()
        self._engine = engine
        self._size = engine.kv.spec.block_size
        self._attached = attached
        self._again = again
        self._trace = trace
        self._flights = PromisedPrefixes()
        self._waiting: dict[str, _Waiting] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def follows(self, request: Request, chain: Sequence[bytes], sharing: SharedPrefix) -> bool:
        """Whether it waits for the KV of others from now on. Raises what Engine.submit raises."""
        common = self._worth(request, chain, sharing)
        if common is None:
            return False
        self._engine.limits.check(request)
        if len(self._waiting) >= self._engine.limits.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests follow others")
        self._waiting[request.key] = _Waiting(request, chain, sharing)
        self._flights.follow(request.key, chain, common)
        attempt, leader = bytes.fromhex(request.key), bytes.fromhex(common.leader)
        self._trace.follow(attempt, common.blocks, leader)
        return True

    def leads(self, request: Request, chain: Sequence[bytes], sharing: SharedPrefix) -> None:
        """Its KV is on its way."""
        if chain and sharing.leads:
            self._flights.lead(request.key, chain, sharing.local)

    def arrived(self, attempt: bytes, num_tokens: int, landed: bool = False) -> None:
        """KV of its first tokens is in the prefix cache; `landed`: its hand-off is complete."""
        self._flights.arrived(attempt.hex(), num_tokens // self._size, landed)

    def over(self, attempt: bytes) -> None:
        """Its hand-off is lost."""
        self._flights.over(attempt.hex())

    def cancel(self, attempt: bytes, choices: Sequence[int]) -> bool:
        """End a follower, or some of its choices once it is attached; False: it does not follow."""
        waiting = self._waiting.get(attempt.hex())
        if waiting is None:
            return False
        waiting.cancelled.update(choices)
        if not choices:
            self._flights.over(attempt.hex())
            self._leave(attempt.hex(), "cancelled")
        return True

    def park(self, attempt: bytes, parked: bool) -> bool:
        """No steps, or steps again, for a follower too. False: it does not follow."""
        waiting = self._waiting.get(attempt.hex())
        if waiting is not None:
            waiting.parked = parked
        self._flights.park(attempt.hex(), parked)
        return waiting is not None

    def first(self, attempt: bytes) -> bytes:
        """Whose KV a follower waits for in the end; of any other attempt: itself."""
        key = attempt.hex()
        while (leader := self._flights.leader_of(key)) is not None:
            key = leader
        return bytes.fromhex(key)

    def is_queued(self, attempt: bytes) -> bool:
        """A leader that the engine has, and has not begun."""
        return self._flights.is_queued(attempt.hex())

    def on_step(self, step: Step) -> bool:
        """What the engine has done for leaders; True: a poll has something to do."""
        flights = self._flights
        for event in step.events:
            match event:
                case Scheduled(key, _):
                    flights.begun(key)
                case PrefillComputed(key, num_tokens, done):
                    flights.arrived(key, num_tokens // self._size)
                    if done:
                        flights.over(key)
                case Finished(key, _) | RequestFailed(key, _) | Evicted(key):
                    flights.over(key)
                case _:
                    pass
        return flights.changed

    def poll(self) -> None:
        """Between steps: attach whom it is time for, and give the others back."""
        while self._flights.changed:
            landing = self._flights.take()
            for key in landing.ready:
                self._attach(key)
            for key in landing.lost:
                self._give_back(key, LOST)

    def _worth(
        self, request: Request, chain: Sequence[bytes], sharing: SharedPrefix
    ) -> Common | None:
        """Whom to wait for: it must save as much as a hand-off has to, and half of the work."""
        if not sharing.min_tokens or request.params.prompt_logprobs is not None:
            return None
        found = self._engine.num_found(chain)
        common = self._flights.common(chain, found)
        if common is None:
            return None
        needed = len(prefix_ids(request)) - 1
        there = min(needed, found * self._size)
        shared = min(needed, common.blocks * self._size) - there
        enough = shared >= self._least(sharing) and 2 * shared >= needed - there
        return common if enough else None

    def _least(self, sharing: SharedPrefix) -> int:
        """Less than a block is never sent for its own sake."""
        return max(sharing.min_tokens, self._size)

    def _attach(self, key: str) -> None:
        """It goes on like any request whose prefix is cached."""
        waiting = self._waiting[key]
        left = len(prefix_ids(waiting.request)) - 1 - self._num_found(waiting)
        if left >= self._least(waiting.sharing) and not waiting.sharing.local:
            self._give_back(key, TAIL)
            return
        try:
            self._engine.submit(waiting.request)
        except QueueFull as full:
            self._give_back(key, str(full))
            return
        self._leave(key, "attached")
        if waiting.cancelled:
            self._engine.abort(key, sorted(waiting.cancelled))
        if waiting.parked:
            self._engine.park(key)
        self.figures.attached += 1
        self._attached(bytes.fromhex(key))

    def _give_back(self, key: str, reason: str) -> None:
        tokens = self._num_found(self._waiting[key])
        self._flights.over(key)
        self._leave(key, reason)
        self.figures.placed_again += 1
        self._again(bytes.fromhex(key), tokens, reason)

    def _num_found(self, waiting: _Waiting) -> int:
        return self._engine.num_found(waiting.chain) * self._size

    def _leave(self, key: str, reason: str) -> None:
        del self._waiting[key]
        self._trace.unfollow(bytes.fromhex(key), reason)
