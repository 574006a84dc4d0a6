"""Queue of requests that wait for a worker, each for one reason, and the bound on how many requests
are recomputed at once; pure.

The requests of one tenant wait in order of priority and arrival; tenants take turns.
"""

import heapq
import sys
from collections.abc import Hashable, Iterator
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar

from pdserve.services.common.capabilities import SCORE
from pdserve.services.common.errors import quoted
from pdserve.services.common.fairness import FairQueue, FairShare

SHARE = 0.2  # of the requests that have generated tokens
RequestT = TypeVar("RequestT", bound=Hashable)


class WaitReason(Enum):
    """Why a request waits instead of running on a worker."""

    TURN = "turn"  # every worker of its model is busy, or others are before it
    BUDGET = "budget"  # it has tokens, and too many requests are being recomputed now
    COMPATIBLE_WORKER = "compatible worker"  # no worker may continue its tokens


EMBEDDING = "embedding"


class WorkerPool(NamedTuple):
    """What a worker must have to take a request."""

    model: str
    tokenizer: str = ""  # digest of the tokenizer that made the prompt's ids; empty: any
    # Start.pooling of a request for an embedding or a score; EMBEDDING: any kind of pooling; empty:
    # the worker must compute tokens; None: any worker.
    pooling: str | None = ""

    @property
    def task(self) -> str:
        """What the worker must do, as a verb with its object for messages."""
        if not self.pooling:
            return "generates text"
        if self.pooling == SCORE:
            return "scores pairs of texts"
        if self.pooling == EMBEDDING:
            return "computes embeddings"
        return f"computes embeddings by pooling {quoted(self.pooling)}"

    @property
    def uses_cache(self) -> bool:
        """Whether a worker can skip cached tokens of a prompt. Pooling that needs the states of all
        tokens computes them again. Encoders do too, and report no cached blocks."""
        return self.pooling in ("", "last", SCORE, None)


class WaitingRequest(Protocol):
    """Interface of a request in the WaitingQueue: what the queue must know of it."""

    @property
    def rank(self) -> tuple[int, int]:
        """Priority and arrival number of the request; unique, and kept over retries. Of a tenant's
        requests, the one with the lowest rank comes first."""

    @property
    def pool(self) -> WorkerPool:
        """The workers that the request waits for."""

    @property
    def tenant(self) -> bytes:
        """Id of the tenant that sent the request."""


R = TypeVar("R", bound=WaitingRequest)
_Entry = tuple[tuple[int, int], R]
_Line = tuple[WaitReason, WorkerPool, bytes]  # reason, pool and tenant


class WaitingQueue(Generic[R]):
    """Requests that wait for a worker, in a separate line for each reason, pool and tenant. A
    request is in at most one line."""

    def __init__(self, max_waiting: int = sys.maxsize) -> None:
        """Construct an empty queue. `max_waiting`: maximum number of waiting requests, of which
        `has_room` gives each tenant a share."""
        self._share = FairShare(max_waiting)
        # Non-empty heaps; the line whose turn is next comes first.
        self._lines: dict[_Line, list[_Entry[R]]] = {}
        self._since: dict[R, tuple[WaitReason, float]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[R]:
        return iter(self._since)

    def has_room(self, tenant: bytes) -> bool:
        """Return whether a new request of the tenant may wait, or the tenant's share of the queue
        is full."""
        return self._share.has_room(tenant)

    def num(self, reason: WaitReason) -> int:
        """Return the number of requests that wait for the given reason."""
        return sum(
            len(line) for (line_reason, *_), line in self._lines.items() if line_reason is reason
        )

    @property
    def pools(self) -> list[WorkerPool]:
        """The pools of the requests that wait for their turn at a worker."""
        return list(
            dict.fromkeys(pool for reason, pool, _ in self._lines if reason is WaitReason.TURN)
        )

    def head(self, pool: WorkerPool) -> R | None:
        """Return the request that is next in turn among those of the pool, or None if none waits
        for its turn."""
        for (reason, line_pool, _), line in self._lines.items():
            if reason is WaitReason.TURN and line_pool == pool:
                return line[0][1]
        return None

    def of(self, reason: WaitReason) -> list[R]:
        """Return all requests that wait for the given reason, in the order in which to begin them:
        tenants in turn, each tenant's lowest rank first."""
        entries_by_tenant: dict[bytes, list[_Entry[R]]] = {}
        for (line_reason, _, tenant), line in self._lines.items():
            if line_reason is reason:
                entries_by_tenant.setdefault(tenant, []).extend(line)
        queue: FairQueue[R] = FairQueue()
        for tenant, entries in entries_by_tenant.items():
            for _, request in sorted(entries):
                queue.push(tenant, request)
        return [queue.pop() for _ in range(len(queue))]

    def since(self, request: R) -> float:
        """Return the time at which the waiting request began to wait."""
        return self._since[request][1]

    def add(self, request: R, reason: WaitReason, now: float) -> None:
        """Add a request to the line for the given reason, by its rank. A request that waits already
        is moved."""
        self.remove(request)
        line = self._lines.setdefault((reason, request.pool, request.tenant), [])
        heapq.heappush(line, (request.rank, request))
        self._since[request] = reason, now
        self._share.take(request.tenant)

    def remove(self, request: R) -> None:
        """Remove a request from the queue, which ends the turn of its tenant; no effect if the
        request does not wait."""
        removed = self._since.pop(request, None)
        if removed is None:
            return
        self._share.give_back(request.tenant)
        key = removed[0], request.pool, request.tenant
        line = self._lines.pop(key)
        entry = (request.rank, request)
        if line[0] == entry:
            heapq.heappop(line)
        else:
            line.remove(entry)
            heapq.heapify(line)
        if line:
            self._lines[key] = line


class RecomputeBudget(Generic[RequestT]):
    """Bound on how many running requests change their worker at once.

    When a decode worker dies, other workers must prefill all its requests again, prompt and
    response. All at once would delay the requests that run at those workers, so only a share of the
    running requests changes at a time: at most max(1, SHARE of them). Migrations with KV count too,
    since copying KV takes memory bandwidth on both workers.
    """

    def __init__(self) -> None:
        self._running: set[RequestT] = set()  # that have tokens, in any stage
        self._recomputed: set[RequestT] = set()
        self._migrating: set[RequestT] = set()  # with their KV, so nothing is computed

    @property
    def num_under_way(self) -> int:
        """Number of running requests that are being recomputed now."""
        return len(self._recomputed)

    @property
    def has_room(self) -> bool:
        """Whether the recomputation or migration of one more request may begin."""
        under_way = len(self._recomputed) + len(self._migrating)
        return under_way < max(1, int(SHARE * len(self._running)))

    def runs(self, request: RequestT) -> None:
        """Record that a request has generated tokens, which ends its recomputation if there was
        one."""
        self._running.add(request)
        self._recomputed.discard(request)

    def recompute_begun(self, request: RequestT) -> None:
        """Record that the recomputation of a running request has begun."""
        self._recomputed.add(request)

    def recompute_over(self, request: RequestT) -> None:
        """Record that the recomputation of a request has ended, whatever its result."""
        self._recomputed.discard(request)

    def migration_begun(self, request: RequestT) -> None:
        """Record that a request has begun to migrate to another worker with its KV."""
        self._migrating.add(request)

    def migration_over(self, request: RequestT) -> None:
        """Record that the migration of a request has ended, whatever its result."""
        self._migrating.discard(request)

    def forget(self, request: RequestT) -> None:
        """Stop counting a request that has ended."""
        self._running.discard(request)
        self._recomputed.discard(request)
