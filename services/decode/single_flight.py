"""Lets a request wait for KV that is being computed or received for another request with the same
beginning; runs on the engine thread.

This is single flight: of prompts with a common prefix, one is computed and the others share it.

A *leader* is an attempt whose prompt's KV is not complete yet: a hand-off, or a local prefill at
decode. It promises the chain hashes of its full blocks. A *follower* waits until the blocks that it
shares with one leader have arrived. It holds no blocks meanwhile, and it is itself a leader for its
blocks beyond the shared ones:

    follow() --the blocks arrive----------------------------> take(): ready, still a leader
        |    --its leader ends with one block or less missing-> take(): ready
        |    --its leader ends before that-------------------> take(): lost
        +----over()------------------------------------------> forgotten

A leader that is parked (its router is lost) makes no progress. Followers that are parked too keep
waiting for it; for the other followers it has ended. Invariant: a leader began before its
followers, so there is no cycle, and the end of a leader ends all its followers in one `take`.

The engine does not know a follower while it waits. When the KV has arrived, the follower is
submitted like any other request and finds the blocks by prefix matching. When the KV is lost, or
when the rest of the follower's prompt is worth a separate hand-off, the router must place it again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.engine.api import (
    Evicted,
    Finished,
    NewTokens,
    PrefillComputed,
    QueueFull,
    Request,
    RequestFailed,
    Scheduled,
    Step,
    prefix_ids,
)
from pdserve.engine.engine import Engine
from pdserve.engine.handoff.recorder import EventLog

LOST = "the KV that the request waited for was lost"
TAIL = "the rest of the prompt is long enough for a prefill worker"


@dataclass(eq=False, slots=True)
class _Leader:
    key: str
    chain: Sequence[bytes]
    priority: int = 0
    arrived: int = 0  # leading blocks in the prefix cache
    in_engine: bool = False  # the engine has it, so its KV grows only with its steps
    parked: bool = False  # it has no steps
    begun: bool = False  # the engine has picked it from its queue
    over: bool = False  # no more blocks will arrive

    @property
    def stuck(self) -> bool:
        """Whether the leader's KV does not grow at present, because the leader has ended or is
        parked in the engine."""
        return self.over or (self.parked and self.in_engine)


@dataclass(eq=False, slots=True)
class _Follower:
    promise: _Leader  # of the follower itself, for the blocks beyond the shared ones
    leader: _Leader
    until: int  # number of the leader's blocks to wait for


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """The first blocks of a prompt that a leader's prompt also has, so that the KV can be shared. A
    leader is an attempt whose prompt's KV is being computed or received."""

    leader: str  # the leader's key
    blocks: int  # length of the prefix, including blocks that have arrived


