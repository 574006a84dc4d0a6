"""The cluster of one scenario: its processes, started by the services' main functions.

Every process is a `Process` whose name is also its host: gateway g0, router r0, prefill p0, decode
d0. A process that has died or ended may be restarted under its name, as another life.
"""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdserve.engine.api import EngineConfig
from pdserve.engine.checkpoints import CardData
from pdserve.engine.engine import Engine
from pdserve.engine.kv import KvIdentity, pool_sizes
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import EngineLimits
from pdserve.gateway.router_client import RouterClient
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.lifecycle import silent
from pdserve.services.decode.servicer import DecodeRole
from pdserve.services.prefill.servicer import PrefillRole
from pdserve.services.router import main as router_module
from pdserve.services.router.settings import RouterSettings
from pdserve.services.worker import process as worker_module
from pdserve.services.worker.settings import DecodeSettings, PrefillSettings
from simulation.clock import Process, World
from simulation.model import CONTEXT, EOS, VOCAB, Model, Sampling, spec
from simulation.network import Network
from simulation.scenario import BLOCK, CHUNK, Ask, Scenario
from simulation.seams import PORT, LoopAccess

MODEL = "simulated"
CARD = CardData(
    name=MODEL,
    architecture="Simulated",
    context_len=CONTEXT,
    vocab_size=VOCAB,
    eos_ids=(EOS,),
    bos_id=None,
    adds_bos=False,
    tokenizer_json=b"{}",
    chat_template="",
    weights_digest="00",
    quantization="none",
    created=1,
    weights_bytes=1,
)
START_LIMIT_S = 20.0


@dataclass
class Reply:
    """What a client has seen of its request."""

    ask: Ask
    ids: dict[int, list[int]] = field(default_factory=dict)  # by choice
    finish: dict[int, int] = field(default_factory=dict)
    terminal: list[str] = field(default_factory=list)  # "finished" or the error's code
    message: str = ""
    trouble: list[str] = field(default_factory=list)  # errors that no client may see
    left: bool = False  # the client closed its connection
    broken: bool = False  # its gateway died
    requested_at: float = 0.0
    first_at: float = 0.0  # time of its first token
    finished: Any = None  # the router's final message
    ended_at: float = 0.0
    num_direct: int = 0  # tokens received where they arrive
    paused: asyncio.Event | None = None
    task: Any = None

    @property
    def over(self) -> bool:
        return bool(self.terminal) or self.left or self.broken


class Node:
    """One name in the cluster and its lives."""

    def __init__(self, name: str, role: str) -> None:
        self.name = name
        self.role = role
        self.process: Process = None  # type: ignore[assignment]
        self.lives = 0
        self.expected = True  # it should be running


