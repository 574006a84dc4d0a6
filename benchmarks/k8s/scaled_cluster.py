"""A cluster whose pods come and go, in virtual time: the real dispatcher, fleet, policy and metrics
of one router among workers that follow a script.

A prefill worker computes one prompt after the other at a fixed rate. A decode worker gives each of
its rows a token in each step, computes prompts of its own at the same rate, and has blocks for a
fixed number of tokens. A message takes no time; work advances in ticks of TICK_S. Streams do not
migrate: a decode worker that ends waits for the longest of them.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from autoscaler import SYNC_S, Autoscaler
from scraped import Scraped

from pdserve.engine.kv.codec import encode_spec
from pdserve.engine.kv.spec import KvSpec, LayerGroup
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.fleet_pb2 import DECODE, PREFILL, Load, Role, WorkerHello
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.host.rpc.request_progress import RequestProgress
from pdserve.services.router.dispatcher import Dispatcher
from pdserve.services.router.fleet.fleet import Fleet, Worker
from pdserve.services.router.metrics import RouterMetrics
from pdserve.services.router.placement.policy import Rules
from pdserve.services.worker.metrics import WorkerMetrics

TICK_S = 0.25
SCRAPE_S = 15.0
BLOCK = 16
MODEL = "m"
CARD = pb.ModelCard(
    name=MODEL,
    kv_identity=pb.KvIdentity(digest=b"same"),
    kv_spec=encode_spec(KvSpec(BLOCK, (LayerGroup((0,), "full", 0, 1, 64, "bfloat16", 0, 1),))),
)


@dataclass(frozen=True)
class Machine:
    """What a worker can do, and how long its pod takes to be ready."""

    prompt_tokens_s: float = 2560.0  # of a prefill worker, and of a decode worker beside its rows
    token_s: float = 10.0  # tokens a second of each stream
    rows: int = 64
    kv_tokens: int = 65536
    start_s: float = 30.0
    waiting: dict[str, int] = field(default_factory=dict)  # by role: prompts that it lets wait
    drain_s: float = 610.0


@dataclass(eq=False)
class Prompt:
    """An attempt at a worker."""

    attempt: bytes
    num_tokens: int  # of the prompt
    left: float  # of them to compute here
    max_tokens: int = 0
    kv_here: bool = True  # False: a prefill worker is to send it
    made: float = 0.0  # tokens of the answer
    said: int = 0


@dataclass(eq=False)
class Pod:
    """A pod of a worker: it starts, serves, drains, ends."""

    number: int
    role: Role
    ready_at: float
    worker: Worker | None = None
    drains_since: float | None = None
    prompts: dict[bytes, Prompt] = field(default_factory=dict)  # to be computed here, in order
    streams: dict[bytes, Prompt] = field(default_factory=dict)  # rows, or whose KV is on its way
    last_command: bytes = b""
    rate: float = 0.0  # measured; 0: none yet

    @property
    def name(self) -> str:
        return f"pdserve-{Role.Name(self.role).lower()}-{self.number}"

    @property
    def rows(self) -> list[Prompt]:
        return [s for s in self.streams.values() if s.kv_here]

    def load(self, machine: Machine) -> Load:
        """Its figures, as its engine would report them."""
        prefills, computing = self.role == PREFILL, min(1, len(self.prompts))
        on_its_way = [s for s in self.streams.values() if not s.kv_here]
        used = sum(s.num_tokens + int(s.made) for s in self.rows)
        total = machine.kv_tokens // BLOCK
        blocks = min(total, -(-used // BLOCK))
        return Load(
            running=len(self.rows) + computing,
            waiting=len(self.prompts) - computing + len(on_its_way),
            waiting_tokens=round(sum(p.left for p in self.prompts.values())),
            blocks_total=total,
            blocks_free=total - blocks,
            blocks_used=blocks,
            promised_tokens=0 if prefills else sum(s.num_tokens for s in on_its_way),
            prefill_tokens_s=self.rate,
            last_command=self.last_command,
        )


class Client:
    """Counts how requests end; it reads no rows."""

    key = b"gateway"
    reads_rows = False

    def __init__(self) -> None:
        self.asked: dict[str, float] = {}  # requests without an end, and when they came
        self.begun: set[str] = set()
        self.waits: list[float] = []  # to the first token
        self.ends: Counter[str] = Counter()  # ok, refused or late (no token), broken (after one)
        self.now = 0.0

    def put(self, event: RequestEvent) -> None:
        kind = event.WhichOneof("event")
        name = getattr(event, kind).request
        if kind == "tokens" and name not in self.begun:
            self.begun.add(name)
            self.waits.append(self.now - self.asked[name])
        elif kind == "finished":
            self._end(name, "ok")
        elif kind == "failed":
            late = event.failed.failure.code == pb.QUEUE_TIMEOUT
            self._end(name, "broken" if name in self.begun else "late" if late else "refused")

    def put_token(self, choice: Any, position: int, id_: int) -> bool:
        raise AssertionError("it reads no rows")

    def _end(self, name: str, how: str) -> None:
        del self.asked[name]
        self.begun.discard(name)
        self.ends[how] += 1


class ScaledCluster:
    """Its pods are as many as the autoscalers say. It is what RouterMetrics asks of a router."""

    def __init__(self, autoscalers: list[Autoscaler], machine: Machine, seed: int) -> None:
        self.now = 100.0
        self.machine = machine
        self.rng = Random(seed)
        self.fleet = Fleet()
        self.deaths: Counter[tuple[str, str]] = Counter()
        self.dispatcher = Dispatcher(
            self.fleet, Rules("auto", 512), self._send, Random(seed), 512, 0.0
        )
        self.client = Client()
        self.scraped = Scraped()
        self.autoscalers = {a.target: a for a in autoscalers}
        self.pods: list[Pod] = []
        self.replicas = {name: a.least for name, a in self.autoscalers.items()}
        self.history: list[tuple[float, str, int]] = []
        self.longest_drain = 0.0
        self.num_cut = 0  # pods that were killed at the end of their drain
        self._metrics = RouterMetrics(self)  # type: ignore[arg-type]
        self._commands: deque[tuple[Worker, Any]] = deque()
        self._numbers = 0
        self._scrape_at, self._sync_at = (self.now + self.rng.uniform(0, SYNC_S) for _ in "12")
        for name in self.replicas:
            self._make_pods(name, self.now)

    # --- time

    def ask(self, num_tokens: int, max_tokens: int) -> None:
        """A request of a client; nothing of its prompt is cached anywhere."""
        name = f"r{self.client.ends.total() + len(self.client.asked)}-{self.rng.random()}"
        self.client.asked[name] = self.now
        start = pb.Start(
            request=name,
            model=MODEL,
            cache_salt=name.encode(),
            params=pb.SamplingParams(n=1, max_tokens=max_tokens),
            remaining_ms=600_000,
            queue_remaining_ms=60_000,
        )
        self.dispatcher.submit(RequestProgress(start, [7] * num_tokens), self.client, self.now)
        self._carry_out()

    def tick(self) -> None:
        """Let TICK_S pass."""
        self.now += TICK_S
        self.client.now = self.now
        for pod in list(self.pods):
            self._live(pod)
        for worker in self.fleet.workers.values():
            self.fleet.heard(worker, self.now)
        self.dispatcher.tick(self.now)
        self._carry_out()
        if self.now >= self._scrape_at:
            self._scrape_at += SCRAPE_S
            self.scraped.seen(self._targets(), self.now)
        if self.now >= self._sync_at:
            self._sync_at += SYNC_S
            for name in self.autoscalers:
                self._sync(name)

    def figure(self, name: str) -> float:
        """A metric of the router now; 0 if it exports none."""
        found = [s.value for m in self._metrics.collect() for s in m.samples if s.name == name]
        return max(found, default=0.0)

    # --- pods

    def of(self, name: str) -> list[Pod]:
        """Pods of a Deployment that nobody has told to end."""
        role = {"pdserve-prefill": PREFILL, "pdserve-decode": DECODE}[name]
        return [p for p in self.pods if p.role == role and p.drains_since is None]

    def _sync(self, name: str) -> None:
        ready = sum(p.worker is not None for p in self.of(name))
        scaler, before = self.autoscalers[name], self.replicas[name]
        after = scaler.sync(lambda q: self.scraped.ask(q, self.now), before, ready, self.now)
        if after != before:
            self.replicas[name] = after
            self.history.append((self.now, name, after))
            self._make_pods(name, self.now + self.machine.start_s)
            # Pods that are not ready go first, then the newest.
            going = sorted(self.of(name), key=lambda p: (p.worker is None, p.number))[after:]
            for pod in going:
                self._end(pod)

    def _make_pods(self, name: str, ready_at: float) -> None:
        role = PREFILL if name == "pdserve-prefill" else DECODE
        while len(self.of(name)) < self.replicas[name]:
            self._numbers += 1
            self.pods.append(Pod(self._numbers, role, ready_at))

    def _end(self, pod: Pod) -> None:
        pod.drains_since = self.now
        if pod.worker is None:
            self.pods.remove(pod)
            return
        self.fleet.goodbye(pod.worker)
        if pod.role == PREFILL:  # it ends what it has begun and hands back the rest
            for prompt in list(pod.prompts.values())[1:]:
                del pod.prompts[prompt.attempt]
                failed = wire.PrefillFailed(
                    attempt=prompt.attempt,
                    handed_back=True,
                    failure=pb.Failure(code=pb.UNAVAILABLE, message="drains"),
                )
                self._say(pod, wire.PrefillEvent(failed=failed))

    def _live(self, pod: Pod) -> None:
        if pod.worker is None:
            if self.now < pod.ready_at:
                return
            self._join(pod)
        if pod.prompts:
            self._compute(pod)
        self._generate(pod)
        assert pod.worker is not None
        pod.worker.report(pod.load(self.machine))
        self.dispatcher.on_load(pod.worker, self.now)
        self._carry_out()
        if pod.drains_since is not None:
            since, empty = self.now - pod.drains_since, not pod.prompts and not pod.streams
            if empty or since >= self.machine.drain_s:
                self.longest_drain = max(self.longest_drain, since)
                self.num_cut += not empty
                self.pods.remove(pod)
                pod.worker.said_goodbye = True
                self.fleet.lost(pod.worker)
                self.dispatcher.disconnected(pod.worker, not empty, self.now)

    def _join(self, pod: Pod) -> None:
        hello = WorkerHello(
            role=pod.role,
            boot=pod.number.to_bytes(16),
            address=f"10.0.{pod.number // 250}.{pod.number % 250}:1",
            card=CARD,
            transports=["tcp"],
            wire_version=2,
        )
        pod.worker, _ = self.fleet.join(hello, self.now)
        self.dispatcher.joined(pod.worker)
        self.dispatcher.connected(pod.worker, self.now)

    def _compute(self, pod: Pod) -> None:
        """Prompts, in order of arrival."""
        budget = self.machine.prompt_tokens_s * TICK_S
        pod.rate = self.machine.prompt_tokens_s
        while budget > 0 and pod.prompts:
            prompt = next(iter(pod.prompts.values()))
            if pod.role == DECODE and len(pod.rows) >= self.machine.rows:
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

    def _hand_off(self, pod: Pod, attempt: bytes) -> None:
        for other in self.pods:
            if attempt in other.streams:
                other.streams[attempt].kv_here = True
        self._say(pod, wire.PrefillEvent(done=wire.PrefillDone(attempt=attempt)))

    def _generate(self, pod: Pod) -> None:
        """A stream says its first token, and the others when it ends."""
        for stream in pod.rows[: self.machine.rows]:
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

    # --- what the router says

    def _send(self, worker: Worker, command: Any) -> None:
        self._commands.append((worker, command))

    def _say(self, pod: Pod, event: Any) -> None:
        assert pod.worker is not None
        if isinstance(event, wire.PrefillEvent):
            self.dispatcher.on_prefill(pod.worker, event, self.now)
        else:
            self.dispatcher.on_decode(pod.worker, event, self.now)

    def _carry_out(self) -> None:
        while self._commands:
            worker, command = self._commands.popleft()
            pod = next((p for p in self.pods if p.worker is worker), None)
            if pod is not None:
                kind = command.WhichOneof("command")
                getattr(self, f"_on_{kind}")(pod, getattr(command, kind))

    def _on_admit(self, pod: Pod, admit: wire.Admit) -> None:
        num_tokens = len(admit.start.prompt_ids)
        remote = bool(admit.prefill_boot)
        prompt = Prompt(
            admit.attempt, num_tokens, num_tokens, admit.start.params.max_tokens, not remote
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
        self._say(pod, wire.DecodeEvent(admitted=wire.Admitted(attempt=admit.attempt, ticket=ticket)))

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
        """It did stay."""

    # --- what is scraped

    def _targets(self) -> list[tuple[str, list[Any]]]:
        targets = [("pdserve-router-0", list(self._metrics.collect()))]
        for pod in self.pods:
            if pod.worker is not None:
                worker = WorkerMetrics(pod.worker.hello)
                worker.load = pod.worker.load
                targets.append((pod.name, list(worker.collect())))
        return targets
