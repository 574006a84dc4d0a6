"""Connects the router's parts (fleet, requests, worker sessions) to each other and to the clock.

Only this module reads the clock; the modules that it uses take the time as an argument.
"""

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Collection, Iterable

from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos.router_pb2 import FleetView, WorkerView
from pdserve.protos.worker_pb2 import DecodeEvent
from pdserve.services.common.auth.access import Access
from pdserve.services.common.capabilities import merged_card
from pdserve.services.common.rpc import RequestProgress, TokenRow
from pdserve.services.common.tracing import NO_TRACER, Tracer
from pdserve.services.router.dispatcher import Dispatcher
from pdserve.services.router.fleet import MAX_INDEXED_BLOCKS, Event, Fleet, Worker, WorkerSessions
from pdserve.services.router.placement import Rules, WorkerPool
from pdserve.services.router.request import Client, PickedHost, PickQuery

log = logging.getLogger(__name__)

TICK_S = 0.05
STALL_S = 0.5  # gap between two ticks from which the router itself stood still


class RouterCore:
    """The router's logic behind its gRPC services: fleet, requests and worker sessions. Construct
    it inside the running event loop."""

    def __init__(
        self,
        access: Access,
        rules: Rules,
        max_queued: int,
        tracer: Tracer = NO_TRACER,
        prefix_index_hashes: int = MAX_INDEXED_BLOCKS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.incarnation = os.urandom(16)
        self.fleet = Fleet(prefix_index_hashes)
        self.worker_sessions = WorkerSessions(access, self.incarnation, self)
        self.dispatcher = Dispatcher(
            self.fleet,
            rules,
            self.worker_sessions.send,
            random.Random(),
            max_queued,
            self._loop.time(),
            tracer,
        )
        self.num_isolations = 0  # times that it heard from too few workers
        self.deaths: Counter[tuple[str, str]] = (
            Counter()
        )  # without a drain before, by model and role
        self._idle = asyncio.Event()  # while draining: set when the last client has left
        # Ends only by a failure or by `close`.
        self.ticker = asyncio.create_task(self._tick(), name="router tick")

    async def close(self) -> None:
        """Stop the router's timer and end all sessions with workers."""
        self.ticker.cancel()
        await asyncio.gather(self.ticker, return_exceptions=True)
        await self.worker_sessions.close_all()

    @property
    def now(self) -> float:
        """Current time of the event loop's clock in seconds; all times in the router are readings
        of it."""
        return self._loop.time()

    @property
    def draining(self) -> bool:
        return self.dispatcher.draining

    def stop_taking(self) -> None:
        """Refuse all new requests from now on; requests in the router continue."""
        self.dispatcher.drain()

    async def drain(self) -> None:
        """Refuse new requests, and return when no request in the router has a connected client any
        more."""
        self.stop_taking()
        if self.dispatcher.num_attended:
            await self._idle.wait()

    async def _tick(self) -> None:
        now = self._loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            last_tick, now = now, self._loop.time()
            if now - last_tick >= STALL_S:
                self.fleet.excuse(now - last_tick, now)
            was_isolated = self.fleet.isolated
            self._lose(self.fleet.tick(now))
            self._forget_leaving()
            self.num_isolations += self.fleet.isolated and not was_isolated
            self.dispatcher.tick(now)
            if self.draining and not self.dispatcher.num_attended:
                self._idle.set()

    def _lose(self, dead: list[Worker]) -> None:
        in_use = self.dispatcher.workers_in_use() if dead else ()
        for worker in dead:
            if worker.draining and worker not in in_use:
                log.info("worker %s has drained and ended", worker.address)
            elif not worker.leaving:
                log.warning(
                    "worker %s died or cannot be reached; its requests continue on other workers",
                    worker.address,
                )
            self.deaths[_model_and_role(worker.hello)] += worker.stays
            self.worker_sessions.close(worker)
            self.dispatcher.disconnected(worker, died=worker.stays, now=self._loop.time())

    def _forget_leaving(self) -> None:
        """Forget the workers that deregistered from this router and run none of its requests any
        more. The next `report` of such a worker ends its join stream."""
        leaving = self.fleet.leaving()
        used = self.dispatcher.workers_in_use() if leaving else ()
        for worker in leaving:
            if worker not in used:
                log.info(
                    "the router forgets worker %s, which deregistered from it and runs none of its "
                    "requests any more",
                    worker.address,
                )
                self._lose(self.fleet.lost(worker))

    # --- join streams

    def join(self, hello: fleet_pb2.WorkerHello) -> Worker:
        """Register a worker at the start of its join stream, and open a session with it."""
        now = self._loop.time()
        worker, dead = self.fleet.join(hello, now)
        self._lose(dead)
        self.worker_sessions.open(worker)
        self.dispatcher.joined(worker)
        model, role = _model_and_role(hello)
        self.deaths[model, role] += 0  # so that the Prometheus counter starts at zero
        log.info(
            "the %s worker %s registered with this router and serves model %s",
            role,
            hello.address,
            model,
        )
        return worker

    def report(self, worker: Worker, report: fleet_pb2.WorkerReport, lease: int) -> bool:
        """Process a message that a registered worker sent on its join stream: load, heartbeat,
        prefix cache events or goodbye. Returns False if the worker must register again: the router
        has forgotten it, its current join stream has ended, or some of its prefix cache events are
        missing. A worker that reaches this router by two addresses has two join streams; `lease` is
        the number of the stream, and messages on all but the newest are ignored."""
        now = self._loop.time()
        if self.fleet.get(worker.incarnation) is not worker or not worker.lease:
            return False
        if worker.lease != lease:
            return True
        self.fleet.heard(worker, now)
        kind = report.WhichOneof("report")
        if kind == "load":
            worker.report(report.load)
            self.dispatcher.on_load(worker, now)
            if report.HasField("load_beat"):
                self._beat(worker, report.load_beat, now)
        elif kind == "heartbeat":
            self._beat(worker, report.heartbeat, now)
        elif kind == "prefixes":
            if not worker.prefixes.apply(report.prefixes):
                text = "worker %s must register again: some of its prefix cache events are missing"
                log.warning(text, worker.address)
                return False
        elif kind == "goodbye":
            action = "deregisters from this router" if report.goodbye.leaves else "is draining"
            log.info(
                "worker %s gets no new requests, because it %s; its reason: %s",
                worker.address,
                action,
                report.goodbye.reason,
            )
            self.fleet.deregister(worker, report.goodbye.leaves)
        return True

    def _beat(self, worker: Worker, heartbeat: fleet_pb2.Heartbeat, now: float) -> None:
        if not self.fleet.beat(worker, heartbeat, now):
            return
        address = worker.address
        if worker.frozen:
            log.warning(
                "the engine of worker %s is frozen (it makes no progress); its requests continue "
                "on other workers",
                address,
            )
            self.dispatcher.frozen(worker, now)
        else:
            log.warning("the engine of worker %s makes progress again after it was frozen", address)
            self.dispatcher.tick(now)

    def left(self, worker: Worker, lease: int) -> None:
        """Process the end of a worker's join stream: suspect the worker, or forget it if it had
        deregistered and its session has ended too."""
        self._lose(self.fleet.stream_ended(worker, lease, self._loop.time()))

    # --- SessionListener of the worker sessions

    def up(self, worker: Worker) -> None:
        self.dispatcher.connected(worker, self._loop.time())

    def down(self, worker: Worker) -> None:
        worker.connected = False

    def broken(self, worker: Worker) -> None:
        self.dispatcher.disconnected(worker, died=False, now=self._loop.time())

    def refused(self, worker: Worker) -> None:
        self._lose(self.fleet.lost(worker))

    def event(self, worker: Worker, event: Event) -> None:
        now = self._loop.time()
        self.fleet.witnessed(worker, now)
        if isinstance(event, DecodeEvent):
            self.dispatcher.on_decode(worker, event, now)
        else:
            self.dispatcher.on_prefill(worker, event, now)

    def rows(self, worker: Worker, rows: Iterable[TokenRow]) -> None:
        now = self._loop.time()
        self.fleet.witnessed(worker, now)
        self.dispatcher.on_rows(worker, rows, now)

    # --- clients

    def submit(self, progress: RequestProgress, client: Client) -> None:
        """Accept or refuse a request of a client, which receives the request's events."""
        self.dispatcher.submit(progress, client, self._loop.time())

    def cancel(self, client: Client, request: str, choices: tuple[int, ...] = ()) -> None:
        """Cancel a client's request, or only the given choices of the request."""
        self.dispatcher.cancel(client, request, choices, self._loop.time())

    def client_gone(self, client: Client) -> None:
        """Process the end of a gateway's session: end its requests, unless the gateway issues them
        again in time."""
        self.dispatcher.client_gone(client, self._loop.time())

    def pick(self, query: PickQuery) -> list[PickedHost]:
        """Return the hosts whose decode workers suit an endpoint picker's prompt, the best
        first."""
        return self.dispatcher.placer.pick(query, self._loop.time())

    def decodes_at(self, hosts: Collection[str]) -> bool:
        """Return whether a decode worker of any model runs on one of the hosts."""
        workers = self.fleet.workers.values()
        return any(w.role == fleet_pb2.DECODE and w.host in hosts for w in workers)

    def refuses(self, pool: WorkerPool, tenant: bytes) -> bool:
        """Return whether a new request of this tenant for the workers of `pool` would be refused
        now because too many requests wait."""
        return self.dispatcher.placer.refuses(pool, tenant, self._loop.time())

    def models(self) -> list[pb.ModelCard]:
        """Return one model info (ModelCard) for each model name that decode workers accept work
        for, sorted by name. If workers with different tokenizers serve a name, the tokenizer with
        the most workers counts, of equals the newest."""
        pools: dict[str, dict[str, list[pb.ModelCard]]] = {}
        for worker in self.fleet.workers.values():
            if worker.role == fleet_pb2.DECODE and worker.stays:
                tokenizers = pools.setdefault(worker.model, {})
                infos = tokenizers.setdefault(worker.identity.tokenizer, [])
                infos.append(worker.hello.card)
        newest_first = {name: reversed(list(pools[name].values())) for name in sorted(pools)}
        return [merged_card(max(tokenizers, key=len)) for tokenizers in newest_first.values()]

    def view(self) -> FleetView:
        """Return the workers with their loads and states, and the router's counters, for metrics
        and status pages."""
        now = self._loop.time()
        return FleetView(
            workers=[
                WorkerView(hello=w.hello, load=w.load, state=w.state.value, silent_s=now - w.heard)
                for w in self.fleet.workers.values()
            ],
            router_incarnation=self.incarnation,
            prefill_local=self.dispatcher.prefills["local"],
            prefill_remote=self.dispatcher.prefills["remote"],
            retries=self.dispatcher.num_retries,
            moves=self.dispatcher.migrations.num_done,
            moves_failed=self.dispatcher.migrations.failed.total(),
            moved_tokens=self.dispatcher.migrations.num_tokens,
            moved_bytes=self.dispatcher.migrations.num_bytes,
        )


def _model_and_role(hello: fleet_pb2.WorkerHello) -> tuple[str, str]:
    """Return a worker's model name and its role in lower case (prefill or decode), as metric
    labels."""
    return hello.card.name, fleet_pb2.Role.Name(hello.role).lower()
