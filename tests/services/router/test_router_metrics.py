"""Metrics of a router about its models: queue, waits, and the metrics for autoscalers."""

import asyncio
from typing import Any

import pytest
from fakes.router_workers import card
from prometheus_client.core import Sample

from pdserve.protos import common_pb2 as pb
from pdserve.protos.fleet_pb2 import DECODE, PREFILL, Load, Role, WorkerHello
from pdserve.services.router.core import RouterCore
from pdserve.services.router.fleet import PrefixIndex, State, Worker
from pdserve.services.router.metrics import (
    Backlog,
    RouterMetrics,
    decode_kv_used_ratio,
    prefill_backlog,
)

pytestmark = pytest.mark.anyio
SHORT = list(range(20))
BLOCK = 16


def worker(role: Role, number: int = 0, state: State = State.LIVE, **load: Any) -> Worker:
    hello = WorkerHello(role=role, incarnation=bytes([number]), address=f"w:{number}", card=card())
    made = Worker(hello, 1, 0.0, 0.0, PrefixIndex(10).open(hello.incarnation), state)
    made.report(Load(**load))
    return made


def found(core: RouterCore) -> dict[str, list[Sample]]:
    """Return samples by name."""
    samples: dict[str, list[Sample]] = {}
    for family in RouterMetrics(core).collect():
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def of_model(core: RouterCore, name: str, **labels: str) -> float:
    """Return the one sample of the model with these other labels."""
    wanted = {"model_name": "tiny", **labels}
    (sample,) = [s for s in found(core)[name] if s.labels == wanted]
    return sample.value


def test_the_backlog_is_tokens_divided_by_the_rate_of_live_workers() -> None:
    quick = worker(PREFILL, 1, waiting_tokens=3000, prefill_tokens_s=1000)
    slow = worker(PREFILL, 2, waiting_tokens=0, prefill_tokens_s=500)
    assert prefill_backlog([quick, slow], 0) == Backlog(2, 0)
    assert prefill_backlog([quick, slow], 1500) == Backlog(2, 1)
    new = worker(PREFILL, 3)
    known = Backlog(3000 / 2250, 1500 / 2250)
    assert prefill_backlog([quick, slow, new], 1500) == known, "it has measured nothing yet"
    leaving = worker(PREFILL, 4, State.DRAINING, waiting_tokens=9000, prefill_tokens_s=1000)
    assert prefill_backlog([quick, slow, leaving], 0) == Backlog(2, 0)
    assert prefill_backlog([new], 1500) is prefill_backlog([], 0) is None


def test_the_ratio_counts_held_and_promised_blocks() -> None:
    blocks = {"blocks_total": 10, "blocks_used": 2, "blocks_reserved": 1, "blocks_cached": 4}
    half = worker(DECODE, 1, promised_tokens=2 * BLOCK, **blocks)
    empty = worker(DECODE, 2, blocks_total=10, blocks_free=10)
    assert decode_kv_used_ratio([half]) == 0.5
    assert decode_kv_used_ratio([half, empty]) == 0.25
    frozen = worker(DECODE, 3, State.FROZEN, blocks_total=10, blocks_used=10)
    assert decode_kv_used_ratio([half, frozen]) == 0.5
    assert decode_kv_used_ratio([]) is None


async def test_waiting_requests_count_for_their_model(make_cluster: Any, wait_for: Any) -> None:
    """Their waits count too: a request that no worker takes in time has waited all that time."""
    cluster = await make_cluster(remote_prefill_threshold=10)
    decode, _ = await cluster.decode(), await cluster.prefill()
    core, gateway = cluster.router.core, await cluster.gateway()
    await gateway.start("first", SHORT)
    await gateway.end("first")
    assert of_model(core, "pdserve_router_queued") == 0
    assert of_model(core, "pdserve_router_queue_seconds_count") == 1
    decode.busy = 10_000
    for name, seconds in (("long", 60), ("late", 0.3)):
        await gateway.start(name, SHORT, queue_remaining_ms=int(1000 * seconds))
    await wait_for(lambda: core.dispatcher.num_queued == 2)
    assert of_model(core, "pdserve_router_queued") == 2
    for known in core.fleet.workers.values():
        known.report(Load(prefill_tokens_s=10, waiting_tokens=5, blocks_total=4, blocks_used=3))
    assert of_model(core, "pdserve_prefill_backlog_seconds") == 5 / 10
    assert of_model(core, "pdserve_router_prefill_wait_seconds") == 2 * len(SHORT) / 10
    assert of_model(core, "pdserve_decode_kv_used_ratio") == 0.75
    assert (await gateway.end("late")).failure.code == pb.QUEUE_TIMEOUT
    decode.busy = 0
    await gateway.end("long")
    assert of_model(core, "pdserve_router_queue_seconds_count") == 3
    assert of_model(core, "pdserve_router_queue_seconds_sum") >= 2 * 0.3
    assert of_model(core, "pdserve_router_queue_seconds_bucket", le="0.25") == 1


async def test_a_death_is_counted_and_a_goodbye_is_not(make_cluster: Any, wait_for: Any) -> None:
    """A model without workers exports a zero, for requests that wait for one."""
    cluster = await make_cluster()
    victim, leaver = await cluster.decode(), await cluster.decode()
    core = cluster.router.core
    states = {"role": "decode", "state": "live"}
    assert of_model(core, "pdserve_router_workers", **states) == 2
    assert len(found(core)["pdserve_worker_silent_seconds"]) == 2
    assert of_model(core, "pdserve_router_worker_deaths_total", role="decode") == 0
    leaver.membership.announce_drain()
    await wait_for(lambda: core.fleet.get(leaver.incarnation).state is State.DRAINING)
    await asyncio.gather(victim.kill(), leaver.kill())
    await wait_for(lambda: not core.fleet.workers)
    assert of_model(core, "pdserve_router_workers", **states) == 0
    assert of_model(core, "pdserve_router_worker_deaths_total", role="decode") == 1
