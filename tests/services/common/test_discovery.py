"""The routers that a worker joins, by rendezvous hashing: every process computes the same order, in
balance, and few workers move.
"""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdserve.services.common.discovery import first_that_count, rendezvous_order

ROUTERS = [f"10.0.0.{n}:50050" for n in range(20)]
WORKERS = [n.to_bytes(16) for n in range(3_000)]
K = 4


def firsts(routers: list[str]) -> dict[bytes, set[str]]:
    return {worker: set(rendezvous_order(worker, routers)[:K]) for worker in WORKERS}


def test_the_order_does_not_depend_on_the_order_of_names() -> None:
    order = rendezvous_order(WORKERS[0], ROUTERS)
    assert sorted(order) == sorted(ROUTERS)
    assert rendezvous_order(WORKERS[0], [*reversed(ROUTERS), *ROUTERS]) == order
    assert rendezvous_order(WORKERS[1], ROUTERS) != order


def test_each_router_has_an_even_share() -> None:
    counts = Counter(router for chosen in firsts(ROUTERS).values() for router in chosen)
    mean = len(WORKERS) * K / len(ROUTERS)
    assert counts.keys() == set(ROUTERS)
    assert all(0.85 * mean < count < 1.15 * mean for count in counts.values())


def test_a_change_of_one_router_moves_only_its_share() -> None:
    gone = ROUTERS[7]
    whole, without = firsts(ROUTERS), firsts([r for r in ROUTERS if r != gone])
    moved = [worker for worker in WORKERS if whole[worker] != without[worker]]
    assert moved == [worker for worker in WORKERS if gone in whole[worker]]
    assert all(len(whole[worker] - without[worker]) == 1 for worker in moved)
    assert 0.85 < len(moved) / (len(WORKERS) * K / len(ROUTERS)) < 1.15


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 6))
def test_the_shortest_prefix_with_enough_counted_routers(counts: list[bool], num: int) -> None:
    order = [str(n) for n in range(len(counts))]
    found = first_that_count(order, num, lambda name: counts[int(name)])
    assert found == order[: len(found)]
    counted = sum(counts[: len(found)])
    assert counted == num or (len(found) == len(order) and counted < num)
    assert not found or counted < num or counts[len(found) - 1]
