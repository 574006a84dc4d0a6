"""A partition delays the messages that cross it; it neither loses nor reorders any."""

from collections.abc import Callable
from typing import Any

import pytest

from simulation.clock import Process, World
from simulation.network import END, Connection, Network

SEEDS = 100
BLOCKED_S = 1.0


def _connected(seed: int) -> Connection:
    world = World(seed)
    network = Network(world)
    client, server = Process(world, "client"), Process(world, "server")
    for process in (client, server):
        network.add(process)
    return network.connect(client, server, pings=False)


def _pass(connection: Connection, seconds: float) -> None:
    world = connection.network.world
    world.run(lambda: False, world.now + seconds)


def test_messages_sent_around_a_partition_arrive_once_and_in_order() -> None:
    blocked_again = 0
    for seed in range(SEEDS):
        connection = _connected(seed)
        network, pipe = connection.network, connection.up
        rng, arrived, sent = network.world.rng, list[int](), 0

        def send(pipe: Any = pipe) -> None:
            nonlocal sent
            pipe.send(sent)
            sent += 1

        pipe.take = arrived.append
        network.block("client", "server")
        for _ in range(10):
            send()
            _pass(connection, rng.uniform(0.0, 0.1))
        assert not arrived
        send()  # in transit when the partition heals
        network.heal("client", "server")
        _pass(connection, rng.uniform(0.0, 0.001))
        blocked_again += not arrived
        network.block("client", "server")
        send()
        _pass(connection, BLOCKED_S)
        network.heal("client", "server")
        send()
        _pass(connection, BLOCKED_S)
        assert arrived == list(range(sent)), seed
        assert not network.holding
    assert SEEDS // 10 < blocked_again < SEEDS


@pytest.mark.parametrize(
    "end",
    [lambda connection: connection.close(connection.client), lambda c: c.client.kill()],
    ids=["closed", "killed"],
)
def test_a_connection_end_behind_a_partition_is_noticed_when_it_heals(
    end: Callable[[Connection], None],
) -> None:
    connection = _connected(1)
    network, server = connection.network, connection.server
    heard: list[str] = []

    def take(item: Any) -> None:
        if isinstance(item, tuple) and item[0] is END:
            item[1].ended(server, "the end")
        else:
            heard.append(item)

    connection.up.take = take
    connection.lost[server] = heard.append
    network.block("client", "server")
    connection.up.send("last words")
    end(connection)
    _pass(connection, BLOCKED_S)
    assert (heard, connection.open) == ([], False)
    network.heal("client", "server")
    _pass(connection, BLOCKED_S)
    assert heard == ["last words", "the end"]
