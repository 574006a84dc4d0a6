"""Real worker processes: a hung engine is detected, a slow one is not mistaken for hung."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from fakes.odd_worker import FROZEN_S
from grpc_health.v1 import health_pb2, health_pb2_grpc
from systems.cluster_secret import SECRET, open_channel
from systems.eventually import LIMIT_S, eventually
from systems.worker_kit import expected, prompt

from pdserve.protos import common_pb2 as pb
from pdserve.protos import router_pb2 as rpc
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common import stall_detector
from pdserve.services.common.stall_detector import MIN_LOOKS, StallDetector
from pdserve.services.router.fleet import State, Worker
from pdserve.services.router.main import RouterProcess
from pdserve.services.router.settings import RouterSettings
from pdserve.services.worker.membership import HEARTBEAT_S
from pdserve.services.worker.process import LOOK_S

pytestmark = pytest.mark.anyio

SUPPORT = Path(__file__).parents[1] / "support"
SERVING, NOT_SERVING = 1, 2
STEP_S = 2.0  # allowed for a step of the usual size


class Odd:
    """One process of tests/support/fakes/odd_worker.py."""

    def __init__(self, router: str, folder: Path, model: str, token_s: float) -> None:
        folder.mkdir()
        self.folder = folder
        self.log = folder / "log"
        command = [sys.executable, "-P", "-m", "fakes.odd_worker", router, str(folder), model]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(token_s)],
                stderr=log,
                stdout=log,
                env={**os.environ, "PYTHONPATH": str(SUPPORT)},
            )

    def is_at(self, address: str) -> bool:
        """Return whether this process listens there."""
        connections = psutil.Process(self.process.pid).net_connections(kind="tcp")
        return any(f"127.0.0.1:{c.laddr.port}" == address for c in connections if not c.raddr)

    def end(self, moves: bool = True) -> int:
        if moves:
            (self.folder / "hang").unlink(missing_ok=True)
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)


class System:
    """A router in this process and odd workers around it."""

    def __init__(self, router: RouterProcess, folder: Path) -> None:
        self.core = router.core
        self.odd: dict[str, Odd] = {}
        self._router = router
        self._folder = folder

    def launch(self, name: str, model: str, token_s: float = 0.0) -> None:
        self.odd[name] = Odd(self._router.address, self._folder / name, model, token_s)

    async def workers(self) -> dict[str, Worker]:
        """Return all workers, once they have joined."""
        known = self.core.fleet.workers

        def there() -> bool:
            return sum(w.connected for w in known.values()) == len(self.odd)

        await eventually(there)
        found = {
            n: w for n, o in self.odd.items() for w in known.values() if o.is_at(w.hello.address)
        }
        assert len(found) == len(self.odd)
        return found

    async def generate(self, model: str, ids: list[int], count: int) -> list[int]:
        async with open_channel(self._router.address) as channel:
            request = rpc.GenerateRequest(model=model, prompt_ids=ids, seed=0)
            request.params.CopyFrom(pb.SamplingParams(temperature=0, max_tokens=count))
            found: list[int] = []
            async for event in RouterStub(channel).Generate(request):
                assert event.tokens.position == len(found) or not event.HasField("tokens")
                found += event.tokens.ids
        return found


@asynccontextmanager
async def system(folder: Path) -> AsyncIterator[System]:
    router = RouterProcess(RouterSettings(cluster_secret=(SECRET,)))
    await router.start()
    made = System(router, folder)
    try:
        yield made
    finally:
        codes = {name: await asyncio.to_thread(odd.end) for name, odd in made.odd.items()}
        await router.stop(0)
    assert set(codes.values()) <= {0}, {n: o.log.read_text() for n, o in made.odd.items()}


async def health(worker: Worker) -> int:
    async with grpc.aio.insecure_channel(worker.hello.address) as channel:
        answer: Any = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest()
        )
        return int(answer.status)


async def health_becomes(worker: Worker, status: int) -> None:
    async def has_status() -> bool:
        return await health(worker) == status

    await eventually(has_status, f"health {status}")


@pytest.mark.extended
async def test_a_hung_engine_is_detected_within_ten_seconds_and_a_slow_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts time in looks: ten seconds are 25 heartbeats to a router. Here detection has to take
    fewer; tests/services/worker/test_reports.py and the simulation cover the ten seconds.
    """
    product_s = stall_detector.FROZEN_S
    assert max(product_s, MIN_LOOKS * LOOK_S) + LOOK_S <= 10, "a worker detects it by itself"
    assert product_s + STEP_S <= 10
    monkeypatch.setattr(stall_detector, "FROZEN_S", FROZEN_S)
    slow_s = 2 * FROZEN_S
    looks: dict[int, int] = {}
    look = StallDetector.look

    def counted(seen: StallDetector, counter: int, busy: bool, now: float) -> bool:
        if frozen := look(seen, counter, busy, now):
            looks.setdefault(id(seen), seen.looks)
        return frozen

    monkeypatch.setattr(StallDetector, "look", counted)
    async with system(tmp_path) as made:
        core = made.core
        for name in ("a", "b"):
            made.launch(name, "tiny")
        made.launch("slow", "slow", token_s=1.0)
        workers = await made.workers()
        slow = workers["slow"]
        (made.odd["slow"].folder / "slow").write_text(str(slow_s))
        states: set[State] = set()
        began = time.monotonic()
        long_step = asyncio.create_task(made.generate("slow", prompt(40), 4))
        stream = asyncio.create_task(made.generate("tiny", prompt(20), 60))
        await eventually(lambda: any(r.progress.begun for r in core.dispatcher.requests))
        (routed,) = [r for r in core.dispatcher.requests if r.model == "tiny"]
        assert routed.assignment is not None
        victim = routed.assignment.decode
        (name,) = [n for n, w in workers.items() if w is victim]
        folder = made.odd[name].folder
        (folder / "hang").touch()
        await eventually((folder / "hung").exists)
        await eventually(lambda: states.add(slow.state) or victim.state is State.FROZEN)
        assert MIN_LOOKS <= looks[id(victim.engine)] <= 10 / HEARTBEAT_S
        await health_becomes(victim, NOT_SERVING)
        assert await stream == expected(prompt(20), max_tokens=60)[0]
        assert core.dispatcher.num_retries == core.dispatcher.num_frozen == 1
        assert "in forward" in made.odd[name].log.read_text(), "the stack of the hung thread"
        assert await health(slow) == SERVING
        # It moves again: it runs the commands received meanwhile, and takes work.
        (folder / "hang").unlink()
        await eventually(lambda: victim.state is State.LIVE)
        await health_becomes(victim, SERVING)
        await eventually(lambda: not victim.load.blocks_used and not victim.load.running)
        assert await long_step == expected(prompt(40), max_tokens=4)[0]
        assert time.monotonic() - began > slow_s, "the slow step was that slow"
        assert states | {slow.state} == {State.LIVE}
        assert core.dispatcher.num_frozen == 1
        assert await made.generate("tiny", prompt(9), 4) == expected(prompt(9), max_tokens=4)[0]


async def test_a_worker_with_a_hung_engine_still_ends(tmp_path: Path) -> None:
    async with system(tmp_path) as made:
        made.launch("a", "tiny")
        await made.workers()
        odd = made.odd.pop("a")
        (odd.folder / "hang").touch()
        request = asyncio.create_task(made.generate("tiny", prompt(20), 8))
        await eventually((odd.folder / "hung").exists)
        code = await asyncio.to_thread(odd.end, False)
        assert code == 1, "it gave up after its drain, grace and close; the engine hangs forever"
        assert "did not end in time" in odd.log.read_text()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
