"""Whose KV is on its way to a decode worker, and who waits for it: single flight; pure.

A *leader* is an attempt whose prompt's KV is not complete yet, a hand-off or a prefill of decode's
own; the chain hashes of its full blocks are promised. A *follower* waits until the blocks that it
has in common with one leader have arrived, holds nothing meanwhile, and leads in its turn with what
it has beyond them:

    follow() --the blocks arrive--------------------------> take(): ready, it leads from here on
        |    --its leader is over, a block or less missing-> take(): ready
        |    --its leader is over before------------------> take(): lost
        +----over()---------------------------------------> forgotten

A leader without steps (its router is lost) keeps the followers that have none either; for the
others it is over. Invariant: a follower's leader began before it, so nobody waits for himself, and
what ends one ends all behind it in one `take`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class _Leader:
    key: str
    chain: Sequence[bytes]
    arrived: int = 0  # its first blocks, in the prefix cache
    landed: bool = False  # the engine has it, so it goes on only while it has steps
    parked: bool = False  # it has none
    begun: bool = False  # it was picked from the engine's queue
    over: bool = False  # nothing more will come of it

    @property
    def stuck(self) -> bool:
        """Nothing comes of it now."""
        return self.over or (self.parked and self.landed)


@dataclass(eq=False, slots=True)
class _Follower:
    own: _Leader  # what it promises itself
    leader: _Leader
    until: int  # blocks to wait for


@dataclass(frozen=True, slots=True)
class Common:
    """What a chain has in common with a leader's."""

    leader: str  # its key
    blocks: int  # leading ones, those that have arrived too


@dataclass(frozen=True, slots=True)
class Landing:
    """Whose wait is over, in order of arrival."""

    ready: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class PromisedPrefixes:
    """The leaders and followers of one decode worker, by their keys."""

    def __init__(self) -> None:
        self._leaders: dict[str, _Leader] = {}  # followers are among them
        self._followers: dict[str, _Follower] = {}  # in order of arrival
        self._promised: dict[bytes, dict[_Leader, None]] = {}  # by hash, the oldest leader first
        self._changed = False

    @property
    def num_following(self) -> int:
        return len(self._followers)

    @property
    def changed(self) -> bool:
        """`take` may have something."""
        return self._changed and bool(self._followers)

    def common(self, chain: Sequence[bytes], found: int) -> Common | None:
        """The longest beginning of a chain that is on its way; None if its first `found` blocks,
        which are there, are as long."""
        best: Common | None = None
        for at in range(found, len(chain)):
            leader = next((it for it in self._promised.get(chain[at], ()) if not it.stuck), None)
            if leader is None:
                break
            if leader.arrived <= at:
                best = Common(leader.key, at + 1)
        return best

    def lead(self, key: str, chain: Sequence[bytes], landed: bool) -> None:
        """KV of this chain is on its way; `landed`: decode's own engine computes it."""
        leader = self._leaders[key] = _Leader(key, chain, landed=landed)
        for link in chain:
            self._promised.setdefault(link, {})[leader] = None

    def follow(self, key: str, chain: Sequence[bytes], common: Common) -> None:
        """Wait for what `common` says; the rest of its own chain is promised, too."""
        leader = self._leaders[common.leader]
        self.lead(key, chain, landed=False)
        self._followers[key] = _Follower(self._leaders[key], leader, common.blocks)

    def leader_of(self, key: str) -> str | None:
        """Whom it waits for; None: it does not follow."""
        follower = self._followers.get(key)
        return None if follower is None else follower.leader.key

    def is_queued(self, key: str) -> bool:
        """A leader that the engine has, and has not begun."""
        leader = self._leaders.get(key)
        return leader is not None and leader.landed and not leader.begun

    def begun(self, key: str) -> None:
        """The engine has picked a leader from its queue."""
        if (leader := self._leaders.get(key)) is not None:
            leader.begun = True

    def arrived(self, key: str, blocks: int, landed: bool = False) -> None:
        """A leader's first blocks are in the prefix cache; `landed`: the engine has it now."""
        if (leader := self._leaders.get(key)) is not None:
            leader.arrived = max(leader.arrived, blocks)
            leader.landed |= landed
            self._changed = True

    def park(self, key: str, parked: bool) -> None:
        """It gets no steps, or steps again."""
        if (leader := self._leaders.get(key)) is not None:
            leader.parked = parked
            self._changed = True

    def over(self, key: str) -> None:
        """Nothing more comes of it: complete, lost or cancelled."""
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

    def take(self) -> Landing:
        """Whose wait is over. The ready lead on, their own KV on its way; the lost are over."""
        landing = Landing()
        self._changed = False
        for key, follower in list(self._followers.items()):
            leader, own = follower.leader, follower.own
            missing = follower.until - leader.arrived
            stranded = leader.over or (leader.stuck and not own.parked)
            if missing <= 0 or (stranded and missing == 1):
                del self._followers[key]
                own.landed = True
                landing.ready.append(key)
            elif stranded:
                self.over(key)
                landing.lost.append(key)
        self._changed = False
        return landing
