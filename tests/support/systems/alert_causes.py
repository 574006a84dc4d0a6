"""Causes of each alert, made with the real objects, and the pages before and after.

A cause gives the pages of the processes concerned; `None` after it: the process is gone.
"""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from builders.engine_kit import ask, fake_engine, run
from fakes.decoder import FakeDecoder, fake_spec
from fakes.router import Event, FakeRouter, saying
from fakes.router_workers import FakeDecode
from oracles.promtool import Pages
from prometheus_client import CollectorRegistry, generate_latest

from pdserve.engine.handoff.connection.connect import MAX_UNPROVEN
from pdserve.engine.kv import NO_MIXING
from pdserve.gateway.admission import AdmissionLimits
from pdserve.protos import common_pb2 as pb
from pdserve.protos.fleet_pb2 import DECODE, Load
from pdserve.services.common import metrics as process_metrics
from pdserve.services.common import stall_detector
from pdserve.services.common.auth.certificates import Role, issue, make_authority
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.metrics import lag_histogram, watch_loop
from systems.dispatcher_world import World
from systems.eventually import eventually
from systems.watched import (
    engine_load,
    page_of,
    router_page,
    watched_gateway,
    watched_router,
    worker_page,
)
from systems.worker_kit import Pair, build_with, engine_maker, worker_pair

FROZEN_S = 0.3
Change = tuple[Pages, Pages | None]  # before and after
Cause = Callable[[pytest.MonkeyPatch], Awaitable[Change]]


@dataclass(frozen=True)
class Case:
    """One cause. `also`: alerts that the same cause makes fire; `minutes`: its duration, unless it
    happens `once`.
    """

    cause: Cause
    also: set[str] = field(default_factory=set)
    minutes: int = 20
    once: bool = False


async def healthy() -> Pages:
    """Return a page of each process, of a system that has answered a few requests."""
    async with watched_router() as (router, _, _):
        of_router = router_page(router.core)
    async with watched_gateway(FakeRouter(saying("hello"))) as gateway:
        assert await gateway.ask(2) == [200, 200]
        of_gateway = await gateway.page()
    engine = fake_engine()
    run(engine, ask("a", range(20)))
    return {"router": of_router, "gateway": of_gateway, "decode": worker_page(engine_load(engine))}


# --- routers and workers


async def no_router(patch: pytest.MonkeyPatch) -> Change:
    async with watched_router() as (router, _, _):
        return {"router": router_page(router.core)}, None


async def decode_is_killed(patch: pytest.MonkeyPatch) -> Change:
    return await _killed(prefill=False)


async def prefill_is_killed(patch: pytest.MonkeyPatch) -> Change:
    return await _killed(prefill=True)


async def _killed(prefill: bool) -> Change:
    async with watched_router() as (router, decoder, prefiller):
        before = router_page(router.core)
        await (prefiller if prefill else decoder).kill()
        await eventually(lambda: len(router.core.fleet.workers) == 1)
        return {"router": before}, {"router": router_page(router.core)}


async def workers_die_again_and_again(patch: pytest.MonkeyPatch) -> Change:
    async with watched_router() as (router, _, _):
        before = router_page(router.core)
        for _ in range(3):
            await router.add(victim := FakeDecode())
            await victim.kill()
            await eventually(lambda: len(router.core.fleet.workers) == 2)
        return {"router": before}, {"router": router_page(router.core)}


async def router_hears_too_few(patch: pytest.MonkeyPatch) -> Change:
    """End the workers' streams while their sessions stay."""
    async with watched_router() as (router, _, _):
        others = [FakeDecode() for _ in range(4)]
        for one in others:
            await router.add(one)
        before = router_page(router.core)
        quiet = [one.membership.close for one in others if one.membership is not None]
        await asyncio.gather(*map(asyncio.to_thread, quiet))
        await eventually(lambda: router.core.num_isolations)
        return {"router": before}, {"router": router_page(router.core)}


async def an_engine_stands_still(patch: pytest.MonkeyPatch) -> Change:
    patch.setattr(stall_detector, "FROZEN_S", FROZEN_S)
    async with watched_router() as (router, decode, _):
        await router.add(FakeDecode())
        before = router_page(router.core)
        decode.liveness = 7, True
        await eventually(lambda: router.core.dispatcher.num_frozen)
        return {"router": before}, {"router": router_page(router.core)}


async def prefill_fails(patch: pytest.MonkeyPatch) -> Change:
    async with watched_router() as (router, _, prefill):
        before = router_page(router.core)
        prefill.fail = 100
        await router.ask(10)
        return {"router": before}, {"router": router_page(router.core)}


