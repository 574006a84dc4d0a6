"""Line 5: two releases side by side, and two pools of weights; every stream equals its answer
without disturbance, and none fails.

The last release (releases.json) is built next to this tree. A system of the old one is replaced
process by process under load: the workers first, prefill before decode, or the gateways and routers
first, and then decode before prefill, so that either release hands off to the other. At every
stage, streams of long prompts, which prefill hands to decode, and of short ones run through the
current gateways, from a client that never retries. A stage holds if its workers, gateways and
routers report the releases that it is about and prompts were handed off in it. Then a pool with
other weights is added to the first one, which is stopped.

A clone without the release's commit skips the first two parts; a release that is there and cannot
be built fails them.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from builders.changed_weights import write_changed
from handoff.steady_load import Ask, Load, RawClient, asks
from releases import BuildFailed, NoRelease, last_release, python_of
from systems.eventually import eventually
from systems.replaceable import Replaceable, ReplaceableSystem, tail

from pdserve.services.host.metrics.process_metrics import commit
from pdserve.services.host.rpc.protocol_version import PROTOCOL_VERSION

CLIENTS = 6
STREAMS = 200  # of the two releases together, and of the two pools
STREAMS_HELP = "of each of the two halves; a stage of less than 16 may see no long prompt"
STAGES = 12  # of the two orders together
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

    def __init__(self, system: ReplaceableSystem, load: Load, per_stage: int) -> None:
        self.system = system
        self.load = load
        self.exit_codes: list[int] = []
        self.stages: list[dict[str, Any]] = []
        self._per_stage = per_stage

    async def stage(self, name: str, front: Front, *protocols: int) -> None:
        """Run this many streams to their end while the system has these gateways and routers, and
        workers of these versions."""
        self.load.where = name
        remote = await asyncio.to_thread(self.system.remote_prefills)
        before, begun = self.load.completed, self.load.completed + self.load.running
        enough = begun - before + self._per_stage
        await eventually(
            lambda: self.load.completed - before >= enough or self.load.failed or self.load.broken,
            lambda: name,
            STAGE_S,
        )
        stage = {
            "stage": name,
            "gateways": await self._releases(self.system.gateways),
            "routers": await self._releases(self.system.routers),
            "worker_protocols": await asyncio.to_thread(self.system.protocols),
            "completed": self.load.completed - before,
            "remote_prefills": await asyncio.to_thread(self.system.remote_prefills) - remote,
        }
        stage["ok"] = (
            (stage["gateways"], stage["routers"]) == ([front.gateways], [front.routers])
            and stage["worker_protocols"] == sorted(protocols)
            and stage["remote_prefills"] > 0
        )
        self.stages.append(stage)
        print(json.dumps(stage), file=sys.stderr, flush=True)

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


async def roll(
    folder: Path, old: str, old_protocol: int, order: Order, per_stage: int
) -> dict[str, Any]:
    """Replace a system of the release that `old` runs by one of this tree."""
    with ReplaceableSystem(folder, *OPTIONS) as system:
        for _ in range(2):
            system.router(*REMOTE, python=old)
        for role in ("prefill", "decode", "decode"):
            system.worker(role, python=old)
        system.gateway(python=old)
        clients = Clients(system)
        rolled = Rolled(system, Load(clients.chunks, MODEL), per_stage)
        await rolled.load.learn(asks())
        load = asyncio.create_task(rolled.load.run(CLIENTS))
        try:
            await order(rolled, sys.executable, old_protocol)
        finally:
            rolled.load.stop()
            await load
            await clients.close()
    return figures_of(rolled)


def figures_of(rolled: Rolled) -> dict[str, Any]:
    load = rolled.load
    return {
        "ok": not (load.failed or load.broken or load.unequal or any(rolled.exit_codes))
        and all(stage["ok"] for stage in rolled.stages),
        "streams": load.completed + len(load.failed) + len(load.broken),
        "completed": load.completed,
        "failed": load.failed,
        "broken": load.broken,
        "unequal": load.unequal,
        "exit_codes": rolled.exit_codes,
        "stages": rolled.stages,
    }


class TwoPoolLoad(Load):
    """A load whose answers must be those of one of two pools; of the new one once the old one was
    stopped."""

    def __init__(self, chunks: Any, old: dict[Ask, Any], new: dict[Ask, Any]) -> None:
        super().__init__(chunks, MODEL, old)
        self.of_new = 0
        self.retired = False
        self._new = new

    async def ask(self, ask: Ask) -> Any:
        """Accept the old pool's answer in place of the new one's."""
        only_new = self.retired
        answer = await super().ask(ask)
        if answer == self._new[ask]:
            self.of_new += 1
            return self.calm[ask]
        return "of the old pool" if only_new else answer


async def calm_of(folder: Path, *words: str) -> dict[Ask, Any]:
    """The answers of a pool with these options alone."""
    with ReplaceableSystem(folder, *OPTIONS, *words) as system:
        system.router(*REMOTE)
        system.worker("decode")
        system.gateway()
        clients = Clients(system)
        load = Load(clients.chunks, MODEL)
        await load.learn(asks())
        await clients.close()
    return load.calm


async def two_pools(folder: Path, per_stage: int) -> dict[str, Any]:
    """The pool of the shipped weights, then one of other weights next to it, then that one
    alone."""
    words = ("--model", str(write_changed(folder / "other.gguf")), "--served-name", MODEL)
    calm = await calm_of(folder), await calm_of(folder, *words)
    differ = sum(calm[0][ask] != calm[1][ask] for ask in calm[0])
    with ReplaceableSystem(folder, *OPTIONS) as system:
        for _ in range(2):
            system.router(*REMOTE)
        old = [system.worker(role) for role in ("prefill", "decode")]
        system.gateway()
        clients = Clients(system)
        load = TwoPoolLoad(clients.chunks, *calm)
        rolled = Rolled(system, load, per_stage)
        running = asyncio.create_task(load.run(CLIENTS))
        try:
            await rolled.stage("the old pool", ALL_NEW, PROTOCOL_VERSION)
            for role in ("prefill", "decode"):
                await asyncio.to_thread(system.worker, role, *words)
            of_new = load.of_new
            await rolled.stage("both pools", ALL_NEW, PROTOCOL_VERSION)
            in_both = load.of_new - of_new
            retiring = [asyncio.create_task(rolled.retire(worker)) for worker in old]
            await asyncio.to_thread(system.wait_draining, old[1])
            load.retired = True
            await rolled.stage("the old pool drains", ALL_NEW, PROTOCOL_VERSION)
            await asyncio.gather(*retiring)
            await rolled.stage("the new pool", ALL_NEW, PROTOCOL_VERSION)
        finally:
            load.stop()
            await running
            await clients.close()
    figures = figures_of(rolled)
    figures |= {"asks": len(calm[0]), "asks_that_differ": differ, "of_new_while_both": in_both}
    figures["ok"] &= differ * 2 > len(calm[0]) and in_both > 0
    return figures


def releases(streams: int) -> dict[str, Any]:
    """Both orders, or the reason why they were skipped or cannot run."""
    try:
        last = last_release()
        python = python_of(last)
    except NoRelease as error:
        print(f"THE RELEASES WERE NOT TRIED TOGETHER: {error}", file=sys.stderr)
        return {"releases": {"ok": True, "skipped": str(error)}}
    except BuildFailed as error:
        return {"releases": {"ok": False, "error": str(error)}}
    found: dict[str, Any] = {}
    for order in (workers_first, front_first):
        with tempfile.TemporaryDirectory() as folder:
            rolling = roll(Path(folder), python, last.protocol, order, -(-streams // STAGES))
            found[order.__name__] = asyncio.run(rolling)
    release = {"old": last.name, "commit": last.commit[:12], "protocols": [last.protocol]}
    release["protocols"].append(PROTOCOL_VERSION)
    return {"release": release, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=STREAMS, help=STREAMS_HELP)
    parser.add_argument("--only", choices=("releases", "pools"), help="one of the two halves")
    args = parser.parse_args()
    parts: dict[str, Any] = {}
    if args.only != "pools":
        parts |= releases(args.streams)
    if args.only != "releases":
        with tempfile.TemporaryDirectory() as folder:
            parts["two_pools"] = asyncio.run(two_pools(Path(folder), -(-args.streams // 4)))
    ok = all(part.get("ok", True) for part in parts.values())
    print(json.dumps({"ok": ok, "clients": CLIENTS, **parts}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
