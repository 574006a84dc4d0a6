"""Leaders and followers of one decode worker, without an engine."""

from collections import Counter
from functools import cache
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.engine.kv.block_hash import cache_seed, chain_hashes
from pdserve.services.decode.single_flight.promised_prefixes import (
    Common,
    Landing,
    PromisedPrefixes,
)

BLOCK = 4


@cache
def chain(blocks: int, tail: int = 0, own: int = 0, salt: bytes = b"") -> list[bytes]:
    """Of `blocks` blocks that all have, then `own` blocks that only this tail has."""
    ids = [*range(blocks * BLOCK), *[1000 + tail] * (own * BLOCK)]
    return chain_hashes(ids, BLOCK, cache_seed(b"kv", salt))


def one_leader(blocks: int = 10, landed: bool = False) -> PromisedPrefixes:
    flights = PromisedPrefixes()
    flights.lead("leader", chain(blocks), landed)
    return flights


def join(flights: PromisedPrefixes, key: str, prompt: list[bytes], found: int = 0) -> Common:
    common = flights.common(prompt, found)
    assert common is not None
    flights.follow(key, prompt, common)
    return common


def test_followers_wait_for_what_they_have_in_common() -> None:
    flights = one_leader()
    assert join(flights, "same", chain(10)) == Common("leader", 10)
    assert join(flights, "longer", chain(6, 1, 3)) == Common("leader", 6)
    flights.arrived("leader", 6)
    assert flights.take() == Landing(ready=["longer"])
    flights.arrived("leader", 9)
    assert flights.take() == Landing()
    flights.arrived("leader", 10)
    assert flights.changed
    assert flights.take() == Landing(ready=["same"])
    assert not flights.num_following


def test_nothing_is_awaited_that_is_there_or_that_nobody_brings() -> None:
    flights = one_leader()
    assert flights.common(chain(10), 10) is None
    assert flights.common(chain(0, 1, 5), 0) is None
    assert flights.common(chain(10, salt=b"another tenant"), 0) is None
    flights.arrived("leader", 7)
    assert flights.common(chain(7, 1, 3), 0) is None, "it has arrived, and is no longer cached"
    assert flights.common(chain(10), 7) == Common("leader", 10)
    flights.over("leader")
    assert flights.common(chain(10), 0) is None


def test_a_follower_leads_with_what_it_has_beyond() -> None:
    flights = one_leader()
    prompt = chain(10, 1, 4)
    join(flights, "first", prompt)
    assert join(flights, "second", prompt) == Common("first", 14)
    assert join(flights, "third", chain(10)) == Common("leader", 10)
    assert flights.leader_of("second") == "first"
    flights.arrived("leader", 10)
    assert flights.take() == Landing(ready=["first", "third"])
    assert flights.leader_of("first") is None
    flights.arrived("first", 14)
    assert flights.take() == Landing(ready=["second"])


def test_what_ends_a_leader_ends_all_behind_it_in_order() -> None:
    flights = one_leader()
    join(flights, "first", chain(10, 1, 4))
    join(flights, "second", chain(10, 1, 4))
    join(flights, "other", chain(10, 2, 4))
    flights.over("leader")
    assert flights.take() == Landing(lost=["first", "second", "other"])
    assert flights.common(chain(10), 0) is None
    assert not flights._promised
    assert not flights._leaders


def test_a_block_that_never_comes_is_computed() -> None:
    """The leader's last block is full only once it has decoded its first token."""
    flights = one_leader()
    join(flights, "same", chain(10))
    flights.arrived("leader", 9, landed=True)
    assert flights.take() == Landing()
    flights.over("leader")
    assert flights.take() == Landing(ready=["same"])


def test_a_leader_without_steps_keeps_those_that_have_none_either() -> None:
    flights = one_leader(landed=True)
    join(flights, "parked", chain(10))
    join(flights, "live", chain(10))
    flights.park("leader", True)
    flights.park("parked", True)
    assert flights.take() == Landing(lost=["live"])
    assert flights.common(chain(10), 0) == Common("parked", 10), "which has no steps to lose yet"
    flights.park("leader", False)
    flights.arrived("leader", 10)
    assert flights.take() == Landing(ready=["parked"])