@dataclass(frozen=True, slots=True)
class EndedWaits:
    """Keys of the followers whose wait for a leader's KV has ended, in order of arrival: `ready`
    ones may run, `lost` ones did not get the KV."""

    ready: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class PromisedPrefixes:
    """The leaders of one decode worker, whose prompts' KV is being computed or received, and the
    followers, which wait for it; by their keys."""

    def __init__(self) -> None:
        self._leaders: dict[str, _Leader] = {}  # including followers
        self._followers: dict[str, _Follower] = {}  # in order of arrival
        self._promised: dict[bytes, dict[_Leader, None]] = {}  # by hash, the oldest leader first
        self._changed = False

    @property
    def num_following(self) -> int:
        return len(self._followers)

    @property
    def num_leaders(self) -> int:
        """Number of attempts whose prompts' KV is not complete yet, including followers."""
        return len(self._leaders)

    @property
    def changed(self) -> bool:
        """Whether leaders have changed since the last `take`, so that it may return followers."""
        return self._changed and bool(self._followers)

    def find(
        self, chain: Sequence[bytes], num_cached: int, priority: int = 0
    ) -> SharedBlocks | None:
        """Return the longest beginning of a prompt's block chain whose KV a leader is computing or
        receiving; None if it is not longer than the first `num_cached` blocks, which are cached.
        Leaders with a higher priority value than `priority` are excluded, since other requests may
        overtake them for long."""
        best: SharedBlocks | None = None
        for index in range(num_cached, len(chain)):
            promisers = self._promised.get(chain[index], ())
            candidates = (p for p in promisers if not p.stuck and p.priority <= priority)
            leader = next(candidates, None)
            if leader is None:
                break
            if leader.arrived <= index:
                best = SharedBlocks(leader.key, index + 1)
        return best

    def lead(self, key: str, chain: Sequence[bytes], in_engine: bool, priority: int = 0) -> None:
        """Add a leader: an attempt whose prompt has this block chain, and whose KV others may wait
        for. `in_engine`: whether decode's own engine computes the KV."""
        leader = self._leaders[key] = _Leader(key, chain, priority, in_engine=in_engine)
        for link in chain:
            self._promised.setdefault(link, {})[leader] = None

    def follow(
        self, key: str, chain: Sequence[bytes], shared: SharedBlocks, priority: int = 0
    ) -> None:
        """Add a follower: an attempt that waits for the blocks that it shares with a leader, and is
        itself a leader for the rest of its block chain."""
        leader = self._leaders[shared.leader]
        self.lead(key, chain, in_engine=False, priority=priority)
        self._followers[key] = _Follower(self._leaders[key], leader, shared.blocks)

    def leader_of(self, key: str) -> str | None:
        """Return the key of the leader that the follower `key` waits for; None if `key` is not a
        follower."""
        follower = self._followers.get(key)
        return None if follower is None else follower.leader.key

    def is_queued(self, key: str) -> bool:
        """Return whether `key` is a leader that waits in the engine's queue."""
        leader = self._leaders.get(key)
        return leader is not None and leader.in_engine and not leader.begun

    def begun(self, key: str) -> None:
        """Record that the engine has picked a leader from its queue and computes it; no effect if
        `key` is not a leader."""
        if (leader := self._leaders.get(key)) is not None:
            leader.begun = True

    def arrived(self, key: str, blocks: int, in_engine: bool = False) -> None:
        """Record that the first `blocks` blocks of a leader are in the prefix cache. `in_engine`:
        whether the engine has the leader now."""
        if (leader := self._leaders.get(key)) is not None:
            leader.arrived = max(leader.arrived, blocks)
            leader.in_engine |= in_engine
            self._changed = True

    def park(self, key: str, parked: bool) -> None:
        """Record that the steps of a leader or follower have stopped (`parked`) or continue."""
        if (leader := self._leaders.get(key)) is not None:
            leader.parked = parked
            self._changed = True

    def over(self, key: str) -> None:
        """Remove a leader or follower whose KV is complete, lost or cancelled."""
        leader = self._leaders.pop(key, None)
        if leader is None:
            return
        leader.over = self._changed = True
        self._followers.pop(key, None)
        for link in leader.chain:
            promisers = self._promised[link]
            del promisers[leader]
            if not promisers:
                del self._promised[link]

    def take(self) -> EndedWaits:
        """Return the followers whose wait has ended. Followers that are ready can go to the engine;
        each remains a leader of the blocks that the engine then computes for it, so that other
        requests may wait for them. Followers whose leader ended too early are lost and are
        removed."""
        ended = EndedWaits()
        self._changed = False
        for key, follower in list(self._followers.items()):
            leader, promise = follower.leader, follower.promise
            missing = follower.until - leader.arrived
            stranded = leader.over or (leader.stuck and not promise.parked)
            if missing <= 0 or (stranded and missing == 1):
                del self._followers[key]
                promise.in_engine = True
                ended.ready.append(key)
            elif stranded:
                self.over(key)
                ended.lost.append(key)
        self._changed = False
        return ended


