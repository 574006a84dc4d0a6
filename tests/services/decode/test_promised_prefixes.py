"""Leaders and followers of one decode worker, without an engine."""

from collections import Counter
from functools import cache
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.engine.kv import cache_seed, chain_hashes
from pdserve.services.decode.single_flight import EndedWaits, PromisedPrefixes, SharedBlocks

BLOCK = 4


@cache
def chain(blocks: int, tail: int = 0, own: int = 0, salt: bytes = b"") -> list[bytes]:
    """Return `blocks` blocks that all prompts share, then `own` blocks that only this tail has."""
    ids = [*range(blocks * BLOCK), *[1000 + tail] * (own * BLOCK)]
    return chain_hashes(ids, BLOCK, cache_seed(b"kv", salt))


def one_leader(blocks: int = 10, in_engine: bool = False) -> PromisedPrefixes:
    prefixes = PromisedPrefixes()
    prefixes.lead("leader", chain(blocks), in_engine)
    return prefixes


def join(prefixes: PromisedPrefixes, key: str, prompt: list[bytes], found: int = 0) -> SharedBlocks:
    shared = prefixes.find(prompt, found)
    assert shared is not None
    prefixes.follow(key, prompt, shared)
    return shared


def test_followers_wait_for_the_blocks_they_share() -> None:
    prefixes = one_leader()
    assert join(prefixes, "same", chain(10)) == SharedBlocks("leader", 10)
    assert join(prefixes, "longer", chain(6, 1, 3)) == SharedBlocks("leader", 6)
    prefixes.arrived("leader", 6)
    assert prefixes.take() == EndedWaits(ready=["longer"])
    prefixes.arrived("leader", 9)
    assert prefixes.take() == EndedWaits()
    prefixes.arrived("leader", 10)
    assert prefixes.changed
    assert prefixes.take() == EndedWaits(ready=["same"])
    assert not prefixes.num_following


def test_no_prompt_waits_for_a_later_one() -> None:
    prefixes = PromisedPrefixes()
    prefixes.lead("late", chain(10), in_engine=True, priority=3)
    assert prefixes.find(chain(10), 0, priority=2) is None
    assert prefixes.find(chain(10), 0, priority=3) == SharedBlocks("late", 10)
    prefixes.lead("soon", chain(6), in_engine=True, priority=2)
    shared = prefixes.find(chain(10), 0, priority=2)
    assert shared == SharedBlocks("soon", 6)
    prefixes.follow("follower", chain(10), shared, priority=2)
    assert prefixes.find(chain(10), 0, priority=1) is None
    assert prefixes.find(chain(10), 6, priority=2) == SharedBlocks("follower", 10)


def test_blocks_that_are_cached_or_not_promised_are_not_awaited() -> None:
    prefixes = one_leader()
    assert prefixes.find(chain(10), 10) is None
    assert prefixes.find(chain(0, 1, 5), 0) is None
    assert prefixes.find(chain(10, salt=b"another tenant"), 0) is None
    prefixes.arrived("leader", 7)
    assert prefixes.find(chain(7, 1, 3), 0) is None, "the block arrived and is no longer cached"
    assert prefixes.find(chain(10), 7) == SharedBlocks("leader", 10)
    prefixes.over("leader")
    assert prefixes.find(chain(10), 0) is None


def test_a_follower_leads_with_its_further_blocks() -> None:
    prefixes = one_leader()
    prompt = chain(10, 1, 4)
    join(prefixes, "first", prompt)
    assert join(prefixes, "second", prompt) == SharedBlocks("first", 14)
    assert join(prefixes, "third", chain(10)) == SharedBlocks("leader", 10)
    assert prefixes.leader_of("second") == "first"
    prefixes.arrived("leader", 10)
    assert prefixes.take() == EndedWaits(ready=["first", "third"])
    assert prefixes.leader_of("first") is None
    prefixes.arrived("first", 14)
    assert prefixes.take() == EndedWaits(ready=["second"])


def test_the_end_of_a_leader_ends_all_its_followers_in_order() -> None:
    prefixes = one_leader()
    join(prefixes, "first", chain(10, 1, 4))
    join(prefixes, "second", chain(10, 1, 4))
    join(prefixes, "other", chain(10, 2, 4))
    prefixes.over("leader")
    assert prefixes.take() == EndedWaits(lost=["first", "second", "other"])
    assert prefixes.find(chain(10), 0) is None
    assert not prefixes._promised
    assert not prefixes.num_leaders


def test_a_block_that_never_comes_is_computed() -> None:
    """The leader's last block is full only once it has decoded its first token."""
    prefixes = one_leader()
    join(prefixes, "same", chain(10))
    prefixes.arrived("leader", 9, in_engine=True)
    assert prefixes.take() == EndedWaits()
    prefixes.over("leader")
    assert prefixes.take() == EndedWaits(ready=["same"])


