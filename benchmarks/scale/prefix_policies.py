"""The placements that the simulator of prefix routing compares: simple policies, and the real
routers.

A simple policy knows the current state of the workers exactly, without a router in between.

- Round robin.
- Least load: the fewest requests; among equals the fewest waiting prompt tokens.
- An oracle: it knows every cache and what is about to be in it. It picks the worker with the lowest
  sum of the real backlog and `work_ratio` times the uncached part of the prompt. The higher the
  ratio, the more hits, until queues form at the workers with large caches. With prefill workers it
  picks the idlest decode worker, unless one lacks too little for a hand-off.

Each real router is a Dispatcher with its Fleet that gets the same messages as in a cluster: loads
at most every 50 ms, prefix events, the answers of workers, each DELAY_S late. Requests are
distributed over them as by a gateway (gateway/router_client/routing.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Any

from prefix_fleet import DELAY_S, MIN_SHARED, PlacedRequest, SimulatedFleet
from prefix_trace import BLOCK_TOKENS, TraceRequest
from prefix_worker import SimulatedWorker

from pdserve.engine.kv import KvIdentity, KvSpec, cache_seed, chain_hashes, encode_spec
from pdserve.gateway.router_client import choose
from pdserve.gateway.router_client.routing import KEY_IDS, Recent, conversation
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.common.rpc import NumberedChoice, RequestProgress
from pdserve.services.router.dispatcher import Dispatcher
from pdserve.services.router.fleet import Fleet, Worker
from pdserve.services.router.placement import Rules
from pdserve.services.worker.membership import LOAD_INTERVAL_S

MODEL = "m"
TICK_S = 0.05
IDENTITY = pb.KvIdentity(digest=b"simulated")
Pick = Callable[[Sequence[SimulatedWorker], TraceRequest], SimulatedWorker]


class DirectPlacement:
    """Admit requests where `pick_decode` says, with the prefill worker of `pick_prefill` if the
    uncached part of the prompt is worth a hand-off."""

    def __init__(self, fleet: SimulatedFleet, pick_decode: Pick, pick_prefill: Pick) -> None:
        self._fleet = fleet
        self._pick_decode = pick_decode
        self._pick_prefill = pick_prefill
        self._sides = {side.worker: side for side in fleet.decodes}

    def arrived(self, request: TraceRequest) -> None:
        fleet, prefill = self._fleet, None
        decode = self._pick_decode([side.worker for side in fleet.decodes], request)
        if fleet.prefills and missing(request, decode) >= MIN_SHARED:
            prefill = self._pick_prefill(fleet.prefills, request)
        self._sides[decode].admit(PlacedRequest(request, self._sides[decode], prefill, self))

    def admitted(self, placed: PlacedRequest, ticket: bool, follows: bool) -> None:
        if ticket:
            self._fleet.start_prefill(placed)

    def placed_again(self, placed: PlacedRequest, tokens: int) -> None:
        self.arrived(placed.request)

    def attached(self, placed: PlacedRequest) -> None: ...
    def prefill_done(self, placed: PlacedRequest) -> None: ...
    def first_token(self, placed: PlacedRequest) -> None: ...
    def finished(self, placed: PlacedRequest) -> None: ...


def missing(request: TraceRequest, worker: SimulatedWorker) -> int:
    """Prompt tokens that a worker will have to compute: neither cached nor in transfer."""
    return request.num_tokens - worker.num_expected(request.full_blocks) * BLOCK_TOKENS


def round_robin(fleet: SimulatedFleet) -> DirectPlacement:
    decodes, prefills = count(), count()

    def pick_decode(workers: Sequence[SimulatedWorker], request: TraceRequest) -> SimulatedWorker:
        return workers[next(decodes) % len(workers)]

    def pick_prefill(workers: Sequence[SimulatedWorker], request: TraceRequest) -> SimulatedWorker:
        return workers[next(prefills) % len(workers)]

    return DirectPlacement(fleet, pick_decode, pick_prefill)


def least_load(fleet: SimulatedFleet) -> DirectPlacement:
    def pick(workers: Sequence[SimulatedWorker], request: TraceRequest) -> SimulatedWorker:
        return min(workers, key=lambda w: (w.num_requests, w.waiting_tokens))

    return DirectPlacement(fleet, pick, pick)


def oracle(fleet: SimulatedFleet, work_ratio: int) -> DirectPlacement:
    def pick(workers: Sequence[SimulatedWorker], request: TraceRequest) -> SimulatedWorker:
        def cost(worker: SimulatedWorker) -> tuple[float, float]:
            ahead = worker.true_backlog + work_ratio * missing(request, worker)
            return ahead, worker.work.seconds

        return min(workers, key=cost)

    def pick_decode(workers: Sequence[SimulatedWorker], request: TraceRequest) -> SimulatedWorker:
        warm = [w for w in workers if missing(request, w) < MIN_SHARED]
        if fleet.prefills and not warm:
            return min(workers, key=lambda w: w.num_requests)
        return pick(warm if fleet.prefills else workers, request)

    return DirectPlacement(fleet, pick_decode, pick)


class _Gateway:
    """A gateway that drops a router's messages."""

    key = b"gateway"
    reads_rows = True

    def put(self, event: RequestEvent) -> None:
        pass

    def put_token(self, choice: NumberedChoice, position: int, id_: int) -> bool:
        return True


