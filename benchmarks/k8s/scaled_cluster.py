"""A cluster whose pods start and stop in virtual time: the real cores and metrics of routers among
scripted workers. Every worker joins every router, and a request may arrive at any of them.

A prefill worker computes one prompt after the other at a fixed rate. A decode worker gives each of
its rows a token in each step, computes its local prompts at the same rate, and has blocks for a
fixed number of tokens. Messages take no time; work advances in ticks of TICK_S. Streams do not
migrate: a decode worker that shuts down waits for the longest of them.
"""

import asyncio
from collections import deque
from random import Random
from typing import Any
from unittest.mock import patch

from autoscaler import SYNC_S, Autoscaler
from scraped import Scraped
from scripted_pods import BLOCK, CARD, MODEL, Client, Machine, Pod, Prompt

from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.fleet_pb2 import DECODE, PREFILL, WorkerHello
from pdserve.services.common.rpc import RequestProgress
from pdserve.services.router import core
from pdserve.services.router.fleet import Worker, WorkerSessions
from pdserve.services.router.metrics import RouterMetrics
from pdserve.services.router.placement import Rules
from pdserve.services.worker.metrics import WorkerMetrics

TICK_S = 0.25
SCRAPE_S = 15.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time is a number."""

    now = 100.0

    def time(self) -> float:
        return self.now


class ScaledCluster:
    """A cluster with as many pods as the autoscalers decide."""

    def __init__(
        self, autoscalers: list[Autoscaler], machine: Machine, seed: int, num_routers: int
    ) -> None:
        self.machine = machine
        self.rng = Random(seed)
        self._commands: deque[tuple[Worker, Any]] = deque()
        self._loop = VirtualLoop()
        making = (self._make_router(seed + number) for number in range(num_routers))
        self.routers = [self._loop.run_until_complete(made) for made in making]
        self._router_of: dict[bytes, int] = {}  # the router of each attempt
        self.client = Client()
        self.scraped = Scraped()
        self.autoscalers = {a.target: a for a in autoscalers}
        self.pods: list[Pod] = []
        self.replicas = {name: a.least for name, a in self.autoscalers.items()}
        self.history: list[tuple[float, str, int]] = []
        self.longest_drain = 0.0
        self.num_preempted = 0
        self.num_cut = 0  # pods that were killed at the end of their drain
        self.metrics = [RouterMetrics(router) for router in self.routers]
        self._numbers = 0
        self._scrape_at, self._sync_at = (self.now + self.rng.uniform(0, SYNC_S) for _ in "12")
        for name in self.replicas:
            self._make_pods(name, self.now)

    async def _make_router(self, seed: int) -> core.RouterCore:
        """A router whose sessions lead here, without background tasks."""

        def send(sessions: WorkerSessions, worker: Worker, command: Any) -> None:
            self._commands.append((worker, command))

        with (
            patch.object(WorkerSessions, "send", send),
            patch.object(core.random, "Random", lambda: Random(seed)),
        ):
            router = core.RouterCore("a secret", Rules("auto", 512), 512)  # type: ignore[arg-type]
        await router.close()
        return router

    # --- time

    @property
    def now(self) -> float:
        return self._loop.now

    def close(self) -> None:
        """Ensure that the loop has no callbacks left."""
        self._loop.close()

    def ask(self, num_tokens: int, max_tokens: int) -> None:
        """Add a client's request, whose prompt is not cached anywhere."""
        name = f"r{self.client.ends.total() + len(self.client.arrived)}-{self.rng.random()}"
        self.client.arrived[name] = self.now
        start = pb.Start(
            request=name,
            model=MODEL,
            cache_salt=name.encode(),
            params=pb.SamplingParams(n=1, max_tokens=max_tokens),
            remaining_ms=600_000,
            queue_remaining_ms=60_000,
        )
        router = self.rng.choice(self.routers)
        router.submit(RequestProgress(start, [7] * num_tokens), self.client)
        self._carry_out()

    def tick(self) -> None:
        """Let TICK_S pass."""
        self._loop.now += TICK_S
        self.client.now = self.now
        for pod in list(self.pods):
            self._live(pod)
        for router in self.routers:
            for worker in router.fleet.workers.values():
                router.fleet.heard(worker, self.now)
            router.dispatcher.tick(self.now)
        self._carry_out()
        if self.now >= self._scrape_at:
            self._scrape_at += SCRAPE_S
            self.scraped.seen(self._targets(), self.now)
        if self.now >= self._sync_at:
            self._sync_at += SYNC_S
            for name in self.autoscalers:
                self._sync(name)

    def figures(self, name: str) -> list[float]:
        """The current value of a metric on the routers that export it."""
        metrics = (metric for router in self.metrics for metric in router.collect())
        return [s.value for metric in metrics for s in metric.samples if s.name == name]

    # --- pods

    def of(self, name: str) -> list[Pod]:
        """Pods of a Deployment that are not terminating."""
        role = {"pdserve-prefill": PREFILL, "pdserve-decode": DECODE}[name]
        return [p for p in self.pods if p.role == role and p.drains_since is None]

    def _sync(self, name: str) -> None:
        ready = sum(bool(p.workers) for p in self.of(name))
        scaler, before = self.autoscalers[name], self.replicas[name]
        after = scaler.sync(lambda q: self.scraped.ask(q, self.now), before, ready, self.now)
        if after != before:
            self.replicas[name] = after
            self.history.append((self.now, name, after))
            self._make_pods(name, self.now + self.machine.start_s)
            # Pods that are not ready are removed first, then the newest.
            going = sorted(self.of(name), key=lambda p: (not p.workers, p.number))[after:]
            for pod in going:
                self._end(pod)

    def _make_pods(self, name: str, ready_at: float) -> None:
        role = PREFILL if name == "pdserve-prefill" else DECODE
        while len(self.of(name)) < self.replicas[name]:
            self._numbers += 1
            self.pods.append(Pod(self._numbers, role, ready_at))

    def _end(self, pod: Pod) -> None:
        pod.drains_since = self.now
        if not pod.workers:
            self.pods.remove(pod)
            return
        for router, worker in zip(self.routers, pod.workers, strict=True):
            router.fleet.deregister(worker)
        if pod.role == PREFILL:  # it finishes what it has started and returns other requests
            for prompt in list(pod.prompts.values())[1:]:
                del pod.prompts[prompt.attempt]
                failed = wire.PrefillFailed(
                    attempt=prompt.attempt,
                    handed_back=True,
                    failure=pb.Failure(code=pb.UNAVAILABLE, message="drains"),
                )
                self._say(pod, wire.PrefillEvent(failed=failed))

    def _live(self, pod: Pod) -> None:
        if not pod.workers:
            if self.now < pod.ready_at:
                return
            self._join(pod)
        if pod.role == DECODE:
            self._give_up(pod)
        if pod.prompts:
            self._compute(pod)
        self._generate(pod)
        for router, worker in zip(self.routers, pod.workers, strict=True):
            worker.report(pod.load(self.machine))
            router.dispatcher.on_load(worker, self.now)
            self._carry_out()
        if pod.drains_since is not None:
            since, empty = self.now - pod.drains_since, not pod.prompts and not pod.streams
            if empty or since >= self.machine.drain_s:
                self.longest_drain = max(self.longest_drain, since)
                self.num_cut += not empty
                self.pods.remove(pod)
                for router, worker in zip(self.routers, pod.workers, strict=True):
                    worker.draining = True
                    router.fleet.lost(worker)
                    router.dispatcher.disconnected(worker, not empty, self.now)

    def _join(self, pod: Pod) -> None:
        hello = WorkerHello(
            role=pod.role,
            incarnation=pod.number.to_bytes(16),
            address=f"10.0.{pod.number // 250}.{pod.number % 250}:1",
            card=CARD,
            transports=["tcp"],
            wire_version=2,
        )
        for router in self.routers:
            worker, _ = router.fleet.join(hello, self.now)
            pod.workers.append(worker)
            router.dispatcher.joined(worker)
            router.dispatcher.connected(worker, self.now)

    def _compute(self, pod: Pod) -> None:
        """Compute prompts in order of arrival."""
        budget = self.machine.prompt_tokens_s * TICK_S
        pod.rate = self.machine.prompt_tokens_s
        while budget > 0 and pod.prompts:
            prompt = next(iter(pod.prompts.values()))
            if pod.role == DECODE and not self._fits(pod, prompt):
                return
            done = min(budget, prompt.left)
            prompt.left, budget = prompt.left - done, budget - done
            if prompt.left > 0:
                return
            del pod.prompts[prompt.attempt]
            if pod.role == DECODE:
                pod.streams[prompt.attempt] = prompt
            else:
                self._hand_off(pod, prompt.attempt)

    def _fits(self, pod: Pod, prompt: Prompt) -> bool:
        """Whether there is a free row, and enough blocks."""
        used = sum(s.num_tokens + s.made for s in pod.rows)
        needed = used + prompt.num_tokens + prompt.made + len(pod.rows) * BLOCK
        return len(pod.rows) < self.machine.rows and needed <= self.machine.kv_tokens

    def _give_up(self, pod: Pod) -> None:
        """Give up requests whose first step is late."""
        on_their_way = (s for s in pod.streams.values() if not s.kv_here)
        late = [p for p in (*pod.prompts.values(), *on_their_way) if self.now >= p.gives_up]
        for prompt in late:
            if prompt.said:
                continue  # it has been preempted
            there = next((p.prompts for p in self.pods if prompt.attempt in p.prompts), {})
            if prompt.attempt in there and there[prompt.attempt].left == prompt.num_tokens:
                self._on_cancel(pod, wire.CancelAttempt(attempt=prompt.attempt))
                failure = pb.Failure(code=pb.QUEUE_TIMEOUT, message="waited too long")
                failed = pb.Failed(attempt=prompt.attempt, failure=failure)
                self._say(pod, wire.DecodeEvent(failed=failed))

    def _hand_off(self, pod: Pod, attempt: bytes) -> None:
        for other in self.pods:
            if attempt in other.streams:
                other.streams[attempt].kv_here = True
        self._say(pod, wire.PrefillEvent(done=wire.PrefillDone(attempt=attempt)))

    def _generate(self, pod: Pod) -> None:
        """Send a stream's first token, and the others when it ends."""
        self._preempt(pod)
        for stream in pod.rows:
            stream.made += self.machine.token_s * TICK_S
            ends = stream.made >= stream.max_tokens
            if stream.said and not ends:
                continue
            count = (stream.max_tokens if ends else 1) - stream.said
            tokens = pb.Tokens(attempt=stream.attempt, position=stream.said, ids=[7] * count)
            stream.said += count
            if ends:
                tokens.finish = pb.LENGTH
            self._say(pod, wire.DecodeEvent(tokens=tokens))
            if ends:
                pod.streams.pop(stream.attempt, None)
                finished = pb.Finished(attempt=stream.attempt)
                self._say(pod, wire.DecodeEvent(finished=finished))

    def _preempt(self, pod: Pod) -> None:
        """Preempt the youngest stream when blocks run out; it is computed again."""
        used = sum(s.num_tokens + s.made for s in pod.rows)
        while used > self.machine.kv_tokens:
            youngest = pod.rows[-1]
            del pod.streams[youngest.attempt]
            used -= youngest.num_tokens + youngest.made
            youngest.left = youngest.num_tokens + youngest.made
            pod.prompts[youngest.attempt] = youngest
            self.num_preempted += 1

    # --- messages of routers

    def _say(self, pod: Pod, event: Any) -> None:
        """Send an event to the router that made the request."""
        number = self._router_of[getattr(event, event.WhichOneof("event")).attempt]
        dispatcher, worker = self.routers[number].dispatcher, pod.workers[number]
        if isinstance(event, wire.PrefillEvent):
            dispatcher.on_prefill(worker, event, self.now)
        else:
            dispatcher.on_decode(worker, event, self.now)

    def _carry_out(self) -> None:
        while self._commands:
            worker, command = self._commands.popleft()
            pod = next((p for p in self.pods if worker in p.workers), None)
            if pod is not None:
                kind = command.WhichOneof("command")
                said = getattr(command, kind)
                self._router_of[said.attempt] = pod.workers.index(worker)
                getattr(self, f"_on_{kind}")(pod, said)

    def _on_admit(self, pod: Pod, admit: wire.Admit) -> None:
        num_tokens = len(admit.start.prompt_ids)
        remote = bool(admit.prefill_incarnation)
        gives_up = self.now + admit.start.queue_remaining_ms / 1000
        prompt = Prompt(
            admit.attempt,
            num_tokens,
            num_tokens,
            admit.start.params.max_tokens,
            not remote,
            gives_up,
        )
        load = pod.load(self.machine)
        room = load.blocks_free * BLOCK - load.promised_tokens - len(pod.rows) * BLOCK
        full = not remote and len(pod.prompts) > self.machine.waiting["pdserve-decode"]
        pod.last_command = admit.attempt
        if full or room < num_tokens:
            self._say(pod, wire.DecodeEvent(busy=wire.Busy(attempt=admit.attempt)))
            return
        (pod.streams if remote else pod.prompts)[admit.attempt] = prompt
        ticket = wire.Ticket(id=admit.attempt[:16]) if remote else None
        self._say(
            pod, wire.DecodeEvent(admitted=wire.Admitted(attempt=admit.attempt, ticket=ticket))
        )

    def _on_start(self, pod: Pod, start: wire.PrefillStart) -> None:
        pod.last_command = start.attempt
        if len(pod.prompts) > self.machine.waiting["pdserve-prefill"]:
            self._say(pod, wire.PrefillEvent(busy=wire.Busy(attempt=start.attempt)))
            return
        pod.prompts[start.attempt] = Prompt(start.attempt, len(start.ids), len(start.ids))
        accepted = wire.PrefillAccepted(attempt=start.attempt)
        self._say(pod, wire.PrefillEvent(accepted=accepted))

    def _on_ids_part(self, pod: Pod, part: Any) -> None:
        raise AssertionError("prompts here fit into one message")

    def _on_cancel(self, pod: Pod, cancel: wire.CancelAttempt) -> None:
        pod.prompts.pop(cancel.attempt, None)
        pod.streams.pop(cancel.attempt, None)

    def _on_hold(self, pod: Pod, hold: wire.Hold) -> None:
        stayed = wire.Stayed(attempt=hold.attempt, reason="streams do not move here")
        self._say(pod, wire.DecodeEvent(stayed=stayed))

    def _on_stay(self, pod: Pod, stay: wire.Stay) -> None:
        """Do nothing: the stream has stayed here."""

    # --- scraping

    def _targets(self) -> list[tuple[str, list[Any]]]:
        targets = [
            (f"pdserve-router-{number}", list(metrics.collect()))
            for number, metrics in enumerate(self.metrics)
        ]
        for pod in self.pods:
            if pod.workers:
                worker = WorkerMetrics(pod.workers[0].hello)
                worker.load = pod.workers[0].load
                targets.append((pod.name, list(worker.collect())))
        return targets
