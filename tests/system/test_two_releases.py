"""Two releases side by side: every stream equals its answer without disturbance, and none fails.

The last release (tests/releases.json) is built next to this tree. A system of the old one is
replaced process by process under load: the workers first, prefill before decode, or the gateways
and routers first, and then decode before prefill, so that either release hands off to the other. At
every stage, streams of long prompts, which prefill hands to decode, and of short ones run through
the current gateways, from a client that never retries. In a stage its workers, gateways and routers
report the releases that it is about, and prompts are handed off.

A clone without the release's commit skips the test; a release that cannot be built fails it.
"""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from systems.eventually import eventually
from systems.releases import NoRelease, last_release, python_of
from systems.replaceable import Replaceable, ReplaceableSystem, tail
from systems.steady_load import Load, RawClient, asks

from pdserve.services.common.metrics import commit
from pdserve.services.common.rpc import PROTOCOL_VERSION

pytestmark = [pytest.mark.extended, pytest.mark.timeout(3600)]

CLIENTS = 6
STREAMS = 16  # of each stage; fewer may include no long prompt
OPTIONS = ("--kv-tokens", "16384", "--chunk-size", "256", "--kv-transport", "tcp")
REMOTE = ("--remote-prefill", "auto", "--remote-prefill-threshold", "256")
MODEL = "SmolLM2-135M-Instruct"
STAGE_S = 900.0
OLD, NEW = "old", "new"
THIS_BUILD = {"version": metadata.version("pdserve"), "commit": commit()}


class Front(NamedTuple):
    """The releases of a stage's gateways and routers."""

    gateways: str
    routers: str


ALL_OLD, ALL_NEW = Front(OLD, OLD), Front(NEW, NEW)


class Clients:
    """A client that sends each request to the next gateway that accepts new ones."""

    def __init__(self, system: ReplaceableSystem) -> None:
        self._system = system
        self._clients: dict[str, RawClient] = {}
        self._numbers = itertools.count()

    async def chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        gateways = self._system.gateways
        url = gateways[next(self._numbers) % len(gateways)].url
        if url not in self._clients:
            self._clients[url] = RawClient(url, "none")
        async for chunk in self._clients[url].chunks(body):
            yield chunk

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))


class Rolled:
    """A system under load whose processes are replaced one after the other."""

    def __init__(self, system: ReplaceableSystem, load: Load) -> None:
        self.system = system
        self.load = load
        self.exit_codes: list[int] = []

    async def stage(self, name: str, front: Front, *protocols: int) -> None:
        """Run this many streams to their end while the system has these gateways and routers, and
        workers of these versions."""
        self.load.where = name
        remote = await asyncio.to_thread(self.system.remote_prefills)
        before, begun = self.load.completed, self.load.completed + self.load.running
        enough = begun - before + STREAMS
        await eventually(
            lambda: self.load.completed - before >= enough or self.load.failed or self.load.broken,
            lambda: name,
            STAGE_S,
        )
        assert await self._releases(self.system.gateways) == [front.gateways], name
        assert await self._releases(self.system.routers) == [front.routers], name
        assert await asyncio.to_thread(self.system.protocols) == sorted(protocols), name
        assert await asyncio.to_thread(self.system.remote_prefills) > remote, name

    async def _releases(self, processes: list[Replaceable]) -> list[str]:
        """The distinct releases of these builds. This tree's build is the new one; any other, or an
        unreported one, is old."""
        builds = [await asyncio.to_thread(self.system.build, one) for one in processes]
        return sorted({NEW if build == THIS_BUILD else OLD for build in builds})

    async def retire(self, process: Replaceable) -> None:
        await eventually(lambda: self.load.running, "streams under way", STAGE_S)
        code = await asyncio.to_thread(self.system.retire, process)
        self.exit_codes.append(code)
        if code:
            print(tail(process), file=sys.stderr)

    async def replace_worker(self, old: Replaceable, python: str, *words: str) -> None:
        await asyncio.to_thread(self._new_worker, old.role, python, *words)
        await self.retire(old)

    def _new_worker(self, role: str, python: str, *words: str) -> Replaceable:
        return self.system.worker(role, *words, python=python)

    async def replace_workers(self, python: str, first: str, front: Front, both: set[int]) -> None:
        """Replace the workers, those of one role first. A stage follows each replacement except the
        last."""
        where = self.load.where
        *others, last = sorted(self.system.workers, key=lambda worker: worker.role != first)
        for number, old in enumerate(others, 1):
            await self.replace_worker(old, python)
            await self.stage(f"{where}; {number} new workers, {first} first", front, *both)
        await self.replace_worker(last, python)

    async def replace_gateway(self, python: str) -> None:
        (old,) = self.system.gateways
        await asyncio.to_thread(self.system.gateway, python)
        await self.retire(old)

    async def replace_routers(self, python: str) -> None:
        """Replace the routers one at a time; the gateways send the requests of one to the other."""
        for old in list(self.system.routers):
            await self.retire(old)
            words = {"python": python, "address": old.address}
            await asyncio.to_thread(self.system.router, *REMOTE, **words)
            await asyncio.to_thread(self.system.wait_joined)


