"""The stateful parts of the simulated cluster: capacities of workers, pods, the client."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pdserve.engine.kv import KvSpec, LayerGroup, encode_spec
from pdserve.protos import common_pb2 as pb
from pdserve.protos.fleet_pb2 import PREFILL, Load, Role
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.router.fleet import Worker

BLOCK = 16
MODEL = "m"
CARD = pb.ModelCard(
    name=MODEL,
    kv_identity=pb.KvIdentity(digest=b"same"),
    kv_spec=encode_spec(KvSpec(BLOCK, (LayerGroup((0,), "full", 0, 1, 64, "bfloat16", 0, 1),))),
)


@dataclass(frozen=True)
class Machine:
    """The capacity of a worker, and the time until its pod is ready."""

    # of a prefill worker, and of a decode worker in addition to its rows
    prompt_tokens_s: float = 2560.0
    token_s: float = 10.0  # tokens per second of each stream
    kv_tokens: int = 65536
    start_s: float = 30.0
    rows: int = 128
    waiting: dict[str, int] = field(default_factory=dict)  # by Deployment: prompts that may wait
    drain_s: float = 610.0


@dataclass(eq=False)
class Prompt:
    """An attempt at a worker."""

    attempt: bytes
    num_tokens: int  # of the prompt
    left: float  # tokens to compute here
    max_tokens: int = 0
    kv_here: bool = True  # False: a prefill worker is to send it
    gives_up: float = 0.0  # when it has waited too long for its first step
    made: float = 0.0  # tokens of the answer
    said: int = 0


@dataclass(eq=False)
class Pod:
    """A pod of a worker: it starts, serves, drains, ends."""

    number: int
    role: Role
    ready_at: float
    drains_since: float | None = None
    # one for each router; empty while it starts
    workers: list[Worker] = field(default_factory=list)
    prompts: dict[bytes, Prompt] = field(default_factory=dict)  # to be computed here, in order
    # rows, or streams whose KV is being transferred
    streams: dict[bytes, Prompt] = field(default_factory=dict)
    last_command: bytes = b""
    rate: float = 0.0  # measured; 0: none yet

    @property
    def name(self) -> str:
        return f"pdserve-{Role.Name(self.role).lower()}-{self.number}"

    @property
    def rows(self) -> list[Prompt]:
        return [s for s in self.streams.values() if s.kv_here]

    def load(self, machine: Machine) -> Load:
        """The load that its engine would report."""
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
    """Count how requests end, without reading rows."""

    key = b"gateway"
    reads_rows = False

    def __init__(self) -> None:
        self.arrived: dict[str, float] = {}  # open requests, and their arrival times
        self.begun: set[str] = set()
        self.waits: list[float] = []  # to the first token
        self.ends: Counter[str] = Counter()  # ok, refused or late (no token), broken (after one)
        self.now = 0.0

    def put(self, event: RequestEvent) -> None:
        kind = event.WhichOneof("event")
        name = getattr(event, kind).request
        if kind == "tokens" and name not in self.begun:
            self.begun.add(name)
            self.waits.append(self.now - self.arrived[name])
        elif kind == "finished":
            self._end(name, "ok")
        elif kind == "failed":
            late = event.failed.failure.code == pb.QUEUE_TIMEOUT
            self._end(name, "broken" if name in self.begun else "late" if late else "refused")

    def put_token(self, choice: Any, position: int, id_: int) -> bool:
        raise AssertionError("it reads no rows")

    def _end(self, name: str, how: str) -> None:
        del self.arrived[name]
        self.begun.discard(name)
        self.ends[how] += 1
