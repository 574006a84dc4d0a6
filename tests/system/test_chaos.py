"""A sample of the chaos runs (tests/chaos): killed processes and broken networks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from systems.chaos.cluster import LINKS, Cluster, Shape, with_proxies
from systems.chaos.evidence import Evidence
from systems.chaos.model import write_chaos_model
from systems.chaos.streams import Clients, reference
from systems.chaos.strikes import HITS, Batch, Striker, lost_tries

pytestmark = pytest.mark.extended

TOKENS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chaos_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def struck_by_network(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Striker]:
    folder = tmp_path_factory.mktemp("network")
    with Cluster(folder, with_proxies(Shape(model))) as cluster:
        clients = Clients(cluster.url, TOKENS)
        yield Striker(cluster, clients, reference(clients))
    evidence = Evidence(cluster.rings)
    assert not evidence.violations, "\n\n".join(evidence.violations)


def test_killed_processes_cost_no_stream_a_token(model: Path, tmp_path: Path, rings: Path) -> None:
    batches: list[Batch] = []
    with Cluster(tmp_path, Shape(model, prefills=3, decodes=2), rings) as cluster:
        clients = Clients(cluster.url, TOKENS)
        striker = Striker(cluster, clients, reference(clients))
        for strike in (striker.prefill, striker.decode, striker.prefill):
            batches += striker.hit(strike)
        cluster.wait_ready()
        before = sum(cluster.prompt_tokens().values())
        calm = striker.hit(striker.router)
        batches += calm
        cluster.wait_ready()
        num_prompt_tokens = sum(s.usage["prompt_tokens"] for batch in calm for s in batch.streams)
        assert sum(cluster.prompt_tokens().values()) - before == num_prompt_tokens, (
            "each token must be computed once"
        )
        tries = lost_tries(cluster.router_log())
    assert not [text for batch in batches for text in batch.wrong]
    evidence = Evidence(rings)
    for batch in (batch for batch in batches if batch.strikes):
        (strike,) = batch.strikes
        lost = [s.id for s in batch.streams if s.id in tries]
        # An attempt may also be abandoned for another reason, e.g. slow prefill on a busy machine.
        struck = [[why for why in tries[request] if strike.address in why] for request in lost]
        assert all(len(reasons) <= 1 for reasons in struck), ("a stream was struck twice", tries)
        if strike.role == "prefill":
            assert evidence.in_transfer(strike.incarnation, strike.at_ns)
        elif strike.role == "decode":
            assert {*lost} & {*strike.streams}, "the worker had no stream in progress"
        if strike.role == "router":
            assert not lost
        else:
            noticed = evidence.noticed(strike.address, strike.incarnation, strike.at_ns)
            assert noticed, (strike, struck, evidence.closed_since(strike.at_ns))
            assert max(noticed) < 1.0
            assert all(s < 3.0 for s in evidence.given_back(strike.incarnation, strike.at_ns))


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("router-decode", "hold"),
        ("router-decode", "reset"),
        ("router-prefill", "one-way back"),
        ("router-prefill", "half-close"),
        ("gateway-router", "delay"),
        ("gateway-router", "corrupt"),
        ("prefill-decode", "corrupt"),
        ("prefill-decode", "one-way there"),
    ],
)
def test_a_broken_network_costs_no_stream_a_token(
    struck_by_network: Striker, link: str, fault: str
) -> None:
    proxy = struck_by_network.cluster.proxies[link]
    before = proxy.hits[HITS[fault]]
    batches = struck_by_network.hit(struck_by_network.network(link, fault))
    assert not [text for batch in batches for text in batch.wrong]
    assert proxy.hits[HITS[fault]] > before
    assert {*LINKS} == {*struck_by_network.cluster.proxies}
