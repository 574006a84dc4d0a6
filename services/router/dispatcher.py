"""Owns all requests of the router: accepts them from clients and routes workers' events to them.

A session that breaks loses its messages in flight, perhaps also `Placed`, which says where a
request runs. A decode worker keeps the last events of an ended attempt for a while (KEPT in
services/decode/lease_machine.py), and this module keeps the placement of an ended request. A client
that issues such a request again receives those events, and nothing is computed twice.

Synchronous; time is an argument, and RouterCore owns the sockets. Invariant: one request per
(client, request id). A message about an unknown or ended attempt is counted and ignored.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from random import Random

from pdserve.engine.handoff.recorder import EventLog
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.common.errors import ServiceError, quoted
from pdserve.services.common.observations import Observations
from pdserve.services.common.rpc import RequestProgress, TokenRow
from pdserve.services.common.tracing import NO_TRACER, TraceContext, Tracer
from pdserve.services.router.fleet import Command, Fleet, ServedModels, Worker
from pdserve.services.router.placement import Rules
from pdserve.services.router.request import (
    MAX_CRASHES,
    ROUTER_ERRORS,
    Assignment,
    Client,
    FailureReason,
    Migrations,
    Placer,
    Reachability,
    RoutedRequest,
    Transition,
)
from pdserve.services.router.request import actions as do
from pdserve.services.router.request import events as on

KEEP_S = 5.0  # as long as decode keeps them
Key = tuple[bytes, str]  # client, request
BUSY_S = 0.1  # a busy worker takes no work for this long, or until its next load
YOUNG_S = 5.0  # workers may still be joining a router of this age
# Bounds of the histogram of waits in the queue.
QUEUE_WAITS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class RecentlyFinished:
    """Placements (attempt and decode worker) of requests that ended in the last KEEP_S seconds, so
    that a client that missed the end of its request can still receive it."""

    def __init__(self) -> None:
        # Oldest first: epoch, placement, time of the end.
        self._ended: OrderedDict[Key, tuple[int, pb.Placement, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, key: Key, epoch: int, placement: pb.Placement, now: float) -> None:
        """Remember the epoch and the placement of a request that ended at time `now`."""
        self._ended[key] = (epoch, placement, now)
        self._ended.move_to_end(key)

    def restore(self, key: Key, start: pb.Start) -> None:
        """Add the remembered placement of an ended request to a Start that issues the request
        again, under a higher epoch and without a placement."""
        ended = self._ended.get(key)
        if ended is not None and ended[0] < start.epoch and not start.HasField("placement"):
            start.placement.CopyFrom(ended[1])

    def tick(self, now: float) -> None:
        """Forget the placements of requests that ended KEEP_S ago or earlier."""
        while self._ended and now - next(iter(self._ended.values()))[2] >= KEEP_S:
            self._ended.popitem(last=False)


class Dispatcher:
    """Owner of all requests of a router. Implements Effects, the interface through which a request
    acts on the rest of the router."""

    def __init__(
        self,
        fleet: Fleet,
        rules: Rules,
        send: Callable[[Worker, Command], None],
        rng: Random,
        max_queued: int,
        now: float,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.fleet = fleet
        self._send = send
        self._tracer = tracer
        self._started = now
        self._num_submitted = 0
        self._requests: dict[tuple[bytes, str], RoutedRequest] = {}
        self._by_attempt: dict[bytes, RoutedRequest] = {}
        self._models = ServedModels()
        self._generating = ServedModels()  # those of them with workers that generate text
        self._recently_finished = RecentlyFinished()
        self.event_log = EventLog()
        self.prefills: Counter[str] = Counter()  # "local", "remote"
        self.outcomes: Counter[str] = Counter()  # "ok" or the error code's name
        self.num_retries = 0
        self.num_adopted = 0  # attempts resumed where another session left them
        self.num_stale = 0
        self.num_frozen = 0  # engines found frozen, in total
        self.queue_waits: dict[str, Observations] = {}  # seconds in the queue, by model
        self.placer = Placer(fleet, rules, rng, max_queued)
        self.migrations = Migrations(fleet, self.placer)

    @property
    def requests(self) -> Iterator[RoutedRequest]:
        """All requests in the router that have not ended."""
        return iter(self._requests.values())

    @property
    def attempts(self) -> dict[bytes, RoutedRequest]:
        """The request of each open attempt, by attempt id; callers must not change the mapping."""
        return self._by_attempt

    def workers_in_use(self) -> set[Worker]:
        """Return the decode and prefill workers of all open attempts."""
        assignments = (request.assignment_of(id_) for id_, request in self._by_attempt.items())
        pairs = (
            (assignment.decode, assignment.prefill)
            for assignment in assignments
            if assignment is not None
        )
        return {worker for pair in pairs for worker in pair if worker is not None}

    @property
    def num_running(self) -> int:
        return len(self._requests)

    @property
    def num_attended(self) -> int:
        """Number of requests in the router whose client is still connected."""
        return sum(r.state.orphan_since is None for r in self._requests.values())

    @property
    def num_queued(self) -> int:
        return len(self.placer.waiting)

    @property
    def models(self) -> list[str]:
        """Sorted names of the models that decode workers serve, or served until recently
        (ServedModels)."""
        return self._models.names

    @property
    def draining(self) -> bool:
        """Whether the router drains and therefore refuses every new request."""
        return self.placer.draining

    def drain(self) -> None:
        """Refuse all new requests from now on; requests in the router continue."""
        self.placer.draining = True

    # --- clients

    def submit(self, progress: RequestProgress, client: Client, now: float) -> None:
        """Accept a client's request, or refuse it by sending the client Failed. If the router has
        the request already, a Start with a higher epoch replaces it, and any other is counted and
        ignored."""
        start = progress.start
        key = (client.key, start.request)
        predecessor, inherited_attempt = self._requests.get(key), None
        if predecessor is not None:
            if start.epoch <= predecessor.state.epoch:
                self.num_stale += 1
                return
            inherited_attempt = predecessor.reissue(progress, now)
            self._forget(predecessor)
        self._recently_finished.restore(key, start)
        self._num_submitted += 1
        span = self._tracer.begin("route", TraceContext(start.trace_parent, start.trace_state), now)
        request = RoutedRequest(self, progress, client, self._num_submitted, now, span)
        self._requests[key] = request
        if predecessor is not None and inherited_attempt is not None:
            request.succeed(predecessor, inherited_attempt, now)
            self._by_attempt[inherited_attempt.id] = request
            return
        error = self._refusal(request, now)
        if error is not None:
            request.step(on.RequestRefused(error), now)
        else:
            request.submit(now)

    def _refusal(self, request: RoutedRequest, now: float) -> ServiceError | FailureReason | None:
        """Return the error with which to refuse a new request, or None to accept it."""
        if self.draining:
            return ServiceError(pb.UNAVAILABLE, "the router is shutting down", "", 1.0)
        if request.state.crash_count >= MAX_CRASHES:
            return ROUTER_ERRORS[FailureReason.POISON]
        # A request that was taken once is taken again.
        resumed = request.progress.start.HasField("placement") or request.progress.begun
        if self.fleet.refuses(now) and not resumed:
            text = "the router has lost contact with too many workers"
            return ServiceError(pb.UNAVAILABLE, text, "", 1.0)
        may_wait = self.placer.waiting.has_room(request.tenant)
        full = not may_wait and not self.placer.can_begin(request, now)
        if full and not resumed:
            return ServiceError(pb.OVERLOADED, "too many requests are waiting", "", 1.0)
        recently_started = now - self._started < YOUNG_S  # workers may still be joining
        is_served = request.model in self._models or (
            recently_started and (resumed or not self._models)
        )
        start = request.progress.start
        checks_placement = (
            start.HasField("placement") and not recently_started and self.fleet.sharded
        )
        if checks_placement and self.fleet.get(start.placement.decode_incarnation) is None:
            return FailureReason.NO_WORKER_HERE  # another router may have its worker
        if not is_served and not self._models:
            return ServiceError(
                pb.UNAVAILABLE, "no worker has registered with the router yet", "", 1.0
            )
        if not is_served:
            text = f"model {quoted(request.model)} is not served"
            return ServiceError(pb.MODEL_NOT_FOUND, text, "model")
        may_generate = request.model in self._generating or recently_started or self.fleet.sharded
        if not (resumed or start.pool or may_generate):
            text = "the model's workers only embed or score; they do not generate text"
            return ServiceError(pb.INVALID_ARGUMENT, text, "model")
        if not resumed and self.placer.is_unread(request):
            text = "the model's tokenizer has changed since the prompt was tokenized; send it again"
            return ServiceError(pb.UNAVAILABLE, text, "", 1.0)
        if request.progress.complete:
            return ServiceError(pb.INVALID_ARGUMENT, "every choice has already ended", "choices")
        return None

    def cancel(self, client: Client, request: str, choices: tuple[int, ...], now: float) -> None:
        """Cancel a client's request, or only the given choices. The cancel of an unknown request is
        counted and ignored."""
        routed_request = self._requests.get((client.key, request))
        if routed_request is None:
            self.num_stale += 1
        else:
            routed_request.cancel(choices, now)
            self.placer.pump(now)

    def client_gone(self, client: Client, now: float) -> None:
        """Process the end of a client's session: end the client's requests, unless the client
        issues them again in time."""
        for request in self._requests.values():
            if request.client is client:
                request.step(on.ClientLeft(), now)

    # --- Effects

    def emit(self, request: RoutedRequest, event: RequestEvent) -> None:
        if event.HasField("tokens"):
            self.placer.budget.runs(request)
        request.client.put(event)

    def place(self, request: RoutedRequest, now: float) -> None:
        self.placer.place(request, now)

    def find(self, incarnation: bytes) -> Worker | None:
        worker = self.fleet.get(incarnation)
        return worker if worker and worker.connected and not worker.frozen else None

    def reach(self, incarnation: bytes, now: float) -> Reachability:
        worker = self.fleet.get(incarnation)
        if worker is None:
            may_join = now - self._started < YOUNG_S
        elif worker.connected and not worker.frozen:
            return Reachability.YES
        else:
            may_join = not worker.frozen
        return Reachability.NOT_YET if may_join else Reachability.NO

    def send(self, worker: Worker, command: Command) -> None:
        self._send(worker, command)

    def opened(
        self, request: RoutedRequest, attempt: Assignment, action: do.OpenAttempt, now: float
    ) -> None:
        self._by_attempt[attempt.id] = request
        if attempt.adopted:  # no new work, and its beginning is in the event log
            return
        num_attempts = request.state.num_attempts
        self.event_log.route(attempt.id, num_attempts, request.ordinal)
        self.placer.opened(attempt, action, now)
        self.num_retries += num_attempts > 1 and not action.migrates

    def stepped(self, request: RoutedRequest, transition: Transition, now: float) -> None:
        """Update all counters that depend on how a step of the state machine changed a request's
        state."""
        for incarnation, change in transition.unanswered.items():
            self.placer.count_unanswered(incarnation, change)
        if transition.resumed:
            self.num_adopted += 1
            if request.progress.begun:
                self.placer.budget.runs(request)
        if (taken := request.assignment_of(transition.taken)) is not None:
            self.placer.taken(request, taken)
        if (attempt := request.assignment_of(transition.stopped_following)) is not None:
            self.placer.stopped_following(attempt, now)
        if transition.migration_begun:
            self.migrations.begun(request)
        elif (target := request.assignment_of(transition.migrated)) is not None:
            self.migrations.done(request, len(target.ids))
        elif transition.migration_over:
            self.migrations.failed_at(transition.failed_step, request)

    def closed(self, request: RoutedRequest, attempt: Assignment, lost: str) -> None:
        if not attempt.adopted:
            self.event_log.unroute(attempt.id, lost)
        self._by_attempt.pop(attempt.id, None)
        self.placer.closed(request, attempt)

    def count_prefill(self, remote: bool) -> None:
        self.prefills["remote" if remote else "local"] += 1

    def waited(self, request: RoutedRequest, seconds: float) -> None:
        observations = self.queue_waits.setdefault(request.model, Observations(QUEUE_WAITS_S))
        observations.observe(seconds)

    def ended(
        self, request: RoutedRequest, now: float, error: ServiceError | None, served: bool
    ) -> None:
        self._forget(request)
        if served:
            epoch, placement = request.state.epoch, request.placement
            self._recently_finished.add(request.key, epoch, placement, now)
        if error is not None and error.code == pb.QUEUE_TIMEOUT and not request.state.num_attempts:
            self.waited(request, now - request.arrived)
        self.outcomes["ok" if error is None else pb.ErrorCode.Name(error.code)] += 1

    def _forget(self, request: RoutedRequest) -> None:
        if self._requests.get(request.key) is request:
            del self._requests[request.key]
        self.placer.forget(request)

    # --- workers

    def joined(self, worker: Worker) -> None:
        """Record that a worker registered; a decode worker makes its model a served one."""
        if worker.role == DECODE:
            for models in self._models_of(worker):
                models.joined(worker.model)

    def connected(self, worker: Worker, now: float) -> None:
        """Record that the session with a worker is open, and place or resume the requests that
        waited for it."""
        worker.connected = worker.was_connected = True
        if worker.role == DECODE:
            self.placer.worker_connected(worker, now)
        self.tick(now)  # requests may be looking for it

    def disconnected(self, worker: Worker, died: bool, now: float) -> None:
        """Record that a worker is dead (`died`) or that its session broke. Requests with an attempt
        at the worker resume it later or retry on other workers."""
        worker.connected = False
        self._lost(worker, "died" if died else "session lost", died, now)

    def _models_of(self, worker: Worker) -> list[ServedModels]:
        """Return the lists that have a decode worker's model because of this worker."""
        return [self._models] if worker.only_pools else [self._models, self._generating]

    def frozen(self, worker: Worker, now: float) -> None:
        """Retry on other workers the requests of a worker whose engine makes no progress."""
        self.num_frozen += 1
        self._lost(worker, "frozen", True, now)

    def _lost(self, worker: Worker, reason: str, crashed: bool, now: float) -> None:
        forgotten = self.fleet.get(worker.incarnation) is not worker
        if forgotten and worker.role == DECODE:
            self.placer.worker_forgotten(worker, now)
            # In a sharded fleet the successor of a crashed worker may join other routers.
            expected_back = worker.stays and not worker.hello.join_routers
            others = self.fleet.of(DECODE, worker.model)
            for models in self._models_of(worker):
                if not any(models in self._models_of(other) for other in others):
                    models.left(worker.model, expected_back, now)
        event = on.WorkerLost(worker.incarnation, f"{worker.address} {reason}", crashed, forgotten)
        for request in dict.fromkeys(self._by_attempt.values()):
            request.step(event, now)
        self.placer.pump(now)

    def on_load(self, worker: Worker, now: float) -> None:
        """Begin waiting requests after a decode worker's load report, which may show more room."""
        if worker.role == DECODE:
            self.placer.pump(now)

    def on_decode(self, worker: Worker, event: wire.DecodeEvent, now: float) -> None:
        """Pass an event of a decode worker to the request of its attempt. An event about an attempt
        that is not open at the worker is counted and ignored."""
        kind = event.WhichOneof("event")
        if kind is None:
            return
        message = getattr(event, kind)
        if kind == "moved":  # may come after the target's first output
            self.migrations.num_bytes += message.sent_bytes
        request = self._by_attempt.get(message.attempt)
        attempt = None if request is None else request.assignment_of(message.attempt)
        if request is None or attempt is None or attempt.decode is not worker:
            self.num_stale += 1
            return
        if kind == "busy" and attempt is request.assignment:
            worker.busy_until = now + BUSY_S
        request.on_decode(kind, message, now)
        if kind not in ("tokens", "verified"):  # neither makes room
            self.placer.pump(now)

    def on_rows(self, worker: Worker, rows: Iterable[TokenRow], now: float) -> None:
        """Pass tokens that a decode worker sent as rows to their requests. A row is the compact
        form of one token of an unfinished choice."""
        for choice, position, id_ in rows:
            request = self._by_attempt.get(choice.attempt)
            if request is not None and request.pass_on_row(worker, choice, position, id_):
                continue
            attempt = None if request is None else request.assignment_of(choice.attempt)
            if request is None or attempt is None or attempt.decode is not worker:
                self.num_stale += 1
            else:
                request.on_token(choice, position, id_, now)

    def on_prefill(self, worker: Worker, event: wire.PrefillEvent, now: float) -> None:
        """Pass an event of a prefill worker to the request of its attempt. An event about an
        attempt that is not open at the worker is counted and ignored."""
        kind = event.WhichOneof("event")
        if kind is None:
            return
        message = getattr(event, kind)
        request = self._by_attempt.get(message.attempt)
        attempt = None if request is None else request.assignment_of(message.attempt)
        if request is None or attempt is None or attempt.prefill is not worker:
            self.num_stale += 1
            return
        if kind == "done":
            self.placer.compatibility.count_handoff(worker.identity, attempt.decode.identity)
        request.on_prefill(kind, message, now)

    def tick(self, now: float) -> None:
        """Let time pass: apply the requests' deadlines, begin due migrations, and try waiting
        requests again."""
        self._recently_finished.tick(now)
        self._models.tick(now)
        self._generating.tick(now)
        if not self._requests:
            return
        for request in list(self._requests.values()):
            request.tick(now)
        for request in self.placer.overdue(now):
            requirement = "has the weights that generated the beginning of this response"
            if not request.state.begun:
                requirement = f"{request.pool.task} with the tokenizer that tokenized the prompt"
            text = f"no worker is available that {requirement}"
            error = ServiceError(pb.UNAVAILABLE, text, "", 1.0)
            request.step(on.RequestRefused(error), now)
        for request in self.placer.without_worker(now) if self.fleet.sharded else ():
            request.step(on.RequestRefused(FailureReason.NO_WORKER_HERE), now)
        self.migrations.tick(self._requests.values(), now)
        self.placer.pump(now)
