"""What a system of any size asks of each router: connections, messages, bytes, cores, memory.

`python benchmarks/scale/arithmetic.py` prints the tables of docs/scale.md. A router costs
`fixed + per_worker * workers that join it + per_stream * its streams`; what joins it is all workers
in a full mesh, and `keep / routers` of them if each worker joins only the `keep` routers that come
first for it by rendezvous hash (Thaler and Ravishankar, 1998).
"""

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MOST_CORE = 0.70  # of a router
MESH_CORE = 0.35  # of it, for workers that it only listens to: beyond half of it, they are too many
TOKENS_S = 10.0  # of a stream
DECODES = 0.9  # of the workers
ROW_BYTES, MESSAGE_BYTES = 8, 60  # a token in a row; HTTP/2, gRPC and TLS around a message
REPORTS_S, REPORT_BYTES = 20.0, 400  # of a busy worker to each router
GATEWAY_US = 30.0  # a gateway's processor time for a token


@dataclass(frozen=True)
class Costs:
    """Of one router, in cores and MiB; from scale.json."""

    fixed: float
    per_worker: float  # a busy one
    per_stream: float
    base_mib: float
    worker_mib: float  # without its hashes
    hash_bytes: float
    stream_mib: float


@dataclass(frozen=True)
class System:
    """A whole system. `keep`: routers that a worker joins; 0: all of them."""

    workers: int
    streams: int
    routers: int
    keep: int = 0
    hashes: int = 20_000

    @property
    def joined(self) -> float:
        """Routers that a worker joins."""
        return min(self.keep or self.routers, self.routers)

    @property
    def workers_a_router(self) -> float:
        return self.workers * self.joined / self.routers

    @property
    def streams_a_router(self) -> float:
        return self.streams / self.routers

    @property
    def gateways(self) -> int:
        return math.ceil(self.streams * TOKENS_S * GATEWAY_US / 1e6 / MOST_CORE)

    @property
    def joins(self) -> int:
        """Join streams, and as many sessions."""
        return round(self.workers * self.joined)

    @property
    def rows_a_message(self) -> float:
        """Streams that a decode worker has for one router, as far as there are any."""
        mean = self.streams / (DECODES * self.workers * self.joined)
        return mean / -math.expm1(-mean)

    @property
    def reports_s(self) -> float:
        """That a router reads."""
        return REPORTS_S * self.workers_a_router

    @property
    def token_messages_s(self) -> float:
        """From decode workers to one router; one a step, of those that have a stream of it."""
        return self.streams_a_router * TOKENS_S / self.rows_a_message

    @property
    def gateway_messages_s(self) -> float:
        """From one router to all gateways, if no two messages of workers are joined: a message's
        rows go to as many gateways as they fall on."""
        missed = (1 - 1 / self.gateways) ** self.rows_a_message
        return self.token_messages_s * self.gateways * (1 - missed)

    @property
    def bytes_s(self) -> float:
        """In and out of one router."""
        tokens = 2 * ROW_BYTES * self.streams_a_router * TOKENS_S
        messages = MESSAGE_BYTES * (self.token_messages_s + self.gateway_messages_s)
        return tokens + messages + self.reports_s * (MESSAGE_BYTES + REPORT_BYTES)

    def core(self, costs: Costs) -> float:
        """Of one router."""
        workers, streams = self.workers_a_router, self.streams_a_router
        return costs.fixed + costs.per_worker * workers + costs.per_stream * streams

    def mib(self, costs: Costs) -> float:
        """Of one router."""
        worker_mib = costs.worker_mib + self.hashes * costs.hash_bytes / (1 << 20)
        workers, streams = self.workers_a_router, self.streams_a_router
        return costs.base_mib + worker_mib * workers + costs.stream_mib * streams

    def sees(self, holders: int) -> float:
        """The probability that a router that is drawn at random has joined one of the workers that
        hold a prefix."""
        return 1 - (1 - self.joined / self.routers) ** holders

    def alone(self, dead: float) -> float:
        """The probability that all routers of a worker are among the share `dead` of them."""
        return dead**self.joined


def mesh_limit(costs: Costs) -> int:
    """Workers from which on a full mesh is too dense, however many routers there are."""
    return int(MESH_CORE / costs.per_worker)


def least_routers(workers: int, streams: int, costs: Costs, keep: int = 0) -> int | None:
    """So many carry it; None: no number does."""
    for routers in range(max(1, keep), 2_000):
        if System(workers, streams, routers, keep).core(costs) <= MOST_CORE:
            return routers
    return None


def rendezvous(worker: bytes, routers: Sequence[str], keep: int) -> list[str]:
    """The routers that a worker joins: those of the highest hash of both names."""

    def weight(router: str) -> bytes:
        return hashlib.blake2b(worker + router.encode(), digest_size=8).digest()

    return heapq.nlargest(keep, routers, key=weight)


def busiest(workers: int, routers: int, keep: int) -> float:
    """Workers of the fullest router to the mean, by the hash itself."""
    names = [f"router-{n}" for n in range(routers)]
    counts = Counter(
        router for n in range(workers) for router in rendezvous(f"worker-{n}".encode(), names, keep)
    )
    return max(counts.values()) * routers / (workers * keep)


def row(name: str, system: System, costs: Costs) -> str:
    cells = [
        name,
        f"{system.routers}",
        f"{system.gateways}",
        f"{system.joins:,}",
        f"{system.workers_a_router:,.0f}",
        f"{system.streams_a_router:,.0f}",
        f"{system.reports_s:,.0f}",
        f"{system.rows_a_message:.1f}",
        f"{system.token_messages_s:,.0f}",
        f"{system.gateway_messages_s:,.0f}",
        f"{system.bytes_s / 1e6:.1f}",
        f"{100 * system.core(costs):.0f}",
        f"{system.mib(costs):,.0f}",
    ]
    return f"| {' | '.join(cells)} |"
