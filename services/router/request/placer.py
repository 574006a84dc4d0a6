"""Places requests: applies the placement policy, begins attempts, and queues requests that must
wait.

A request waits for its turn, for the recompute budget, or for a worker that is compatible with its
generated tokens (placement/waiting.py). A request that is compatible with no present worker waits
in a line for such requests, for at most COMPATIBLE_WORKER_WAIT_S, so that it does not block the
requests behind it.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from random import Random
from typing import NamedTuple

from pdserve.engine.kv import KvIdentity
from pdserve.protos.fleet_pb2 import DECODE, PREFILL
from pdserve.services.common.capabilities import SCORE
from pdserve.services.router.fleet import (
    COMPATIBLE_WORKER_WAIT_S,
    Fleet,
    KvCompatibility,
    State,
    Worker,
    taking_work,
)
from pdserve.services.router.placement import (
    EMBEDDING,
    FactsOfWorkers,
    PickedPrompts,
    PromisedChains,
    PromptFacts,
    RecomputeBudget,
    Rules,
    WaitingQueue,
    WaitReason,
    WorkerPool,
    decide,
    decode_costs,
    destination,
    prompt_key,
)
from pdserve.services.router.request import actions as do
from pdserve.services.router.request import events as on
from pdserve.services.router.request.effects import Assignment
from pdserve.services.router.request.request import RoutedRequest

log = logging.getLogger(__name__)

MAX_ADMITTING = 16  # unanswered Admits of one decode worker
WITHOUT_WORKER_S = 1.0  # without any worker, before another router of a sharded fleet tries


class PickQuery(NamedTuple):
    """Query of an endpoint picker: a prompt, and the hosts from which to pick one for it."""

    pool: WorkerPool
    ids: list[int]
    cache_salt: bytes
    hosts: Collection[str]  # hosts whose decode workers are allowed


class PickedHost(NamedTuple):
    """A host in the reply to an endpoint picker, and how many tokens of the prompt are cached
    there."""

    host: str
    cached_tokens: int


class Placer:
    """Places all requests of one router: holds the queue of waiting requests, and chooses workers
    for them."""

    def __init__(self, fleet: Fleet, rules: Rules, rng: Random, max_queued: int) -> None:
        self._fleet = fleet
        self._rules = rules
        self._rng = rng
        self.draining = False
        self.waiting: WaitingQueue[RoutedRequest] = WaitingQueue(max_queued)
        self.budget: RecomputeBudget[RoutedRequest] = RecomputeBudget()
        self.compatibility = KvCompatibility(rules.resuming)
        self.promised = PromisedChains()
        self.picks = PickedPrompts(self.promised)
        self.admitting: Counter[bytes] = (
            Counter()
        )  # unanswered, by incarnation of the decode worker
        self.reasons: Counter[str] = Counter()  # of decisions, counted
        self._without_worker: dict[RoutedRequest, float] = {}  # since when no suitable worker stays

    # --- placing

    def place(self, request: RoutedRequest, now: float) -> None:
        """Begin an attempt of the request now, or queue the request if it is not its turn or no
        worker takes it."""
        if request.state.begun:
            self._compute_again(request, now)
            return
        workers = self._candidates_in_time(request, now) if self._is_first(request, now) else []
        if not workers or not self._begin(request, workers, now):
            self._wait(request, WaitReason.TURN, now)

    def _wait(self, request: RoutedRequest, reason: WaitReason, now: float) -> None:
        self.waiting.add(request, reason, now)
        request.step(on.Queued(), now)

    def _compute_again(self, request: RoutedRequest, now: float) -> None:
        """Begin an attempt that recomputes a request with generated tokens, or queue the request
        until the recompute budget and a worker have room."""
        workers = self._candidates(request, now) if self.budget.has_room else []
        if workers and self._begin(request, workers, now):
            self.budget.recompute_begun(request)
        else:
            self._wait(request, WaitReason.BUDGET, now)

    def can_begin(self, request: RoutedRequest, now: float) -> bool:
        """Return whether an attempt of the request could begin now: it is the request's turn, and a
        worker takes it."""
        return self._is_first(request, now) and bool(self._candidates_in_time(request, now))

    def _is_first(self, request: RoutedRequest, now: float) -> bool:
        """Return whether the request is next in turn: no waiting request for the same workers comes
        before it. Embeddings share only some workers with other requests, so a waiting request of
        the other kind counts only if a worker takes it now."""
        model, tokenizer, pooling = request.pool
        for pool in self.waiting.pools:
            same_tokenizer = "" in (pool.tokenizer, tokenizer) or pool.tokenizer == tokenizer
            same_pool = pool.model == model and same_tokenizer
            head = self.waiting.head(pool) if same_pool else None
            if head is None or head is request:
                continue
            if pool.pooling != pooling and not self._candidates_in_time(head, now):
                continue
            if head.tenant != request.tenant or head.rank < request.rank:
                return False
        return True

    def _candidates_in_time(self, request: RoutedRequest, now: float) -> Sequence[Worker]:
        """Return the decode workers that may take the request now; none once the request's deadline
        has passed."""
        deadline = request.state.deadline
        late = deadline is not None and now >= deadline
        return [] if late else self._candidates(request, now)

    def _candidates(self, request: RoutedRequest, now: float) -> Sequence[Worker]:
        state = request.state
        if self.draining and state.orphan_since is not None:
            return []  # its gateway has taken it to another router
        workers = (
            self._free(self._compatible_workers(request), now) if state.has_candidates_left else []
        )
        return (
            [w for w in workers if w.incarnation not in state.refused] if state.refused else workers
        )

    def _compatible_workers(self, request: RoutedRequest) -> Sequence[Worker]:
        workers = self._fleet.of(DECODE, request.model)
        return serving(self.compatibility.able(request.origin, workers), request.pool)

    def is_unread(self, request: RoutedRequest) -> bool:
        """Return whether no staying worker has the tokenizer that made the request's prompt ids,
        while workers with another tokenizer serve its model, so that the prompt must be tokenized
        again."""
        has_other = False
        for worker in self._fleet.of(DECODE, request.model):
            if worker.stays:
                if reads(worker, request.pool.tokenizer):
                    return False
                has_other = True
        return has_other

    def _begin(self, request: RoutedRequest, workers: Sequence[Worker], now: float) -> bool:
        """Begin an attempt of the request on the workers that the placement policy chooses;
        `workers` are the candidates for decode. Returns False if the policy chooses none."""
        picked = self._picked_worker(request, now)
        facts = self._facts(request, self.promised, now)
        decodes = facts.of_all(workers)
        if self.picks:
            decodes = [self.picks.counted(worker, now) for worker in decodes]
        if picked is not None:
            decodes = [worker for worker in decodes if worker.incarnation == picked] or decodes
        senders = facts.of_all(taking_work(self._fleet.of(PREFILL, request.model), now))
        decision = decide(request.facts(), decodes, senders, self._rules, self._rng)
        if decision is None:
            return False
        self.reasons[decision.reason] += 1
        reason, cached = decision.reason, decision.cached_tokens
        log.debug(
            "workers chosen for the request: %s; the decode worker has %d of its tokens cached",
            reason,
            cached,
            extra={"request": request.id},
        )
        if request.beginning.expected is None:
            request.beginning.expected = cached
        decode = self._fleet.workers[decision.decode]
        prefill = None if decision.prefill is None else self._fleet.workers[decision.prefill]
        self.compatibility.count_left_out(decode.incarnation, decision.refused)
        min_shared = self._rules.min_shared_tokens
        attempt = request.begin(decode, prefill, decision.follows, min_shared, now)
        self.promised.add(attempt, decode.incarnation, facts.chain(decode))
        return True

    def _picked_worker(self, request: RoutedRequest, now: float) -> bytes | None:
        """Return the incarnation of the worker that an endpoint picker was given for the request's
        prompt, once for each pick; None if there was no pick, or if the request has been tried
        before."""
        if not self.picks or request.state.num_attempts:
            return None
        start = request.progress.start
        key = prompt_key(request.model, start.cache_salt, request.progress.prompt_ids)
        return self.picks.take(key, now)

    # --- endpoint pickers

    def pick(self, query: PickQuery, now: float) -> list[PickedHost]:
        """Return the hosts for an endpoint picker's query, the best for the prompt first, each
        once; empty if none of the query's hosts has a live decode worker for the model. The worker
        on the first host counts as picked (PickedPrompts)."""
        pool = query.pool
        allowed = [
            worker
            for worker in serving(self._fleet.of(DECODE, pool.model), pool)
            if worker.state is State.LIVE and worker.connected and worker.host in query.hosts
        ]
        self.picks.forget_old(now)  # their promises would count below
        facts = FactsOfWorkers(
            query.ids,
            query.cache_salt,
            {},
            self._fleet.prefixes,
            self.promised,
            now,
            pool.uses_cache,
        )
        free = self._free(allowed, now) or allowed
        workers = [self.picks.counted(candidate, now) for candidate in facts.of_all(free)]
        senders = facts.of_all(taking_work(self._fleet.of(PREFILL, pool.model), now))
        prompt = PromptFacts(len(query.ids) - 1)
        decision = decide(prompt, workers, senders, self._rules, self._rng)
        if decision is None:
            return []
        costs = decode_costs(prompt, workers, math.inf)
        by_cost = sorted(zip(costs, workers, strict=True), key=lambda pair: pair[0])
        others = [w for _, w in by_cost if w.incarnation != decision.decode]
        best = self._fleet.workers[decision.decode]
        cached = {w.incarnation: min(w.cached_tokens, prompt.num_tokens) for w in workers}
        order = [best, *(self._fleet.workers[w.incarnation] for w in others)]
        waits = decision.follows or decision.prefill is not None  # for KV, as in `opened`
        key = prompt_key(pool.model, query.cache_salt, query.ids)
        self.picks.add(
            key, best.incarnation, facts.chain(best), 0 if waits else len(query.ids), now
        )
        cached_by_host: dict[str, int] = {}
        for worker in order:
            cached_by_host.setdefault(worker.host, cached[worker.incarnation])
        return [PickedHost(host, tokens) for host, tokens in cached_by_host.items()]

    def refuses(self, pool: WorkerPool, tenant: bytes, now: float) -> bool:
        """Return whether a new request of the tenant for the workers of `pool` can neither begin
        nor wait, so that it would be refused."""
        if self.waiting.has_room(tenant):
            return False
        head = self.waiting.head(pool)
        workers = serving(self._fleet.of(DECODE, pool.model), pool)
        return head is not None or not self._free(workers, now)

    def _free(self, workers: Iterable[Worker], now: float) -> Sequence[Worker]:
        """Return those of the decode workers that take one more request now: they accept work, and
        fewer than MAX_ADMITTING Admits to them are unanswered."""
        taking = taking_work(workers, now)
        full = {incarnation for incarnation, num in self.admitting.items() if num >= MAX_ADMITTING}
        return [w for w in taking if w.incarnation not in full] if full else taking

    def _facts(
        self, request: RoutedRequest, promised: PromisedChains, now: float
    ) -> FactsOfWorkers:
        ids, salt = request.progress.prefix_ids(), request.progress.start.cache_salt
        return FactsOfWorkers(
            ids,
            salt,
            request.verified,
            self._fleet.prefixes,
            promised,
            now,
            request.pool.uses_cache,
        )

    def target_for(self, request: RoutedRequest, now: float) -> Worker | None:
        """Return another decode worker to which the running request can migrate with its KV, or
        None."""
        if request.assignment is None:
            return None
        facts = self._facts(request, PromisedChains(), now)
        source = facts.of(request.assignment.decode)
        others = facts.of_all(self._candidates(request, now))
        ids = request.progress.prefix_ids()
        incarnation = destination(ids, source, others, self._rules.mixing, self._rng)
        return None if incarnation is None else self._fleet.workers[incarnation]

    def remote_tokens(self, request: RoutedRequest) -> int:
        """Return how many tokens a prefill worker would compute for the request if no worker had
        cached any; 0 if decode computes the prompt."""
        tokens, mode = len(request.progress.prompt_ids), self._rules.remote_prefill
        remote = mode == "always" or (mode == "auto" and tokens >= self._rules.threshold)
        return tokens if remote and request.progress.may_go_remote else 0

    # --- waiting requests

    def pump(self, now: float) -> None:
        """Begin attempts of waiting requests, as far as the recompute budget and the workers allow;
        tenants take turns."""
        for request in self.waiting.of(WaitReason.BUDGET) if self.budget.has_room else ():
            if not self.budget.has_room:
                break  # the requests behind it keep their turns
            self.waiting.remove(request)
            workers = self._fleet.of(DECODE, request.model)
            if not self._strand(request, workers, now):
                self._compute_again(request, now)
        for pool in self.waiting.pools:
            workers = self._fleet.of(DECODE, pool.model)
            while (head := self.waiting.head(pool)) is not None:
                if self._strand(head, workers, now):
                    continue
                free = self._candidates_in_time(head, now)
                if not free:
                    break
                self.waiting.remove(head)
                if not self._begin(head, free, now):
                    self.waiting.add(head, WaitReason.TURN, now)
                    break

    def _strand(self, request: RoutedRequest, workers: Sequence[Worker], now: float) -> bool:
        """Move the request to the line for requests without a compatible worker, if workers serve
        its model but none is compatible with it. Returns whether it was moved."""
        if not workers:
            return False
        if self._compatible_workers(request) and (
            request.state.begun or not self.is_unread(request)
        ):
            return False
        self.waiting.add(request, WaitReason.COMPATIBLE_WORKER, now)
        text = "the request waits for a worker with its weights, tokenizer and task"
        log.warning(text, extra={"request": request.id})
        return True

    def worker_connected(self, worker: Worker, now: float) -> None:
        """Place the requests that waited for a compatible worker and can continue at this one,
        which has just connected."""
        self.compatibility.joined(worker)
        for request in self.waiting.of(WaitReason.COMPATIBLE_WORKER):
            if request.model == worker.model and worker in self._compatible_workers(request):
                self.waiting.remove(request)
                self.place(request, now)

    def overdue(self, now: float) -> list[RoutedRequest]:
        """Return the requests to give up: they have waited for a compatible worker for
        COMPATIBLE_WORKER_WAIT_S, or no such worker is present or expected."""
        stranded = self.waiting.of(WaitReason.COMPATIBLE_WORKER)
        waiting = (*stranded, *self.waiting.of(WaitReason.BUDGET))
        late = [r for r in stranded if now - self.waiting.since(r) >= COMPATIBLE_WORKER_WAIT_S]
        return list(dict.fromkeys((*late, *(r for r in waiting if self._is_hopeless(r, now)))))

    def without_worker(self, now: float) -> list[RoutedRequest]:
        """Return the waiting requests that this router has had no worker for during
        WITHOUT_WORKER_S, so that another router should try. In a sharded fleet, where each worker
        joins only some routers, a restarted worker may join other routers than before."""
        has_worker: dict[tuple[WorkerPool, KvIdentity | None], bool] = {}
        for request in self.waiting:
            key = request.pool, request.origin
            if key not in has_worker:
                has_worker[key] = any(
                    w.stays and w.connected and not w.frozen
                    for w in self._compatible_workers(request)
                )
        affected = [r for r in self.waiting if not has_worker[r.pool, r.origin]]
        self._without_worker = {
            request: self._without_worker.get(request, now) for request in affected
        }
        return [
            r
            for r, since in self._without_worker.items()
            if r.given_back or now - since >= WITHOUT_WORKER_S
        ]

    def _is_hopeless(self, request: RoutedRequest, now: float) -> bool:
        """Return whether no worker can continue the request, and none that can is expected."""
        return self.compatibility.withdrawn(request.origin, now) and not self._compatible_workers(
            request
        )

    def worker_forgotten(self, worker: Worker, now: float) -> None:
        """Record that a decode worker is gone for good, so that its weights may be withdrawn
        (KvCompatibility)."""
        self.compatibility.left(worker, self._fleet.of(DECODE, worker.model), now)

    def forget(self, request: RoutedRequest) -> None:
        """Remove a request that has ended from the waiting queue and the recompute budget."""
        self.waiting.remove(request)
        self.budget.forget(request)

    # --- attempts

    def opened(self, attempt: Assignment, action: do.OpenAttempt, now: float) -> None:
        """Count the work of a new attempt at its workers, until their load reports include it."""
        tokens = 0 if action.follows or action.migrates else len(attempt.ids)
        attempt.decode.commanded(attempt.id, tokens if attempt.prefill is None else 0, now)
        if attempt.prefill is not None:
            attempt.prefill.commanded(attempt.id, tokens, now)

    def count_unanswered(self, decode: bytes, change: int) -> None:
        """Add `change` to the number of Admits that a decode worker has yet to answer."""
        self.admitting[decode] += change
        if not self.admitting[decode]:
            del self.admitting[decode]

    def stopped_following(self, attempt: Assignment, now: float) -> None:
        """Count the prompt of an attempt as work of its prefill worker, since decode does not wait
        for another prompt's KV as expected."""
        if attempt.prefill is not None:
            attempt.prefill.commanded(attempt.id, len(attempt.ids), now)

    def closed(self, request: RoutedRequest, attempt: Assignment) -> None:
        """Stop counting an attempt that ended: its promised blocks, its recomputation, and its work
        at its workers."""
        self.promised.drop(attempt.id)
        self.budget.recompute_over(request)
        attempt.decode.forget_command(attempt.id)
        if attempt.prefill is not None:
            attempt.prefill.forget_command(attempt.id)

    def taken(self, request: RoutedRequest, attempt: Assignment) -> None:
        """Record that a decode worker accepted an attempt of the request. If the worker's KV
        identity is not that of the request's earlier tokens, the response becomes inexact."""
        identity = attempt.decode.identity
        if self.compatibility.count_resume(request.id, request.origin, identity):
            request.inexact = True


def reads(worker: Worker, tokenizer: str) -> bool:
    """Return whether the worker's model has the tokenizer that made a prompt's ids. An unknown
    tokenizer (empty) of either matches any."""
    return not tokenizer or worker.identity.tokenizer in ("", tokenizer)


def serving(workers: Sequence[Worker], pool: WorkerPool) -> Sequence[Worker]:
    """Return those workers of the pool's model that are in the pool."""
    tokenizer, pooling = pool.tokenizer, pool.pooling
    if pooling == "":
        workers = [w for w in workers if not w.only_pools]
    elif pooling == EMBEDDING:
        workers = [w for w in workers if w.pooling != SCORE]
    elif pooling is not None:
        workers = [w for w in workers if w.pooling == pooling]
    return [w for w in workers if reads(w, tokenizer)] if tokenizer else workers