def test_a_parked_leader_keeps_its_parked_followers() -> None:
    prefixes = one_leader(in_engine=True)
    join(prefixes, "parked", chain(10))
    join(prefixes, "live", chain(10))
    prefixes.park("leader", True)
    prefixes.park("parked", True)
    assert prefixes.take() == EndedWaits(lost=["live"])
    assert prefixes.find(chain(10), 0) == SharedBlocks("parked", 10), (
        "the parked follower has no steps to lose yet"
    )
    prefixes.park("leader", False)
    prefixes.arrived("leader", 10)
    assert prefixes.take() == EndedWaits(ready=["parked"])


def test_a_hand_off_to_a_parked_leader_continues() -> None:
    prefixes = one_leader()
    join(prefixes, "live", chain(10))
    prefixes.park("leader", True)
    assert prefixes.take() == EndedWaits()
    prefixes.arrived("leader", 9, in_engine=True)
    assert prefixes.take() == EndedWaits(ready=["live"]), "the last block will not come"


HITS: Counter[str] = Counter()


class PrefixesMachine(RuleBasedStateMachine):
    """Compares promised prefixes with a plain list of who waits for whom."""

    @initialize()
    def begin(self) -> None:
        self.prefixes = PromisedPrefixes()
        self.chains: dict[str, list[bytes]] = {}  # live leaders and followers
        self.arrived: dict[str, int] = {}
        self.waits: dict[str, SharedBlocks] = {}
        self.order: list[str] = []
        self.number = 0

    @rule(blocks=st.integers(1, 6), tail=st.integers(0, 2), own=st.integers(0, 3))
    def enter(self, blocks: int, tail: int, own: int) -> None:
        prompt = chain(blocks, tail, own)
        key = f"{self.number:04}"
        self.number += 1
        shared = self.prefixes.find(prompt, 0)
        if shared is None:
            self.prefixes.lead(key, prompt, in_engine=False)
        else:
            leader = self.chains[shared.leader]
            assert leader[: shared.blocks] == prompt[: shared.blocks]
            assert shared.blocks > self.arrived[shared.leader]
            self.prefixes.follow(key, prompt, shared)
            self.waits[key] = shared
            HITS["follows"] += 1
            HITS["follows a follower"] += shared.leader in self.waits
        self.chains[key], self.arrived[key] = prompt, 0

    def _pick(self, which: int, keys: list[str]) -> str | None:
        return keys[which % len(keys)] if keys else None

    @rule(which=st.integers(0, 20), more=st.integers(1, 4))
    def arrive(self, which: int, more: int) -> None:
        key = self._pick(which, [k for k in self.chains if k not in self.waits])
        if key is not None:
            self.arrived[key] = min(len(self.chains[key]), self.arrived[key] + more)
            self.prefixes.arrived(key, self.arrived[key])

    @rule(which=st.integers(0, 20))
    def end(self, which: int) -> None:
        key = self._pick(which, list(self.chains))
        if key is not None:
            self.prefixes.over(key)
            self.chains.pop(key)
            self.waits.pop(key, None)

    @rule()
    def take(self) -> None:
        ended = self.prefixes.take()
        assert ended.ready == sorted(ended.ready)
        assert ended.lost == sorted(ended.lost)
        for key in sorted((*ended.ready, *ended.lost)):
            shared = self.waits.pop(key)
            missing = shared.blocks - self.arrived[shared.leader]
            if key in ended.ready:
                assert missing <= (0 if shared.leader in self.chains else 1)
            else:
                assert missing > 1
                assert shared.leader not in self.chains
                self.chains.pop(key)
            HITS["ready" if key in ended.ready else "lost"] += 1
        for shared in self.waits.values():
            assert shared.leader in self.chains
            assert shared.blocks > self.arrived[shared.leader]
        self.settled()

    def settled(self) -> None:
        assert self.prefixes.num_following == len(self.waits)

    @invariant()
    def only_live_chains_are_promised(self) -> None:
        if hasattr(self, "prefixes"):
            live = {link for prompt in self.chains.values() for link in prompt}
            assert set(self.prefixes._promised) == live

    def teardown(self) -> None:
        if hasattr(self, "prefixes"):
            for key in list(self.chains):
                self.prefixes.over(key)
            self.prefixes.take()
            assert not self.prefixes._promised
            assert not self.prefixes._followers


TestPromisedPrefixes = PrefixesMachine.TestCase
TestPromisedPrefixes.settings = settings(max_examples=40, stateful_step_count=30)


def test_long_runs_reach_every_interesting_state() -> None:
    HITS.clear()
    for seed in range(200):
        random, machine = Random(seed), PrefixesMachine()
        machine.begin()
        for _ in range(60):
            what = random.choices(["enter", "arrive", "end", "take"], [5, 6, 1, 3])[0]
            if what == "enter":
                machine.enter(random.randint(1, 6), random.randrange(3), random.randrange(4))
            elif what == "arrive":
                machine.arrive(random.randrange(21), random.randint(1, 4))
            elif what == "end":
                machine.end(random.randrange(21))
            else:
                machine.take()
            machine.only_live_chains_are_promised()
        machine.teardown()
    print(dict(HITS))
    assert min(HITS[n] for n in ("follows", "follows a follower", "ready", "lost")) > 100
