"""Tracks prefixes on their way to a decode worker, and the requests that wait for them; pure.

This is single flight: of prompts with a common prefix, one is computed and the others share it.

A *leader* is an attempt whose prompt's KV is not complete yet: a hand-off, or a local prefill at
decode. It promises the chain hashes of its full blocks. A *follower* waits until the blocks that it
shares with one leader have arrived. It holds no blocks meanwhile, and it is itself a leader for its
blocks beyond the shared ones:

    follow() --the blocks arrive----------------------------> take(): ready, still a leader
        |    --its leader ends with one block or less missing-> take(): ready
        |    --its leader ends before that-------------------> take(): lost
        +----over()------------------------------------------> forgotten

A leader may have no steps because its router is lost. Followers that have no steps either keep
waiting for it; for the other followers it has ended. Invariant: a follower's leader began before
it, so there is no cycle, and the end of a leader ends all behind it in one `take`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


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
        """Whether no more blocks arrive for now."""
        return self.over or (self.parked and self.in_engine)


@dataclass(eq=False, slots=True)
class _Follower:
    promise: _Leader  # of the follower itself, for the blocks beyond the shared ones
    leader: _Leader
    until: int  # number of the leader's blocks to wait for


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """The prefix that a chain shares with a leader's chain."""

    leader: str  # the leader's key
    blocks: int  # length of the prefix, including blocks that have arrived


@dataclass(frozen=True, slots=True)
class EndedWaits:
    """Followers whose wait has ended, in order of arrival."""

    ready: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class PromisedPrefixes:
    """The leaders and followers of one decode worker, by their keys."""

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
        """Attempts whose prefixes are on their way, including followers."""
        return len(self._leaders)

    @property
    def changed(self) -> bool:
        """Whether `take` may return something."""
        return self._changed and bool(self._followers)

    def find(
        self, chain: Sequence[bytes], num_cached: int, priority: int = 0
    ) -> SharedBlocks | None:
        """The longest prefix of a chain that is on its way; None if it is no longer than the first
        `num_cached` blocks, which are cached. Leaders with a higher priority value than `priority`
        are excluded, since other requests may overtake them for long."""
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
        """Promise the KV of a chain that is on its way; `in_engine`: decode's own engine computes
        it."""
        leader = self._leaders[key] = _Leader(key, chain, priority, in_engine=in_engine)
        for link in chain:
            self._promised.setdefault(link, {})[leader] = None

    def follow(
        self, key: str, chain: Sequence[bytes], shared: SharedBlocks, priority: int = 0
    ) -> None:
        """Wait for the shared blocks; also promises the rest of the request's chain."""
        leader = self._leaders[shared.leader]
        self.lead(key, chain, in_engine=False, priority=priority)
        self._followers[key] = _Follower(self._leaders[key], leader, shared.blocks)

    def leader_of(self, key: str) -> str | None:
        """The leader that a follower waits for; None if `key` is not a follower."""
        follower = self._followers.get(key)
        return None if follower is None else follower.leader.key

    def is_queued(self, key: str) -> bool:
        """Whether `key` is a leader in the engine's queue."""
        leader = self._leaders.get(key)
        return leader is not None and leader.in_engine and not leader.begun

    def begun(self, key: str) -> None:
        """Record that the engine has picked a leader from its queue."""
        if (leader := self._leaders.get(key)) is not None:
            leader.begun = True

    def arrived(self, key: str, blocks: int, in_engine: bool = False) -> None:
        """Record that a leader's first blocks are in the prefix cache; `in_engine`: the engine has
        the leader now."""
        if (leader := self._leaders.get(key)) is not None:
            leader.arrived = max(leader.arrived, blocks)
            leader.in_engine |= in_engine
            self._changed = True

    def park(self, key: str, parked: bool) -> None:
        """Record that the attempt's steps have stopped, or continue."""
        if (leader := self._leaders.get(key)) is not None:
            leader.parked = parked
            self._changed = True

    def over(self, key: str) -> None:
        """Remove an attempt of which no more blocks will arrive: it is complete, lost or
        cancelled."""
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
        """Return the followers whose wait has ended. Ready ones stay leaders, since the engine
        computes the rest of their KV next; lost ones are removed."""
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