async def gateways_speak_of_the_forgotten(patch: pytest.MonkeyPatch) -> Change:
    async with watched_router() as (router, _, _):
        before = router_page(router.core)
        client: Any = SimpleNamespace(key=b"gateway")
        for number in range(200):
            router.core.cancel(client, f"forgotten {number}")
        return {"router": before}, {"router": router_page(router.core)}


async def workers_are_busy(patch: pytest.MonkeyPatch) -> Change:
    """Keep workers busy for 20 s of a dispatcher whose time is a number."""
    world = World(NO_MIXING)
    world.join(DECODE).busy_until = world.now + 20
    before = router_page(world.core)
    for number in range(4):
        world.submit(f"r{number}", queue_remaining_ms=60_000)
    world.pass_time(21)
    world.begin("r3")
    return {"router": before}, {"router": router_page(world.core)}


async def prompts_wait_for_prefill(patch: pytest.MonkeyPatch) -> Change:
    """Report the load of a slow engine with 120 prompts."""

    class Slow(FakeDecoder):
        def forward(self, host_batch: Any, kv: Any) -> Any:
            time.sleep(0.1)
            return super().forward(host_batch, kv)

    engine = fake_engine(model=Slow(fake_spec()))
    run(engine, ask("first", range(60), max_tokens=1))
    for number in range(120):
        engine.submit(ask(f"r{number}", [number % 60] * 100))
    return await _reported(engine_load(engine), prefill=True)


async def decode_is_full(patch: pytest.MonkeyPatch) -> Change:
    engine = fake_engine(num_blocks=16)
    engine.submit(ask("r", range(60), max_tokens=4))
    for _ in range(6):
        engine.step()
    return await _reported(engine_load(engine), prefill=False)


async def _reported(load: Load, prefill: bool) -> Change:
    async with watched_router() as (router, decoder, prefiller):
        before = router_page(router.core)
        router.report(prefiller if prefill else decoder, load)
        return {"router": before}, {"router": router_page(router.core)}


# --- engines and hand-offs


async def sequences_take_each_others_blocks(patch: pytest.MonkeyPatch) -> Change:
    """Make the engine recompute some of the generated tokens."""
    engine = fake_engine(num_blocks=24, max_running=8)
    before = worker_page(engine_load(engine))
    run(engine, *(ask(f"r{n}", [n] * 8, max_tokens=60) for n in range(16)))
    assert engine.stats().preemptions > 12
    return {"decode": before}, {"decode": worker_page(engine_load(engine))}


async def _with_pair(patch: pytest.MonkeyPatch, do: Callable[[Pair], Awaitable[None]]) -> Change:
    """Run `do` on a pair of workers; return decode's page before and after."""
    build_with(patch, engine_maker())
    with TemporaryDirectory() as folder:
        async with worker_pair(Path(folder)) as pair:
            before = await _load(pair)
            await do(pair)
            after = await _load(pair)
    return {"decode": worker_page(before)}, {"decode": worker_page(after)}


async def _load(pair: Pair) -> Load:
    runtime: Any = pair.decode_worker.runtime
    load, _, _ = await asyncio.wrap_future(runtime.thread.post(lambda _: runtime.snapshot()))
    assert isinstance(load, Load)
    return load


async def strangers_connect(patch: pytest.MonkeyPatch) -> Change:
    async def crowd(pair: Pair) -> None:
        runtime: Any = pair.decode_worker.runtime
        host, _, port = runtime.hello.data_address.rpartition(":")
        peers = [socket.create_connection((host, int(port))) for _ in range(MAX_UNPROVEN + 4)]
        await eventually(lambda: runtime.receiver.counters["unproven_refused"])
        for peer in peers:
            peer.close()

    return await _with_pair(patch, crowd)


async def a_block_is_nobodys(patch: pytest.MonkeyPatch) -> Change:
    leaked: list[list[int]] = []

    async def leak(pair: Pair) -> None:
        runtime: Any = pair.decode_worker.runtime
        pool = runtime.engine.jobs.tables.pools[0]
        await asyncio.wrap_future(runtime.thread.post(lambda _: leaked.append(pool.allocate(1))))
        await _load(pair)
        await asyncio.wrap_future(runtime.thread.post(lambda _: pool.release(leaked[0])))

    return await _with_pair(patch, leak)


# --- gateways