def test_a_hand_off_to_a_parked_leader_goes_on() -> None:
    flights = one_leader()
    join(flights, "live", chain(10))
    flights.park("leader", True)
    assert flights.take() == Landing()
    flights.arrived("leader", 9, landed=True)
    assert flights.take() == Landing(ready=["live"]), "the last block will not come"


HITS: Counter[str] = Counter()


class FlightsMachine(RuleBasedStateMachine):
    """Against a plain list of who waits for whom."""

    @initialize()
    def begin(self) -> None:
        self.flights = PromisedPrefixes()
        self.chains: dict[str, list[bytes]] = {}  # live leaders and followers
        self.arrived: dict[str, int] = {}
        self.waits: dict[str, Common] = {}
        self.order: list[str] = []
        self.number = 0

    @rule(blocks=st.integers(1, 6), tail=st.integers(0, 2), own=st.integers(0, 3))
    def enter(self, blocks: int, tail: int, own: int) -> None:
        prompt = chain(blocks, tail, own)
        key = f"{self.number:04}"
        self.number += 1
        common = self.flights.common(prompt, 0)
        if common is None:
            self.flights.lead(key, prompt, landed=False)
        else:
            leader = self.chains[common.leader]
            assert leader[: common.blocks] == prompt[: common.blocks]
            assert common.blocks > self.arrived[common.leader]
            self.flights.follow(key, prompt, common)
            self.waits[key] = common
            HITS["follows"] += 1
            HITS["follows a follower"] += common.leader in self.waits
        self.chains[key], self.arrived[key] = prompt, 0

    def _pick(self, which: int, keys: list[str]) -> str | None:
        return keys[which % len(keys)] if keys else None

    @rule(which=st.integers(0, 20), more=st.integers(1, 4))
    def arrive(self, which: int, more: int) -> None:
        key = self._pick(which, [k for k in self.chains if k not in self.waits])
        if key is not None:
            self.arrived[key] = min(len(self.chains[key]), self.arrived[key] + more)
            self.flights.arrived(key, self.arrived[key])

    @rule(which=st.integers(0, 20))
    def end(self, which: int) -> None:
        key = self._pick(which, list(self.chains))
        if key is not None:
            self.flights.over(key)
            self.chains.pop(key)
            self.waits.pop(key, None)

    @rule()
    def take(self) -> None:
        landing = self.flights.take()
        assert landing.ready == sorted(landing.ready)
        assert landing.lost == sorted(landing.lost)
        for key in sorted((*landing.ready, *landing.lost)):
            common = self.waits.pop(key)
            missing = common.blocks - self.arrived[common.leader]
            if key in landing.ready:
                assert missing <= (0 if common.leader in self.chains else 1)
            else:
                assert missing > 1
                assert common.leader not in self.chains
                self.chains.pop(key)
            HITS["ready" if key in landing.ready else "lost"] += 1
        for common in self.waits.values():
            assert common.leader in self.chains
            assert common.blocks > self.arrived[common.leader]
        self.settled()

    def settled(self) -> None:
        assert self.flights.num_following == len(self.waits)

    @invariant()
    def only_live_chains_are_promised(self) -> None:
        if hasattr(self, "flights"):
            live = {link for prompt in self.chains.values() for link in prompt}
            assert set(self.flights._promised) == live

    def teardown(self) -> None:
        if hasattr(self, "flights"):
            for key in list(self.chains):
                self.flights.over(key)
            self.flights.take()
            assert not self.flights._promised
            assert not self.flights._followers


TestFlightsMachine = FlightsMachine.TestCase
TestFlightsMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_long_runs_reach_every_interesting_state() -> None:
    HITS.clear()
    for seed in range(200):
        random, machine = Random(seed), FlightsMachine()
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