class Cluster:
    """The processes of a scenario. Construct it within `entered`, then call `start`."""

    def __init__(self, world: World, network: Network, scenario: Scenario) -> None:
        self.world = world
        self.network = network
        self.scenario = scenario
        self.spec = spec(BLOCK, scenario.window)
        self.supervisor = Process(world, "supervisor")
        self.replies = {ask.name: Reply(ask) for ask in scenario.asks}
        self.nodes: dict[str, Node] = {}
        counts = {
            "router": scenario.routers,
            "decode": scenario.decodes,
            "prefill": scenario.prefills,
            "gateway": scenario.gateways,
        }
        for role, count in counts.items():
            for number in range(count):
                name = f"{role[0]}{number}"
                self.nodes[name] = Node(name, role)
        self.routers = tuple(f"{n.name}:{PORT}" for n in self.of("router"))

    def of(self, role: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.role == role]

    # lives

    def launch(self, name: str) -> None:
        """Start a process unless it is alive; several faults may each restart it."""
        node = self.nodes[name]
        if node.lives and node.process.alive:
            return
        process = node.process = Process(self.world, name)
        node.lives += 1
        node.expected = True
        self.network.add(process)
        process.build = lambda: (self._engine(process, node.role), CARD)

        async def connect(address: str) -> None:
            await self.network.dial(process, address, kernel=True)

        process.connect = connect
        main = {
            "router": self._router,
            "decode": self._decode,
            "prefill": self._prefill,
            "gateway": self._gateway,
        }[node.role]
        self.world.after(0.0, process, lambda: process.create_task(self._live(node, main)))

    async def _live(self, node: Node, main: Callable[[Node], Any]) -> None:
        process = node.process
        await main(node)
        self.world.at(self.world.now, self.supervisor, process.kill)

    def _engine(self, process: Process, role: str) -> Engine:
        scenario = self.scenario
        blocks = scenario.prefill_blocks if role == "prefill" else scenario.decode_blocks
        limits = EngineLimits(
            vocab_size=VOCAB,
            context_len=CONTEXT,
            block_size=BLOCK,
            num_blocks=blocks,
            max_running=8,
            chunk_size=CHUNK,
            eos_ids=frozenset({EOS}),
        )
        return Engine(
            Model(self.spec),
            KvCache(self.spec, pool_sizes(self.spec, blocks, limits.max_running, CHUNK)),
            limits,
            Sampling(),
            kv_identity=KvIdentity(b"simulated"),
            numerics_id="simulated",
            clock=process.time,
        )

    async def _router(self, node: Node) -> None:
        settings = RouterSettings(bind=f"{node.name}:0", remote_prefill_threshold=16)
        await router_module.serve(settings, silent)

    async def _decode(self, node: Node) -> None:
        settings = DecodeSettings(bind=f"{node.name}:0", routers=self.routers)
        role = DecodeRole(settings, EngineConfig())
        node.process.service = role
        await worker_module.serve_worker(settings, role, silent)

    async def _prefill(self, node: Node) -> None:
        settings = PrefillSettings(bind=f"{node.name}:0", routers=self.routers)
        role = PrefillRole(settings, EngineConfig())
        node.process.service = role
        await worker_module.serve_worker(settings, role, silent)

    async def _gateway(self, node: Node) -> None:
        """Run the gateway's client of the routers; the HTTP side is not simulated."""
        number = int(node.name[1:])
        incarnation = self.world.rng.randbytes(16)
        client = RouterClient(self.routers, LoopAccess(self.network), incarnation)
        node.process.service = client
        drain = asyncio.Event()
        node.process.add_signal_handler(signal.SIGTERM, drain.set)
        await client.start()
        await drain.wait()
        mine = [r for r in self.replies.values() if r.ask.gateway == number]
        while any(r.task and not r.over for r in mine):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await client.close()

    # the start

    def start(self) -> None:
        for name in self.nodes:
            self.launch(name)
        world = self.world
        world.run(lambda: self.settled() or bool(world.errors), world.now + START_LIMIT_S)
        if world.errors or not self.settled():
            raise RuntimeError(f"the cluster does not start: {world.errors}")

    def settled(self) -> bool:
        """Return whether every router has a session with every worker, and every gateway with a
        router."""
        workers = [n for n in self.nodes.values() if n.role in ("prefill", "decode")]
        for node in self.of("router"):
            service = node.process.service
            if service is None:
                return False
            fleet = service.core.fleet.workers
            if sum(w.connected for w in fleet.values()) < len(workers):
                return False
        return all(
            n.process.service and n.process.service.num_connected for n in self.of("gateway")
        )

    # requests

    def ask_all(self) -> None:
        """Schedule every client's request at its time from now."""
        for reply in self.replies.values():
            node = self.of("gateway")[reply.ask.gateway]
            process = node.process
            process.on_death.append(lambda reply=reply: self._broke(reply))
            self.world.after(reply.ask.at_s, process, self._ask, process, reply)

    def _broke(self, reply: Reply) -> None:
        if not reply.over:
            reply.broken = True

    def _ask(self, process: Process, reply: Reply) -> None:
        reply.requested_at = self.world.now
        reply.task = process.create_task(self._client(process, reply), name=reply.ask.name)

    async def _client(self, process: Process, reply: Reply) -> None:
        ask = reply.ask
        start = pb.Start(
            request=ask.name,
            epoch=1,
            model=MODEL,
            prompt_ids=ask.prompt,
            seed=ask.seed,
            priority=ask.priority,
            remaining_ms=int(ask.timeout_s * 1000),
            queue_remaining_ms=60_000,
        )
        start.params.max_tokens = ask.max_tokens
        start.params.n = ask.n
        try:
            async for event in process.service.open(start, partial(self._taken, reply)):
                if reply.paused is not None:
                    await reply.paused.wait()
                self._seen(reply, event)
        except asyncio.CancelledError:
            reply.left = reply.left or not reply.terminal
            raise
        finally:
            reply.ended_at = self.world.now

    def _taken(self, reply: Reply, choice: int, id_: int) -> None:
        """Record a token that the client reads where it arrives."""
        reply.num_direct += 1
        ids = reply.ids.setdefault(choice, [])
        if reply.terminal or reply.finish.get(choice):
            reply.trouble.append(f"an id of choice {choice} after its end")
        ids.append(id_)
        reply.first_at = reply.first_at or self.world.now

    def _seen(self, reply: Reply, event: Any) -> None:
        kind = event.WhichOneof("event")
        if reply.terminal:
            reply.trouble.append(f"{kind} after the end")
        elif kind == "tokens":
            tokens = event.tokens
            ids = reply.ids.setdefault(tokens.choice, [])
            if tokens.position != len(ids):
                reply.trouble.append(f"ids from {tokens.position} after {len(ids)}")
            if reply.finish.get(tokens.choice):
                reply.trouble.append(f"ids of choice {tokens.choice} after its end")
            ids += tokens.ids
            reply.first_at = reply.first_at or self.world.now
            reply.finish[tokens.choice] = tokens.finish
        elif kind == "finished":
            reply.terminal.append("finished")
            reply.finished = event.finished
        elif kind == "failed":
            failure = event.failed.failure
            reply.terminal.append(pb.ErrorCode.Name(failure.code))
            reply.message = failure.message
