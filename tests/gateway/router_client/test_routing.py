"""The choice of a router: similar requests go to the same one, and none exceeds its share."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.router_client import choose
from pdserve.gateway.router_client.routing import HALF_LIFE_S, KEY_IDS, Recent, conversation
from pdserve.protos.common_pb2 import Start


class Router:
    def __init__(self, number: int, load: float = 0.0) -> None:
        self.address = f"10.0.0.{number}:50050"
        self.recent = Recent()
        self.open = load

    def load(self, now: float) -> float:
        return self.open + self.recent.count(now)


def key(number: int) -> bytes:
    return conversation(Start(model="m", prompt_ids=[number] * 10))


def test_no_router() -> None:
    assert choose([], key(1), 0.0) is None


def test_similar_requests_share_a_router_up_to_its_share() -> None:
    routers = [Router(n) for n in range(10)]
    found = {choose(routers, key(7), 0.0) for _ in range(10)}
    assert len(found) == 1
    (first,) = found
    assert first is not None
    first.open = 5
    assert choose(routers, key(7), 0.0) is not first


def test_a_removed_router_moves_only_its_requests() -> None:
    routers = [Router(n) for n in range(10)]
    before = {n: choose(routers, key(n), 0.0) for n in range(200)}
    after = {n: choose(routers[:-1], key(n), 0.0) for n in range(200)}
    assert all(after[n] is router for n, router in before.items() if router is not routers[-1])


@given(st.integers(1, 12), st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_busiest_has_at_most_a_fifth_more_than_the_mean(
    num: int, prompts: int, rng: Random
) -> None:
    """Bound the share even if all prompts begin alike, for simultaneous and for sequential
    requests."""
    routers = [Router(n) for n in range(num)]
    counts: Counter[str] = Counter()
    now = 0.0
    for _ in range(60 * num):
        router = choose(routers, key(rng.randrange(prompts)), now)
        assert router is not None
        router.recent.add(now)
        counts[router.address] += 1
        now += rng.random() * 0.02
    assert max(counts.values()) <= 1.2 * 60


@pytest.mark.parametrize("prompts", [1, 3, 40])
def test_no_router_has_much_less_than_the_mean(prompts: int) -> None:
    routers = [Router(n) for n in range(11)]
    counts: Counter[str] = Counter()
    for step in range(6000):
        now = step * 0.02
        router = choose(routers, key(step % prompts), now)
        assert router is not None
        router.recent.add(now)
        counts[router.address] += 1
    assert min(counts[router.address] for router in routers) >= 6000 / 11 / 1.2


def test_a_router_added_later_soon_has_its_share() -> None:
    routers = [Router(n) for n in range(3)]
    counts: Counter[str] = Counter()
    for step in range(6000):
        now = step * 0.01
        if step == 3000:
            routers.append(Router(9))
            counts.clear()
        router = choose(routers, key(step % 40), now)
        assert router is not None
        router.recent.add(now)
        counts[router.address] += 1
    assert 0.8 * 750 <= counts[routers[-1].address] <= 1.6 * 750


def test_old_requests_do_not_count() -> None:
    recent = Recent()
    recent.add(0.0)
    recent.add(0.0)
    assert recent.count(HALF_LIFE_S) == 1.0
    assert recent.count(20 * HALF_LIFE_S) < 1e-4


def test_a_conversation_is_identified_by_its_beginning() -> None:
    first = Start(model="m", prompt_ids=range(KEY_IDS))
    later = Start(model="m", prompt_ids=range(2 * KEY_IDS))
    assert conversation(first) == conversation(later)
    for other in (
        Start(model="n", prompt_ids=range(KEY_IDS)),
        Start(model="m", prompt_ids=range(KEY_IDS), cache_salt=b"s"),
        Start(model="m", prompt_ids=range(1, KEY_IDS + 1)),
    ):
        assert conversation(other) != conversation(first)