async def router_cannot_take_them(patch: pytest.MonkeyPatch) -> Change:
    async def refuses(router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        raise ServiceError(pb.UNAVAILABLE, "no worker has joined")
        yield

    async with watched_gateway(FakeRouter(refuses)) as gateway:
        before = await gateway.page()
        assert set(await gateway.ask(20)) == {503}
        return {"gateway": before}, {"gateway": await gateway.page()}


async def gateway_is_full(patch: pytest.MonkeyPatch) -> Change:
    limits = AdmissionLimits(0, 0)
    async with watched_gateway(FakeRouter(saying("x")), limits) as gateway:
        before = await gateway.page()
        assert set(await gateway.ask(20)) == {429}
        return {"gateway": before}, {"gateway": await gateway.page()}


async def answers_are_slow(patch: pytest.MonkeyPatch) -> Change:
    now = [0.0]

    async def slow(router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        now[0] += 20
        async for event in saying("hello")(router, start):
            yield event

    async with watched_gateway(FakeRouter(slow), clock=lambda: now[0]) as gateway:
        before = await gateway.page()
        for _ in range(3):
            assert await gateway.ask(1) == [200]
        return {"gateway": before}, {"gateway": await gateway.page()}


# --- processes


async def a_loop_is_held_up(patch: pytest.MonkeyPatch) -> Change:
    patch.setattr(process_metrics, "LOOK_S", 0.02)
    registry, seen = CollectorRegistry(), 0
    lag = lag_histogram(registry)

    def observe(seconds: float) -> None:
        nonlocal seen
        seen += seconds > 0.3
        lag.observe(seconds)

    before = generate_latest(registry).decode()
    watching = asyncio.create_task(watch_loop(observe))
    for _ in range(3):
        await asyncio.sleep(0.03)
        time.sleep(0.4)  # noqa: ASYNC251  (that is the cause)
    await eventually(lambda: seen)
    watching.cancel()
    return {"prefill": before}, {"prefill": generate_latest(registry).decode()}


async def a_certificate_ends_in_three_days(patch: pytest.MonkeyPatch) -> Change:
    pages = []
    for days in (90, 3):
        own = issue(make_authority(), Role.ROUTER, days).certificate.decode()
        pages.append({"prefill": page_of(certificates={"cluster": own})})
    return pages[0], pages[1]


def of_another(folder: str) -> Path:
    """Return a package with another commit."""
    (package := Path(folder)).joinpath(process_metrics.COMMIT_FILE).write_text("another")
    return package


async def two_builds_run(patch: pytest.MonkeyPatch) -> Change:
    before = page_of()
    with TemporaryDirectory() as folder:
        patch.setattr(process_metrics.resources, "files", lambda package: of_another(folder))
        return {"prefill": before}, {"prefill": page_of()}


CASES = {
    "PdserveNoRouter": Case(no_router, {"PdserveNoDecodeWorker"}),
    "PdserveNoDecodeWorker": Case(decode_is_killed, once=True),
    "PdserveNoPrefillWorker": Case(prefill_is_killed, once=True),
    "PdserveRouterIsolated": Case(router_hears_too_few, minutes=5, once=True),
    "PdserveEngineFrozen": Case(an_engine_stands_still, once=True),
    "PdserveWorkersFlapping": Case(workers_die_again_and_again, minutes=10, once=True),
    "PdserveErrorRatioHigh": Case(router_cannot_take_them),
    "PdserveRequestsRefused": Case(gateway_is_full),
    "PdserveFirstTokenSlow": Case(answers_are_slow),
    "PdserveQueueWaitHigh": Case(workers_are_busy),
    "PdservePrefillBacklogHigh": Case(prompts_wait_for_prefill),
    "PdserveDecodeKvNearlyFull": Case(decode_is_full),
    "PdservePreemptions": Case(sequences_take_each_others_blocks, {"PdserveRecomputedTokensHigh"}),
    "PdserveRecomputedTokensHigh": Case(sequences_take_each_others_blocks, {"PdservePreemptions"}),
    "PdserveHandoffsFailing": Case(prefill_fails),
    "PdserveHandoffsRefused": Case(strangers_connect, minutes=5, once=True),
    "PdserveStaleMessagesRising": Case(gateways_speak_of_the_forgotten),
    "PdserveKvAccountingErrors": Case(a_block_is_nobodys, once=True),
    "PdserveEventLoopLate": Case(a_loop_is_held_up),
    "PdserveCertificateEnding": Case(a_certificate_ends_in_three_days),
    "PdserveVersionsDiffer": Case(two_builds_run, minutes=70),
}
