"""Routers that come and go as pods do, and workers and gateways that find them through a fake API
server.

Every token of the requests is known in advance.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from fakes.endpoints import FakeEndpoints, Pod
from fakes.kubernetes import FakeKubernetes
from fakes.one_token_worker import OneTokenWorker
from fakes.router_workers import card, token

from pdserve.gateway.router_client import RouterClient
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.services.common.rpc import TokensOutbox
from pdserve.services.router.main import RouterProcess
from pdserve.services.router.settings import RouterSettings
from systems.cluster_secret import ACCESS, SECRET
from systems.eventually import eventually

TARGET = "kubernetes:///router:grpc"
PACE_S = 0.01  # between two tokens
MAX_TOKENS = 20
SEED = 5


class PacedWorker(OneTokenWorker):
    """Generates max_tokens tokens at a fixed pace, the first one after those that a request has."""

    async def _read(self, commands: Any, outbox: TokensOutbox[wire.DecodeEvent]) -> None:
        running: dict[bytes, asyncio.Task[None]] = {}
        try:
            async for command in commands:
                if command.HasField("admit"):
                    answer = asyncio.create_task(self._answer(command.admit, outbox))
                    running[command.admit.attempt] = answer
                elif command.HasField("resume"):
                    outbox.put(wire.DecodeEvent(gone=wire.Gone(attempt=command.resume.attempt)))
                elif command.HasField("cancel") and command.cancel.attempt in running:
                    running.pop(command.cancel.attempt).cancel()
        finally:
            for answer in running.values():
                answer.cancel()

    async def _answer(self, admit: wire.Admit, outbox: TokensOutbox[wire.DecodeEvent]) -> None:
        attempt, start = admit.attempt, admit.start
        outbox.put(wire.DecodeEvent(admitted=wire.Admitted(attempt=attempt)))
        given = len(start.choices[0].generated_ids) if start.choices else 0
        for position in range(given, start.params.max_tokens):
            await asyncio.sleep(PACE_S)
            last = position + 1 == start.params.max_tokens
            said = pb.Tokens(
                attempt=attempt,
                position=position,
                ids=[token(list(start.prompt_ids), start.seed, 0, position)],
                finish=pb.LENGTH if last else pb.FINISH_REASON_UNSPECIFIED,
            )
            outbox.put(wire.DecodeEvent(tokens=said))
        outbox.put(wire.DecodeEvent(finished=pb.Finished(attempt=attempt)))


@dataclass(eq=False)
class RouterPod:
    router: RouterProcess
    pod: Pod

    @property
    def num_workers(self) -> int:
        return sum(worker.connected for worker in self.router.core.fleet.workers.values())

    @property
    def num_running(self) -> int:
        return self.router.core.dispatcher.num_running

    @property
    def num_answered(self) -> int:
        return self.router.core.dispatcher.outcomes["ok"]


class DiscoveredSystem:
    """Runs between `start` and `close`; all routers have one port, at separate addresses."""

    def __init__(self, api: FakeKubernetes, seed: int, num_workers: int, num_gateways: int) -> None:
        self.api = api
        self.rng = Random(seed)
        self.routers: list[RouterPod] = []  # that have not begun to end
        self.workers = [PacedWorker([TARGET], ACCESS, card()) for _ in range(num_workers)]
        self.gateways = [
            RouterClient([TARGET], ACCESS, number.to_bytes(16)) for number in range(num_gateways)
        ]
        self.wrong: list[str] = []  # requests that did not end correctly
        self.num_right = 0
        self.counts: Counter[str] = Counter()  # changes
        self._port = 0
        self._made = 0
        self._asking: list[asyncio.Task[None]] = []
        self._over = False

    async def start(self, num_routers: int) -> None:
        first = await self._new_router()
        self._port = int(first.address.rpartition(":")[2])
        self.pods = FakeEndpoints(self.api, self.rng, port=self._port)
        self.routers.append(RouterPod(first, self.pods.add(self._host(), ready=True)))
        for _ in range(num_routers - 1):
            await self.add(ready=True)
        for worker in self.workers:
            await worker.start()
        for gateway in self.gateways:
            await gateway.start()
        await self.settled()

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.close()
        for worker in self.workers:
            await worker.close()
        for one in self.routers:
            await one.router.stop(0)

    def _host(self) -> str:
        return f"127.0.{1 + self._made // 250}.{1 + self._made % 250}"

    async def _new_router(self) -> RouterProcess:
        self._made += 1
        settings = RouterSettings(bind=f"{self._host()}:{self._port}", cluster_secret=(SECRET,))
        router = RouterProcess(settings)
        await router.start()
        return router

    async def settled(self) -> None:
        """Return whether workers have joined every router, and gateways have a session with every
        ready one.
        """
        await eventually(lambda: all(r.num_workers == len(self.workers) for r in self.routers))
        ready = sum(r.pod.ready for r in self.routers)
        await eventually(lambda: all(g.num_connected >= ready for g in self.gateways))

    # --- requests

    async def ask(self, gateway: int, name: str) -> None:
        """Send a request; record it in `wrong` unless it gets its whole answer."""
        prompt = [self.rng.randrange(60_000) for _ in range(20)]
        start = pb.Start(
            request=name,
            model="tiny",
            prompt_ids=prompt,
            seed=SEED,
            remaining_ms=60_000,
            queue_remaining_ms=60_000,
            params=pb.SamplingParams(n=1, max_tokens=MAX_TOKENS),
        )
        ids: list[int] = []
        last = None
        async for event in self.gateways[gateway].open(start):
            ids += event.tokens.ids
            last = event
        expected = [token(prompt, SEED, 0, position) for position in range(MAX_TOKENS)]
        if last is not None and last.HasField("finished") and ids == expected:
            self.num_right += 1
        else:
            self.wrong.append(f"{name}: {len(ids)} ids, then {last}")

    def begin_asking(self, width: int) -> None:
        async def one_after_another(number: int) -> None:
            turn = 0
            while not self._over:
                await self.ask(number % len(self.gateways), f"r{number}-{turn}")
                turn += 1

        self._asking = [asyncio.create_task(one_after_another(n)) for n in range(width)]

    async def end_asking(self) -> None:
        self._over = True
        await asyncio.gather(*self._asking)

    # --- routers come and go

    async def change(self) -> None:
        """Make one change that leaves a router available to every gateway and worker."""
        changes: list[Callable[[], Awaitable[None]]] = [self.add_and_serve, self.api_away]
        if len(self.routers) > 2:
            changes += [self.roll, self.roll, self.crash, self.blink]
        # The least frequent kinds: a few changes include each kind, whatever is drawn.
        fewest = min(self.counts[change.__name__] for change in changes)
        change = self.rng.choice([c for c in changes if self.counts[c.__name__] <= fewest + 1])
        self.counts[change.__name__] += 1
        await change()

    async def add(self, ready: bool = False) -> RouterPod:
        router = await self._new_router()
        made = RouterPod(router, self.pods.add(self._host(), ready=ready))
        self.routers.append(made)
        return made

    async def add_and_serve(self) -> None:
        """Add a router; it is ready some time after the pod exists (its Deployment's
        minReadySeconds).
        """
        made = await self.add()
        await eventually(lambda: made.num_workers == len(self.workers))
        self.pods.set(made.pod, ready=True)
        if len(self.routers) > 5:
            await self.roll()

    async def roll(self) -> None:
        """End a pod in order: it may learn of that before or after its endpoints show it."""
        await self.settled()
        one = self._leaving()
        steps: list[Callable[[], Awaitable[None]]] = [one.router.drain, self._terminates(one.pod)]
        self.rng.shuffle(steps)
        for step in steps:
            await step()
        self.pods.set(one.pod, ready=False, terminating=True)  # its probe reports it
        await one.router.stop(0.1)
        self.pods.remove(one.pod)

    def _terminates(self, pod: Pod) -> Callable[[], Awaitable[None]]:
        async def step() -> None:
            self.pods.set(pod, ready=True, terminating=True)
            await asyncio.sleep(self.rng.random() * 0.1)

        return step

    async def crash(self) -> None:
        await self.settled()
        await self._crash(self._leaving())

    async def _crash(self, one: RouterPod) -> None:
        await one.router.stop(0)
        await asyncio.sleep(self.rng.random() * 0.2)
        self.pods.set(one.pod, ready=False)
        self.pods.remove(one.pod)

    async def blink(self) -> None:
        """Make a live router not ready for a while."""
        await self.settled()
        one = self.rng.choice(self.routers)
        self.pods.set(one.pod, ready=False)
        await asyncio.sleep(self.rng.random() * 0.2)
        self.pods.set(one.pod, ready=True)

    async def api_away(self) -> None:
        """Remove a router while the API server is away and reports nothing."""
        await self.settled()
        await asyncio.to_thread(self.api.stop)
        if len(self.routers) > 2:
            await self._crash(self._leaving())
        await asyncio.sleep(self.rng.random() * 0.3)
        self.api.start()

    def _leaving(self) -> RouterPod:
        one = self.rng.choice(self.routers)
        self.routers.remove(one)
        return one