Order = Callable[[Rolled, str, int], Awaitable[None]]


async def workers_first(rolled: Rolled, new: str, old_protocol: int) -> None:
    both = {old_protocol, PROTOCOL_VERSION}
    await rolled.stage("all old", ALL_OLD, old_protocol)
    await rolled.replace_workers(new, "prefill", ALL_OLD, both)
    await rolled.stage("old gateway and routers, new workers", ALL_OLD, PROTOCOL_VERSION)
    await rolled.replace_routers(new)
    front = Front(gateways=OLD, routers=NEW)
    await rolled.stage("old gateway, new routers and workers", front, PROTOCOL_VERSION)
    await rolled.replace_gateway(new)
    await rolled.stage("all new", ALL_NEW, PROTOCOL_VERSION)


async def front_first(rolled: Rolled, new: str, old_protocol: int) -> None:
    both = {old_protocol, PROTOCOL_VERSION}
    await rolled.stage("all old", ALL_OLD, old_protocol)
    await rolled.replace_gateway(new)
    front = Front(gateways=NEW, routers=OLD)
    await rolled.stage("new gateway, old routers and workers", front, old_protocol)
    await rolled.replace_routers(new)
    await rolled.stage("new gateway and routers, old workers", ALL_NEW, old_protocol)
    await rolled.replace_workers(new, "decode", ALL_NEW, both)
    await rolled.stage("all new", ALL_NEW, PROTOCOL_VERSION)


async def roll(folder: Path, old: str, old_protocol: int, order: Order) -> Rolled:
    """Replace a system of the release that `old` runs by one of this tree."""
    with ReplaceableSystem(folder, *OPTIONS) as system:
        for _ in range(2):
            system.router(*REMOTE, python=old)
        for role in ("prefill", "decode", "decode"):
            system.worker(role, python=old)
        system.gateway(python=old)
        clients = Clients(system)
        rolled = Rolled(system, Load(clients.chunks, MODEL))
        await rolled.load.learn(asks())
        load = asyncio.create_task(rolled.load.run(CLIENTS))
        try:
            await order(rolled, sys.executable, old_protocol)
        finally:
            rolled.load.stop()
            await load
            await clients.close()
    return rolled


@pytest.mark.parametrize("order", [workers_first, front_first])
def test_an_upgrade_under_load_fails_no_stream(order: Order, tmp_path: Path) -> None:
    try:
        last = last_release()
    except NoRelease as error:
        pytest.skip(f"THE RELEASES WERE NOT TRIED TOGETHER: {error}")
    rolled = asyncio.run(roll(tmp_path, python_of(last), last.protocol, order))
    load = rolled.load
    assert not load.failed
    assert not load.broken
    assert not load.unequal
    assert not any(rolled.exit_codes)
