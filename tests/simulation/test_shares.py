"""Ten routers behind three gateways: no router has more than a fifth above the mean, though many
requests have equal beginnings, and a router that is discovered under load has its share after 30
s."""

from collections import Counter
from random import Random
from unittest.mock import patch

import pytest

from simulation.clock import World
from simulation.cluster import Cluster
from simulation.network import Network
from simulation.oracle import leftovers
from simulation.scenario import Ask, Scenario
from simulation.seams import entered

SEED = 1
ROUTERS, GATEWAYS, TIMES = 10, 3, 1.2
PER_S, FOUND_S, SOON_S, SPAN_S = 20, 20.0, 30.0, 30.0


def load() -> Scenario:
    """Return a load where half of the requests have one of three beginnings and the others one of a
    hundred."""
    rng = Random(f"load {SEED}")
    popular, rare = (
        [tuple(rng.randrange(1, 64) for _ in range(8)) for _ in range(many)] for many in (3, 100)
    )
    total = int(PER_S * (FOUND_S + SOON_S + SPAN_S))
    asks = tuple(
        Ask(f"r{i}", i / PER_S, rng.choice(popular if i % 2 else rare), 1, i, gateway=i % GATEWAYS)
        for i in range(total)
    )
    return Scenario(SEED, asks, gateways=GATEWAYS, routers=ROUTERS + 1, prefills=0)


@pytest.mark.extended
def test_every_router_has_its_share_including_one_discovered_later() -> None:
    world = World(SEED)
    network = Network(world)

    def counts() -> Counter[str]:
        routers = cluster.of("router")
        return Counter({n.name: n.process.service.core.dispatcher.outcomes["ok"] for n in routers})

    with entered(world, network, SEED):
        cluster = Cluster(world, network, load())
        known = list(cluster.routers[:ROUTERS])
        try:
            # The first router's name resolves to all routers.
            with patch("pdserve.services.common.discovery.resolve", lambda name: known):
                cluster.start()
                began = world.now
                cluster.ask_all()
                world.run(lambda: False, began + FOUND_S)
                at_first = counts()
                known.append(cluster.routers[-1])
                world.run(lambda: False, began + FOUND_S + SOON_S)
                soon = counts()
                world.run(lambda: False, began + FOUND_S + SOON_S + SPAN_S)
                later = counts() - soon
            world.run(lambda: all(r.over for r in cluster.replies.values()), world.now + 5)
            assert all(r.terminal == ["finished"] for r in cluster.replies.values())
            world.run(lambda: not leftovers(cluster), world.now + 10)
            assert not leftovers(cluster)
            assert not world.errors
        finally:
            network.closed = True
            world.close()
    found = f"r{ROUTERS}"
    assert at_first[found] == 0
    assert max(at_first.values()) <= TIMES * at_first.total() / ROUTERS, at_first
    assert max(later.values()) <= TIMES * later.total() / (ROUTERS + 1), later
    assert later[found] >= later.total() / (ROUTERS + 1) / TIMES, later
