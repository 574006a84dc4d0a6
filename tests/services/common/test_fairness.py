"""Turns and shares of owners, over many random runs."""

from collections import Counter
from random import Random

import pytest

from pdserve.services.common.errors import ServiceError
from pdserve.services.common.fairness import FairQueue, FairShare


def test_owners_take_turns_and_each_keeps_its_order() -> None:
    for seed in range(50):
        rng = Random(seed)
        queue: FairQueue[tuple[bytes, int]] = FairQueue()
        waiting: Counter[bytes] = Counter()
        last: dict[bytes, int] = {}
        passed: Counter[bytes] = Counter()  # turns of others since an owner's last one
        for number in range(400):
            owner = rng.choice([b"flood", b"flood", b"flood", b"one", b"two"])
            queue.push(owner, (owner, number))
            waiting[owner] += 1
            assert len(queue) == waiting.total()
            while waiting.total() and rng.random() < 0.45:
                owner, first = queue.pop()
                assert first > last.get(owner, -1)
                last[owner] = first
                waiting[owner] -= 1
                passed[owner] = 0
                for other in +waiting:
                    if other != owner:
                        passed[other] += 1
                        assert passed[other] <= 3
    with pytest.raises(KeyError):
        FairQueue[int]().pop()


def test_an_owner_that_takes_all_leaves_others_their_share() -> None:
    share = FairShare(100)
    while share.has_room(b"flood"):
        share.take(b"flood")
    assert share.total == 100
    for owner, most in ((b"one", 50), (b"two", 33)):
        taken = 0
        while share.has_room(owner):
            share.take(owner)
            taken += 1
        assert taken == most
    assert not share.has_room(b"flood")


def test_a_late_owner_finds_room() -> None:
    """A new owner finds room however many came before and took all that they could."""
    share = FairShare(2048)
    for number in range(30):
        owner = b"%d" % number
        taken = 0
        while share.has_room(owner):
            share.take(owner)
            taken += 1
        assert taken >= 32
    assert share.total <= 2 * 2048 + 30 * 32


def test_a_share_is_never_more_than_twice_the_bound() -> None:
    for seed in range(50):
        rng = Random(seed)
        share, held = FairShare(40), Counter[bytes]()
        refused = 0
        for _ in range(2000):
            owner, amount = b"%d" % rng.randrange(12), rng.randrange(1, 9)
            if held[owner] and rng.random() < 0.3:
                amount = rng.randrange(1, held[owner] + 1)
                share.give_back(owner, amount)
                held[owner] -= amount
            elif share.has_room(owner, amount):
                share.take(owner, amount)
                held[owner] += amount
            else:
                refused += 1
                assert share.total + amount > 40
            assert share.total == held.total() <= 80
        assert refused > 100


def test_amounts_held_in_a_block_are_given_back() -> None:
    share = FairShare(100)
    with share.holding(b"one", 100, "prompts"), share.holding(b"one", 0, "prompts"):
        assert share.total == 100
        with (
            pytest.raises(ServiceError, match="too many prompts at once"),
            share.holding(b"one", 10, "prompts"),
        ):
            pass
        with share.holding(b"two", 10, "prompts"):
            assert share.total == 110
    assert share.total == 0