@dataclass(eq=False, slots=True)
class _Router:
    """One router, as a gateway sees it."""

    address: str
    fleet: Fleet
    dispatcher: Dispatcher
    num_open: int = 0
    recent: Recent = field(default_factory=Recent)

    def load(self, now: float) -> float:
        return self.num_open + self.recent.count(now)


class RealRouters:
    """A Placement by one or several routers."""

    def __init__(self, simulated: SimulatedFleet, num_routers: int, seed: int) -> None:
        self._simulated = simulated
        self._clock = simulated.clock
        self._gateway = _Gateway()
        self._sides = {side.worker.number: side for side in simulated.decodes}
        self._numbers = {_incarnation(w.number): w for w in self._workers}
        self._routers = [self._router(number, seed) for number in range(num_routers)]
        self._requests: dict[str, tuple[TraceRequest, _Router]] = {}
        self._placed: dict[bytes, PlacedRequest] = {}
        self._hashes: dict[int, bytes] = {}  # of blocks, which have the same hash in every prompt
        self._last_command: dict[int, bytes] = {}  # by worker: attempt
        self._reporting: set[int] = set()  # workers whose next load is due
        self._said_s: dict[int, float] = {}  # when a worker last reported its load
        self._sequence: dict[int, int] = {}
        self._ticking = False
        for worker in self._workers:
            worker.changed = partial(self._changed, worker)

    @property
    def _workers(self) -> list[SimulatedWorker]:
        return [*(side.worker for side in self._simulated.decodes), *self._simulated.prefills]

    @property
    def reasons(self) -> dict[str, int]:
        """How often each reason was given."""
        found: dict[str, int] = {}
        for router in self._routers:
            for reason, times in router.dispatcher.placer.reasons.items():
                found[reason] = found.get(reason, 0) + times
        return found

    def _router(self, number: int, seed: int) -> _Router:
        fleet = Fleet()
        router = _Router(f"router-{number}:7000", fleet, None)  # type: ignore[arg-type]
        rules = Rules("auto", MIN_SHARED)
        rng = Random(f"{seed} {number}")
        router.dispatcher = Dispatcher(fleet, rules, partial(self._send, router), rng, 1 << 20, 0.0)
        decodes = len(self._simulated.decodes)
        for worker in self._workers:
            hello = fleet_pb2.WorkerHello(
                role=fleet_pb2.DECODE if worker.number < decodes else fleet_pb2.PREFILL,
                incarnation=_incarnation(worker.number),
                address=f"10.0.0.{worker.number}:1",
                card=pb.ModelCard(
                    name=MODEL,
                    kv_identity=IDENTITY,
                    kv_spec=encode_spec(KvSpec(BLOCK_TOKENS, ())),
                ),
                transports=["tcp"],
            )
            known, _ = fleet.join(hello, 0.0)
            router.dispatcher.joined(known)
            router.dispatcher.connected(known, 0.0)
            known.prefixes.apply(fleet_pb2.PrefixEvents(reset=True))
        return router

    # --- requests

    def arrived(self, request: TraceRequest) -> None:
        now = self._clock.now
        ids = [token for block in request.blocks for token in (block,) * BLOCK_TOKENS]
        del ids[request.num_tokens :]
        self._note_hashes(request, ids)
        name = f"r{len(self._requests)}"
        start = pb.Start(request=name, epoch=1, model=MODEL, prompt_ids=ids[:KEY_IDS])
        start.params.max_tokens = request.output_len
        router = choose(self._routers, conversation(start), now)
        assert router is not None
        router.num_open += 1
        router.recent.add(now)
        self._requests[name] = request, router
        progress = RequestProgress(start, ids)
        self._later(partial(router.dispatcher.submit, progress, self._gateway), router)

    def _note_hashes(self, request: TraceRequest, ids: Sequence[int]) -> None:
        blocks = request.full_blocks
        if any(block not in self._hashes for block in blocks):
            seed = cache_seed(KvIdentity.of(IDENTITY).digest, b"")
            self._hashes |= zip(blocks, chain_hashes(ids[:-1], BLOCK_TOKENS, seed), strict=True)

    def _send(self, router: _Router, worker: Worker, command: Any) -> None:
        kind = command.WhichOneof("command")
        number = self._numbers[worker.incarnation].number
        if kind == "admit":
            admit = command.admit
            prefill = self._numbers.get(admit.prefill_incarnation)
            request, _ = self._requests[admit.start.request]
            placed = PlacedRequest(request, self._sides[number], prefill, self, admit.attempt)
            self._placed[admit.attempt] = placed
            self._clock.after(DELAY_S, partial(self._admit, placed))
        elif kind == "start":
            placed = self._placed[command.start.attempt]
            self._clock.after(DELAY_S, partial(self._start_prefill, placed))
        elif kind != "ids_part":
            raise RuntimeError(f"the simulator knows no {kind}")

    def _admit(self, placed: PlacedRequest) -> None:
        self._last_command[placed.decode.worker.number] = placed.attempt
        placed.decode.admit(placed)

    def _start_prefill(self, placed: PlacedRequest) -> None:
        assert placed.prefill is not None
        self._last_command[placed.prefill.number] = placed.attempt
        self._simulated.start_prefill(placed)
        accepted = wire.PrefillAccepted(attempt=placed.attempt)
        says = partial(self._prefill_says, placed, accepted=accepted)
        self._clock.after(DELAY_S, says)

    # --- messages of workers

    def admitted(self, placed: PlacedRequest, ticket: bool, follows: bool) -> None:
        said = wire.Admitted(attempt=placed.attempt, follows=follows)
        if ticket:
            said.ticket.id = placed.attempt
        self._decode_says(placed, admitted=said)

    def attached(self, placed: PlacedRequest) -> None:
        self._decode_says(placed, attached=wire.Attached(attempt=placed.attempt))

    def placed_again(self, placed: PlacedRequest, tokens: int) -> None:
        again = wire.PlaceAgain(attempt=placed.attempt, tokens=tokens)
        self._decode_says(placed, place_again=again)

    def prefill_done(self, placed: PlacedRequest) -> None:
        self._prefill_says(placed, done=wire.PrefillDone(attempt=placed.attempt))

    def _prefill_says(self, placed: PlacedRequest, **event: Any) -> None:
        assert placed.prefill is not None
        router = self._router_of(placed)
        worker = router.fleet.workers[_incarnation(placed.prefill.number)]
        router.dispatcher.on_prefill(worker, wire.PrefillEvent(**event), self._clock.now)

    def first_token(self, placed: PlacedRequest) -> None:
        self._tokens(placed, 0, 1)

    def finished(self, placed: PlacedRequest) -> None:
        self._tokens(placed, 1, placed.request.output_len)
        router = self._router_of(placed)
        self._decode_says(placed, finished=pb.Finished(attempt=placed.attempt))
        router.num_open -= 1
        del self._placed[placed.attempt]

    def _tokens(self, placed: PlacedRequest, position: int, end: int) -> None:
        whole = end == placed.request.output_len
        finish = pb.LENGTH if whole else pb.FINISH_REASON_UNSPECIFIED
        ids = range(position, end)
        said = pb.Tokens(attempt=placed.attempt, position=position, ids=ids, finish=finish)
        self._decode_says(placed, tokens=said)

    def _decode_says(self, placed: PlacedRequest, **event: Any) -> None:
        router = self._router_of(placed)
        worker = router.fleet.workers[_incarnation(placed.decode.worker.number)]
        router.dispatcher.on_decode(worker, wire.DecodeEvent(**event), self._clock.now)

    def _router_of(self, placed: PlacedRequest) -> _Router:
        for router in self._routers:
            if placed.attempt in router.dispatcher.attempts:
                return router
        raise RuntimeError("a worker speaks of an attempt that no router has")

    def _later(self, call: Any, router: _Router) -> None:
        self._clock.after(DELAY_S, lambda: call(self._clock.now))
        if not self._ticking:
            self._ticking = True
            self._clock.after(TICK_S, self._tick)

    def _tick(self) -> None:
        """Tick while requests wait for a worker."""
        for router in self._routers:
            router.dispatcher.tick(self._clock.now)
        self._ticking = any(router.dispatcher.num_queued for router in self._routers)
        if self._ticking:
            self._clock.after(TICK_S, self._tick)

    # --- loads and prefixes

    def _changed(self, worker: SimulatedWorker) -> None:
        self._say_prefixes(worker)
        if worker.number not in self._reporting:
            self._reporting.add(worker.number)
            said = self._said_s.get(worker.number, -LOAD_INTERVAL_S)
            wait = max(0.0, said + LOAD_INTERVAL_S - self._clock.now)
            self._clock.after(wait, partial(self._say_load, worker))

    def _say_load(self, worker: SimulatedWorker) -> None:
        self._reporting.discard(worker.number)
        self._said_s[worker.number] = self._clock.now
        load = fleet_pb2.Load(
            running=worker.num_running,
            waiting=worker.num_waiting + worker.num_claims,
            waiting_tokens=worker.waiting_tokens,
            blocks_total=self._simulated.shape.speed.blocks,
            blocks_free=worker.cache.num_free,
            blocks_cached=worker.cache.num_idle,
            last_command=self._last_command.get(worker.number, b""),
        )
        self._clock.after(DELAY_S, partial(self._hear_load, worker, load))

    def _hear_load(self, worker: SimulatedWorker, load: fleet_pb2.Load) -> None:
        for router in self._routers:
            known = router.fleet.workers[_incarnation(worker.number)]
            known.report(load)
            router.dispatcher.on_load(known, self._clock.now)

    def _say_prefixes(self, worker: SimulatedWorker) -> None:
        cache = worker.cache
        if not cache.added and not cache.removed:
            return
        added = [self._hashes[block] for block in cache.added]
        removed = [self._hashes[block] for block in cache.removed]
        sequence = self._sequence.get(worker.number, 0)
        events = [
            fleet_pb2.PrefixEvents(sequence=sequence, added=added),
            fleet_pb2.PrefixEvents(sequence=sequence + len(added), removed=removed),
        ]
        sequence += len(added) + len(removed)
        self._sequence[worker.number] = sequence
        cache.added, cache.removed = [], []
        self._clock.after(DELAY_S, partial(self._hear_prefixes, worker, events))

    def _hear_prefixes(
        self, worker: SimulatedWorker, events: Sequence[fleet_pb2.PrefixEvents]
    ) -> None:
        for router in self._routers:
            for event in events:
                router.fleet.workers[_incarnation(worker.number)].prefixes.apply(event)


def _incarnation(number: int) -> bytes:
    return (number + 1).to_bytes(16)