@dataclass(slots=True)
class SingleFlightStats:
    """Counters of followers since the start: attached ones, whose KV arrived, and ones that the
    router must place again."""

    attached: int = 0
    placed_again: int = 0


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """Whether an attempt may wait for the KV of other attempts, and others for its KV, according to
    its Admit."""

    min_tokens: int = 0  # missing tokens worth a wait or a hand-off; 0: do not wait
    local: bool = True  # if it does not wait, decode computes the prompt itself
    leads: bool = True  # others may wait for its KV, whose identity will be decode's


@dataclass(slots=True)
class _Waiting:
    request: Request
    chain: Sequence[bytes]
    sharing: SharingPolicy
    parked: bool = False
    cancelled: set[int] = field(default_factory=set)  # choices to abort once attached


class SingleFlight:
    """The attempts of one decode worker that wait for KV of other attempts (followers).

    `poll` calls `attached(attempt)` when a follower's KV has arrived and the engine has the
    follower, and `place_again(attempt, cached tokens, reason)` when the follower cannot continue
    here.
    """

    def __init__(
        self,
        engine: Engine,
        attached: Callable[[bytes], None],
        place_again: Callable[[bytes, int, str], None],
        event_log: EventLog,
    ) -> None:
        self.figures = SingleFlightStats()
        self._engine = engine
        self._size = engine.kv.spec.block_size
        self._attached = attached
        self._place_again = place_again
        self._event_log = event_log
        self._prefixes = PromisedPrefixes()
        self._waiting: dict[str, _Waiting] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_leaders(self) -> int:
        return self._prefixes.num_leaders

    def follows(self, request: Request, chain: Sequence[bytes], sharing: SharingPolicy) -> bool:
        """Let the request wait for another attempt's KV if that saves enough tokens. Returns
        whether the request waits; raises the errors of Engine.submit."""
        shared = self._shared_blocks(request, chain, sharing)
        if shared is None:
            return False
        self._engine.limits.check(request)
        if len(self._waiting) >= self._engine.limits.max_waiting:
            raise QueueFull(
                f"{len(self._waiting)} requests already wait for the KV of other requests, and at "
                f"most {self._engine.limits.max_waiting} may"
            )
        self._waiting[request.key] = _Waiting(request, chain, sharing)
        self._prefixes.follow(request.key, chain, shared, request.priority)
        attempt, leader = bytes.fromhex(request.key), bytes.fromhex(shared.leader)
        self._event_log.follow(attempt, shared.blocks, leader)
        return True

    def leads(self, request: Request, chain: Sequence[bytes], sharing: SharingPolicy) -> None:
        """Record that the request's KV is being computed or received, so that other requests may
        wait for it."""
        if chain and sharing.leads:
            self._prefixes.lead(request.key, chain, sharing.local, request.priority)

    def arrived(self, attempt: bytes, num_tokens: int, in_engine: bool = False) -> None:
        """Record that the KV of the attempt's first `num_tokens` tokens is in the prefix cache.
        `in_engine`: whether the hand-off of its KV is complete."""
        self._prefixes.arrived(attempt.hex(), num_tokens // self._size, in_engine)

    def over(self, attempt: bytes) -> None:
        """Record that the hand-off of the attempt's KV is lost, so that no other attempt waits for
        it."""
        self._prefixes.over(attempt.hex())

    def cancel(self, attempt: bytes, choices: Sequence[int]) -> bool:
        """End a follower (an attempt that waits for another's KV), or only some of its choices once
        the engine has it. Returns False if the attempt is not a follower."""
        waiting = self._waiting.get(attempt.hex())
        if waiting is None:
            return False
        waiting.cancelled.update(choices)
        if not choices:
            self._prefixes.over(attempt.hex())
            self._leave(attempt.hex(), "cancelled")
        return True

    def park(self, attempt: bytes, parked: bool) -> bool:
        """Stop the attempt's steps (`parked`), or let them continue. Returns False if the attempt
        is not a follower, so that the engine or the Receiver must stop it."""
        waiting = self._waiting.get(attempt.hex())
        if waiting is not None:
            waiting.parked = parked
        self._prefixes.park(attempt.hex(), parked)
        return waiting is not None

    def first(self, attempt: bytes) -> bytes:
        """Return the attempt for which a follower waits in the end: the head of a chain in which
        each attempt waits for the next one's KV. Returns the attempt itself if it is not a
        follower."""
        key = attempt.hex()
        while (leader := self._prefixes.leader_of(key)) is not None:
            key = leader
        return bytes.fromhex(key)

    def is_queued(self, attempt: bytes) -> bool:
        """Return whether the attempt is a leader that waits in the engine's queue."""
        return self._prefixes.is_queued(attempt.hex())

    def on_step(self, step: Step) -> bool:
        """Record what a step of the engine computed for leaders, and which of them ended. Returns
        whether `poll` has work."""
        prefixes = self._prefixes
        for event in step.events:
            match event:
                case NewTokens():  # first, since most events are these
                    pass
                case Scheduled(key, _):
                    prefixes.begun(key)
                case PrefillComputed(key, num_tokens, done):
                    prefixes.arrived(key, num_tokens // self._size)
                    if done:
                        prefixes.over(key)
                case Finished(key, _) | RequestFailed(key, _) | Evicted(key):
                    prefixes.over(key)
                case _:
                    pass
        return prefixes.changed

    def poll(self) -> None:
        """Submit the followers whose KV has arrived to the engine, and return those whose KV is
        lost to the router. Called between steps."""
        while self._prefixes.changed:
            ended = self._prefixes.take()
            for key in ended.ready:
                self._attach(key)
            for key in ended.lost:
                self._give_back(key, LOST)

    def _shared_blocks(
        self, request: Request, chain: Sequence[bytes], sharing: SharingPolicy
    ) -> SharedBlocks | None:
        """Return the blocks of a leader for which the request should wait, or None. Waiting must
        save as many tokens as are worth a hand-off, and at least half of the request's missing
        ones."""
        if not sharing.min_tokens or request.needs_whole_prompt:
            return None
        num_cached = self._engine.num_found(chain)
        shared = self._prefixes.find(chain, num_cached, request.priority)
        if shared is None:
            return None
        prompt_tokens = len(prefix_ids(request)) - 1
        cached_tokens = min(prompt_tokens, num_cached * self._size)
        saved_tokens = min(prompt_tokens, shared.blocks * self._size) - cached_tokens
        enough = (
            saved_tokens >= self._min_tokens(sharing)
            and 2 * saved_tokens >= prompt_tokens - cached_tokens
        )
        return shared if enough else None

    def _min_tokens(self, sharing: SharingPolicy) -> int:
        """Return the minimum number of tokens that are worth a wait or a hand-off; at least one
        block."""
        return max(sharing.min_tokens, self._size)

    def _attach(self, key: str) -> None:
        """Submit a follower whose wait has ended to the engine. Returns it to the router instead if
        the rest of its prompt is long enough for a prefill worker, or if the engine's queue is
        full."""
        waiting = self._waiting[key]
        remaining = len(prefix_ids(waiting.request)) - 1 - self._num_cached(waiting)
        if remaining >= self._min_tokens(waiting.sharing) and not waiting.sharing.local:
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
        tokens = self._num_cached(self._waiting[key])
        self._prefixes.over(key)
        self._leave(key, reason)
        self.figures.placed_again += 1
        self._place_again(bytes.fromhex(key), tokens, reason)

    def _num_cached(self, waiting: _Waiting) -> int:
        return self._engine.num_found(waiting.chain) * self._size

    def _leave(self, key: str, reason: str) -> None:
        del self._waiting[key]
        self._event_log.unfollow(bytes.fromhex(key), reason)
