"""A dispatcher without sockets, over workers of many weights and numerics; time is a number."""

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

from pdserve.engine.kv import KvIdentity, KvSpec, LayerGroup, Mixing, encode_spec
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.common.rpc import NumberedChoice, RequestProgress
from pdserve.services.router.dispatcher import Dispatcher
from pdserve.services.router.fleet import Fleet, Worker
from pdserve.services.router.placement import Rules

GROUP = LayerGroup((0,), "full", 0, 1, 64, "bfloat16", 0, 1)
SAME = KvIdentity(b"same", "aa", "Q4_1", "cc", "70", "bfloat16", "native/avx512")
CARD: dict[str, Any] = {
    "name": "m",
    "kv_identity": pb.KvIdentity(**SAME.parts()),
    "kv_spec": encode_spec(KvSpec(16, (GROUP,))),
}


def other(**parts: Any) -> dict[str, Any]:
    """Return a card of another identity."""
    return {"kv_identity": pb.KvIdentity(**(SAME.parts() | parts))}


WEIGHTS = other(digest=b"weights", weights="bb", quantization="Q8_0")
NUMERICS = other(digest=b"numerics", numerics="native/avx2")
TOKENIZER = other(tokenizer="71")
BLOCKS = {"kv_spec": encode_spec(KvSpec(32, (GROUP,)))}


class World:
    """A dispatcher, its workers as names, and the one client."""

    key = b"gateway"
    reads_rows = False

    def __init__(
        self,
        mixing: Mixing,
        prefill: str = "always",
        resuming: Mixing | None = None,
        seed: int = 1,
    ) -> None:
        self.now = 100.0
        self.fleet = Fleet()
        self.events: list[RequestEvent] = []
        self.sent: list[tuple[Worker, Any]] = []
        self.num_joined = 0
        rules = Rules(prefill, 10, mixing=mixing, resuming=resuming or mixing)
        self.dispatcher = Dispatcher(self.fleet, rules, self._send, Random(seed), 5, 0.0)

    @property
    def core(self) -> Any:
        """Return the parts that a router's metrics read."""
        return SimpleNamespace(
            dispatcher=self.dispatcher,
            fleet=self.fleet,
            deaths=Counter(),
            num_isolations=0,
            now=self.now,
        )

    def put(self, event: RequestEvent) -> None:
        self.events.append(event)

    def put_token(self, choice: NumberedChoice, position: int, id_: int) -> bool:
        raise AssertionError("it reads no rows")

    def _send(self, worker: Worker, command: Any) -> None:
        self.sent.append((worker, command))

    def join(self, role: fleet_pb2.Role, of_hello: Any = None, **card: Any) -> Worker:
        self.num_joined += 1
        number = self.num_joined
        fields = {"transports": ["tcp"], "wire_version": 2} | (of_hello or {})
        hello = fleet_pb2.WorkerHello(
            role=role,
            incarnation=number.to_bytes(16),
            address=f"10.0.0.{number}:1",
            card=pb.ModelCard(**(CARD | card)),
            **fields,
        )
        worker, _ = self.fleet.join(hello, self.now)
        self.dispatcher.joined(worker)
        self.dispatcher.connected(worker, self.now)
        return worker

    def submit(self, request: str, **start: Any) -> None:
        start |= {"cache_salt": request.encode()}  # no request waits for the KV of another
        params = start.pop("params", pb.SamplingParams(n=1))
        message = pb.Start(request=request, model="m", params=params, **start)
        self.dispatcher.submit(RequestProgress(message, list(range(40))), self, self.now)

    def commands(self, kind: str) -> list[tuple[Worker, Any]]:
        return [(w, getattr(c, kind)) for w, c in self.sent if c.WhichOneof("command") == kind]

    def begin(self, request: str) -> Worker:
        """Check that the last Admit is of that request; admit it, and generate a token."""
        worker, admit = self.commands("admit")[-1]
        assert admit.start.request == request
        ticket = wire.Ticket(id=b"t") if admit.prefill_incarnation else None
        admitted = wire.Admitted(attempt=admit.attempt, ticket=ticket)
        self.dispatcher.on_decode(worker, wire.DecodeEvent(admitted=admitted), self.now)
        position = len(admit.start.choices[0].generated_ids) if admit.start.choices else 0
        tokens = pb.Tokens(attempt=admit.attempt, position=position, ids=[7])
        self.dispatcher.on_decode(worker, wire.DecodeEvent(tokens=tokens), self.now)
        return worker

    def finish(self, worker: Worker) -> pb.Finished:
        _, admit = self.commands("admit")[-1]
        finished = pb.Finished(attempt=admit.attempt)
        self.dispatcher.on_decode(worker, wire.DecodeEvent(finished=finished), self.now)
        return self.events[-1].finished

    def die(self, worker: Worker) -> None:
        self.fleet.lost(worker)
        self.dispatcher.disconnected(worker, True, self.now)

    def leave(self, worker: Worker) -> None:
        """Make a worker say goodbye, and end."""
        worker.draining = True
        self.fleet.lost(worker)
        self.dispatcher.disconnected(worker, False, self.now)
        self.pass_time(0.05)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.fleet.workers.values():
            self.fleet.heard(worker, self.now)
        self.dispatcher.tick(self.now)
