"""All requests of the router: places them, queues them, routes workers' events to them.

Synchronous, time is an argument; the shell around it owns the sockets. One flow per (client,
request); messages that name an unknown or ended attempt are counted and ignored.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

from pdserve.engine.handoff.recorder.event_log import EventLog
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.fleet_pb2 import DECODE, PREFILL
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.request_progress import RequestProgress
from pdserve.services.router.fleet.compatibility import KvCompatibility
from pdserve.services.router.fleet.fleet import Fleet, Worker
from pdserve.services.router.placement.facts import FactsOfWorkers, destination
from pdserve.services.router.placement.policy import Rules, decide
from pdserve.services.router.placement.promised_chains import PromisedChains
from pdserve.services.router.placement.queues import Queues
from pdserve.services.router.placement.recompute_budget import RecomputeBudget
from pdserve.services.router.requests import adoption, single_flight, worker_events
from pdserve.services.router.requests.effects import Attempt, Client
from pdserve.services.router.requests.migration import Migrations, leaving
from pdserve.services.router.requests.recently_finished import RecentlyFinished
from pdserve.services.router.requests.refusal import refusal
from pdserve.services.router.requests.request import MAX_CANDIDATES, RoutedRequest

log = logging.getLogger(__name__)

MAX_ADMITTING = 16  # unanswered Admits of one decode worker
BUSY_S = 0.1  # a busy worker is asked again after this, or with its next load
YOUNG_S = 5.0  # workers may still be joining a router of this age
Command = wire.DecodeCommand | wire.PrefillCommand


class Dispatcher:
    """Implements Switchboard for its flows."""

    def __init__(
        self,
        fleet: Fleet,
        rules: Rules,
        send: Callable[[Worker, Command], None],
        rng: Random,
        max_queued: int,
        now: float,
    ) -> None:
        self.fleet = fleet
        self._rules = rules
        self._send = send
        self._rng = rng
        self._max_queued = max_queued
        self._started = now
        self._num_flows = 0
        self._flows: dict[tuple[bytes, str], RoutedRequest] = {}
        self._by_attempt: dict[bytes, RoutedRequest] = {}
        self._admitting: Counter[bytes] = Counter()  # by boot of the decode worker
        self._queues: Queues[RoutedRequest] = Queues()
        self._models: set[str] = set()  # every name that was ever served here
        self.draining = False
        self.trace = EventLog()
        self.prefills: Counter[str] = Counter()  # "local", "remote"
        self.reasons: Counter[str] = Counter()  # of decisions
        self.outcomes: Counter[str] = Counter()  # "ok" or the error code's name
        self.num_retries = 0
        self.num_adopted = 0  # attempts that went on where another session had left them
        self.migrations: RecomputeBudget[RoutedRequest] = RecomputeBudget()
        self.num_stale = 0
        self.num_frozen = 0  # engines found frozen
        self.kinship = KvCompatibility(rules.mixing)
        self._endings = RecentlyFinished()
        self.promised = PromisedChains()
        self.moves = Migrations(self)

    @property
    def num_running(self) -> int:
        return len(self._flows)

    @property
    def num_attended(self) -> int:
        """Requests whose client is here; the gateway of the others has gone, or went elsewhere."""
        return sum(flow.orphan_since is None for flow in self._flows.values())

    @property
    def num_queued(self) -> int:
        return len(self._queues) + self.migrations.num_waiting + len(self.kinship.stranded)

    # --- clients

    def submit(self, answer: RequestProgress, client: Client, now: float) -> None:
        """Take a request; whatever is wrong with it arrives as its Failed."""
        start = answer.start
        key = (client.key, start.request)
        old, asked = self._flows.get(key), None
        if old is not None:
            if start.epoch <= old.epoch:
                self.num_stale += 1
                return
            asked = adoption.hand_on(old, start, answer)
            self._forget(old)
        self._endings.restore(key, start)
        self._num_flows += 1
        flow = RoutedRequest(self, answer, client, self._num_flows, now)
        self._flows[key] = flow
        if asked is not None:
            self._by_attempt[asked.id] = flow
            adoption.take_over(flow, asked)
            return
        full = self.num_queued >= self._max_queued and not self._can_begin(flow, now)
        young = now - self._started < YOUNG_S
        error = refusal(flow, self.draining, full, self._models, young)
        if error is not None:
            flow.fail(error.code, error.message, now, error.param, error.retry_after_s)
        elif answer.complete:
            flow.fail(pb.INVALID_ARGUMENT, "every choice has already ended", now, "choices")
        elif start.HasField("placement"):
            adoption.seek(flow, now)
        else:
            self.place(flow, now)

    def cancel(self, client: Client, request: str, choices: tuple[int, ...], now: float) -> None:
        """A client's Cancel; of an unknown request it is stale."""
        flow = self._flows.get((client.key, request))
        if flow is None:
            self.num_stale += 1
        else:
            flow.cancel(choices, now)
            self.pump(now)

    def client_gone(self, client: Client, now: float) -> None:
        """Its session ended: its requests end too, unless issued again in time."""
        for flow in self._flows.values():
            if flow.owner is client and flow.orphan_since is None:
                flow.orphan_since = now

    # --- Switchboard

    def emit(self, flow: RoutedRequest, event: RequestEvent) -> None:
        if event.HasField("tokens"):
            self.migrations.runs(flow)
        flow.owner.put(event)

    def find(self, boot: bytes) -> Worker | None:
        worker = self.fleet.get(boot)
        return worker if worker and worker.connected and not worker.frozen else None

    def may_join(self, boot: bytes, now: float) -> bool:
        worker = self.fleet.get(boot)
        return now - self._started < YOUNG_S if worker is None else not worker.frozen

    def adopted(self, flow: RoutedRequest) -> None:
        self.num_adopted += 1
        if flow.answer.begun:
            self.migrations.runs(flow)

    def to_decode(self, worker: Worker, command: wire.DecodeCommand) -> None:
        self._send(worker, command)

    def to_prefill(self, worker: Worker, command: wire.PrefillCommand) -> None:
        self._send(worker, command)

    def opened(self, flow: RoutedRequest, attempt: Attempt, now: float) -> None:
        self._by_attempt[attempt.id] = flow
        if attempt.adopted:  # no new work, and its beginning is in the trace
            return
        self.trace.route(attempt.id, flow.num_attempts, flow.ordinal)
        self._admitting[attempt.decode.boot] += 1
        tokens = 0 if attempt.follows or attempt.moves else len(attempt.ids)
        attempt.decode.commanded(attempt.id, tokens if attempt.prefill is None else 0, now)
        if attempt.prefill is not None:
            attempt.prefill.commanded(attempt.id, tokens, now)
        self.num_retries += flow.num_attempts > 1 and not attempt.moves

    def closed(self, attempt: Attempt) -> None:
        if not attempt.adopted:
            self.trace.unroute(attempt.id, attempt.lost)
        self.promised.drop(attempt.id)
        flow = self._by_attempt.pop(attempt.id, None)
        if flow is not None and flow.move is not None and flow.move.source is attempt:
            self.moves.drop(flow, "its source is over")
        if flow is not None:
            self.migrations.stopped(flow)
        if flow is not None and not attempt.answered:
            self.answered(attempt)
        attempt.decode.unreported.pop(attempt.id, None)
        if attempt.prefill is not None:
            attempt.prefill.unreported.pop(attempt.id, None)

    def flows(self) -> Iterable[RoutedRequest]:
        return self._flows.values()

    def leaving(self) -> list[Worker]:
        return leaving(w for w in self.fleet.workers.values() if w.hello.role == DECODE)

    def answered(self, attempt: Attempt) -> None:
        attempt.answered = True
        self._admitting[attempt.decode.boot] -= 1
        if not self._admitting[attempt.decode.boot]:
            del self._admitting[attempt.decode.boot]

    def ended(self, flow: RoutedRequest, now: float, error: ServiceError | None) -> None:
        self._forget(flow)
        if error is None and flow.attempt is not None:
            self._endings.add((flow.owner.key, flow.request), flow.epoch, flow.placement, now)
        self.outcomes["ok" if error is None else pb.ErrorCode.Name(error.code)] += 1

    def _forget(self, flow: RoutedRequest) -> None:
        self.kinship.stranded.pop(flow, None)
        key = (flow.owner.key, flow.request)
        if self._flows.get(key) is flow:
            del self._flows[key]
        self.migrations.forget(flow)
        self._queues.remove(flow)

    # --- placing

    def place(self, flow: RoutedRequest, now: float) -> None:
        if flow.answer.begun:
            self._migrate(flow, now)
        elif not self._can_begin(flow, now) or not self._begin(flow, now):
            flow.refused.clear()
            self._queues.add(flow)

    def _migrate(self, flow: RoutedRequest, now: float) -> None:
        """Begin to compute a running request again, or have it wait for its turn."""
        free = self.migrations.room and bool(self._candidates(flow, now))
        if free and self._begin(flow, now):
            self.migrations.begun(flow)
        else:
            flow.refused.clear()
            self.migrations.wait(flow)

    def _can_begin(self, flow: RoutedRequest, now: float) -> bool:
        """Whether it is its turn and a worker may take it; past its deadline only its end comes."""
        if flow.deadline is not None and now >= flow.deadline:
            return False
        head = self._queues.head(flow.model)
        first = head is None or head.ordinal >= flow.ordinal
        return first and bool(self._candidates(flow, now))

    def _candidates(self, flow: RoutedRequest, now: float) -> list[Worker]:
        if len(flow.refused) >= MAX_CANDIDATES:
            return []
        if self.draining and flow.orphan_since is not None:
            return []  # its gateway has taken it to another router
        return [
            w
            for w in self.fleet.of(DECODE, flow.model)
            if w.takes_work(now)
            and w.boot not in flow.refused
            and self.kinship.may_continue(flow, w.identity)
            and self._admitting[w.boot] < MAX_ADMITTING
        ]

    def place_for(self, flow: RoutedRequest, now: float) -> Worker | None:
        boot = destination(flow, self._candidates(flow, now), self._rules.mixing, self._rng, now)
        return None if boot is None else self.fleet.workers[boot]

    def _begin(self, flow: RoutedRequest, now: float) -> bool:
        ids, salt = flow.answer.prefix_ids(), flow.answer.start.cache_salt
        facts = FactsOfWorkers(ids, salt, flow.verified, self.promised, now)
        decodes = [facts.of(w) for w in self._candidates(flow, now)]
        prefills = [facts.of(w) for w in self.fleet.of(PREFILL, flow.model) if w.takes_work(now)]
        decision = decide(flow.facts(), decodes, prefills, self._rules, self._rng)
        if decision is None:
            return False
        self.reasons[decision.reason] += 1
        why, cached = decision.reason, decision.cached_tokens
        log.debug("%s, %d tokens cached at decode", why, cached, extra={"request": flow.request})
        if flow.beginning.expected is None:
            flow.beginning.expected = cached
        decode = self.fleet.workers[decision.decode]
        prefill = None if decision.prefill is None else self.fleet.workers[decision.prefill]
        self.kinship.left_out(decode.boot, decision.refused)
        shares = single_flight.SharedKv(self._rules.min_shared_tokens, decision.follows)
        attempt = flow.begin(decode, prefill, shares, now)
        self.promised.add(attempt.id, decode.boot, facts.chain(decode))
        return True

    def pump(self, now: float) -> None:
        """Begin what waits, in order of arrival, as far as workers take it."""
        if self.migrations.num_waiting and self.migrations.room:
            for flow in self.migrations.take_waiting():
                workers = self.fleet.of(DECODE, flow.model)
                if not self.kinship.strand(flow, workers, now):
                    self._migrate(flow, now)
        for model in self._queues.models:
            workers = self.fleet.of(DECODE, model)
            while (head := self._queues.head(model)) is not None:
                stranded = self.kinship.strand(head, workers, now)
                if not stranded and not self._can_begin(head, now):
                    break
                self._queues.remove(head)
                if not stranded and not self._begin(head, now):
                    self._queues.add(head)
                    break

    # --- workers

    def joined(self, worker: Worker, now: float) -> None:
        """A worker said hello."""
        if worker.hello.role == DECODE:
            self._models.add(worker.model)

    def connected(self, worker: Worker, now: float) -> None:
        """The session to it is up."""
        worker.connected = True
        if worker.hello.role == DECODE:
            for flow in self.kinship.welcome(worker):
                self.place(flow, now)
        self.tick(now)  # requests may be looking for it

    def disconnected(self, worker: Worker, died: bool, now: float) -> None:
        """The session to it is down, or it is dead: its attempts are lost."""
        worker.connected = False
        self._lost(worker, "died" if died else "session lost", died, now)

    def frozen(self, worker: Worker, now: float) -> None:
        """Its engine does nothing, and nobody knows when it will: its attempts are lost."""
        self.num_frozen += 1
        self._lost(worker, "frozen", True, now)

    def _lost(self, worker: Worker, how: str, strike: bool, now: float) -> None:
        for flow in list(self._by_attempt.values()):
            self.moves.worker_lost(flow, worker, strike, now)
            flow.worker_lost(worker, how, strike, now)
        self.pump(now)

    def on_load(self, worker: Worker, now: float) -> None:
        """A load report made room."""
        if worker.hello.role == DECODE:
            self.pump(now)

    def on_decode(self, worker: Worker, event: wire.DecodeEvent, now: float) -> None:
        """An event of a decode session."""
        kind = event.WhichOneof("event")
        if kind is None:
            return
        message = getattr(event, kind)
        flow = self._by_attempt.get(message.attempt)
        if kind == "moved":  # it may come after the target's first words
            self.moves.num_bytes += message.sent_bytes
        if flow is not None and self.moves.took(flow, worker, kind, message, now):
            self.pump(now)
            return
        if flow is None or flow.attempt is None or flow.attempt.decode is not worker:
            self.num_stale += 1
            return
        attempt = flow.attempt
        if kind in worker_events.PRODUCTS:
            self._count(flow, attempt)
        elif kind in worker_events.ANSWERS and not attempt.answered:
            self.answered(attempt)
        if kind in ("admitted", "resumed"):
            self.kinship.admitted(flow, attempt)
        elif kind == "busy":
            worker.busy_until = now + BUSY_S
        worker_events.of_decode(flow, kind, message, now)
        if kind not in ("tokens", "verified"):  # neither makes room
            self.pump(now)

    def _count(self, flow: RoutedRequest, attempt: Attempt) -> None:
        if not flow.counted:
            flow.counted = True
            self.prefills["local" if attempt.prefill is None else "remote"] += 1

    def on_prefill(self, worker: Worker, event: wire.PrefillEvent, now: float) -> None:
        """An event of a prefill session."""
        kind = event.WhichOneof("event")
        if kind is None:
            return
        message = getattr(event, kind)
        flow = self._by_attempt.get(message.attempt)
        if flow is None or flow.attempt is None or flow.attempt.prefill is not worker:
            self.num_stale += 1
        else:
            if kind == "done":
                self.kinship.handed_off(flow.attempt)
            worker_events.of_prefill(flow, kind, message, now)

    def tick(self, now: float) -> None:
        """Deadlines, and workers that are asked again."""
        for flow in list(self._flows.values()):
            flow.tick(now)
        for flow in self.kinship.overdue(now):
            text = "no worker is left with the weights that began this answer"
            flow.fail(pb.UNAVAILABLE, text, now, "", 1.0)
        self._endings.tick(now)
        self.moves.tick(now)
        self.pump(now)
