"""The load of each router in a system of any size: connections, messages, bytes, cores, memory.

`python benchmarks/scale/arithmetic.py` prints the tables of docs/scale.md, from the last costs that
share.py measured (benchmarks/results/scale.json). A router costs `fixed + per_worker * workers that
join it + per_stream * its streams`; in a full mesh all workers join it, and `keep / routers` of
them if each worker joins only the `keep` routers that come first for it by rendezvous hash (Thaler
and Ravishankar, 1998).
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.services.common.discovery import rendezvous_order

REPORT = Path(__file__).parents[1] / "results/scale.json"
MOST_CORE = 0.70  # of a router
MESH_CORE = 0.35  # limit for workers that a router only listens to: half of MOST_CORE
TOKENS_S = 10.0  # of a stream
DECODES = 0.9  # of the workers
ROW_BYTES, MESSAGE_BYTES = 8, 60  # per token in a row; HTTP/2, gRPC and TLS around a message
REPORT_BYTES = 200  # on average: heartbeats are short, changes of the prefix cache are not
GATEWAY_US = 30.0  # a gateway's processor time per token


@dataclass(frozen=True)
class Costs:
    """Costs of one router, in cores and MiB; from scale.json."""

    fixed: float
    per_worker: float  # a busy one
    per_stream: float
    base_mib: float
    worker_mib: float  # without its hashes
    hash_bytes: float
    stream_mib: float
    reports_s: float  # of a busy worker to each router that it joined


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
        """The number of routers that a worker joins."""
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
        """The number of Join streams, equal to that of sessions."""
        return round(self.workers * self.joined)

    @property
    def rows_a_message(self) -> float:
        """Mean number of streams that a decode worker has for one router, if it has any."""
        mean = self.streams / (DECODES * self.workers * self.joined)
        return mean / -math.expm1(-mean)

    def reports_s(self, costs: Costs) -> float:
        """Reports per second that a router reads."""
        return costs.reports_s * self.workers_a_router

    @property
    def token_messages_s(self) -> float:
        """Messages from decode workers to one router; one per step, from those that have a stream
        of it."""
        return self.streams_a_router * TOKENS_S / self.rows_a_message

    @property
    def gateway_messages_s(self) -> float:
        """Messages from one router to all gateways, if messages of workers are not merged: a
        message's rows go to as many gateways as they belong to."""
        missed = (1 - 1 / self.gateways) ** self.rows_a_message
        return self.token_messages_s * self.gateways * (1 - missed)

    def bytes_s(self, costs: Costs) -> float:
        """Bytes into and out of one router."""
        tokens = 2 * ROW_BYTES * self.streams_a_router * TOKENS_S
        messages = MESSAGE_BYTES * (self.token_messages_s + self.gateway_messages_s)
        return tokens + messages + self.reports_s(costs) * (MESSAGE_BYTES + REPORT_BYTES)

    def core(self, costs: Costs) -> float:
        """Cores of one router."""
        workers, streams = self.workers_a_router, self.streams_a_router
        return costs.fixed + costs.per_worker * workers + costs.per_stream * streams

    def mib(self, costs: Costs) -> float:
        """Memory of one router."""
        worker_mib = costs.worker_mib + self.hashes * costs.hash_bytes / (1 << 20)
        workers, streams = self.workers_a_router, self.streams_a_router
        return costs.base_mib + worker_mib * workers + costs.stream_mib * streams

    def sees(self, holders: int) -> float:
        """The probability that a random router has joined one of the workers that hold a prefix."""
        return 1 - (1 - self.joined / self.routers) ** holders

    def alone(self, dead: float) -> float:
        """The probability that all routers of a worker are among the share `dead` of them."""
        return dead**self.joined


def mesh_limit(costs: Costs) -> int:
    """The number of workers from which a full mesh is too dense, for any number of routers."""
    return math.floor(MESH_CORE / costs.per_worker + 1e-9)


def least_routers(workers: int, streams: int, costs: Costs, keep: int = 0) -> int | None:
    """The minimum number of routers; None if no number suffices."""
    for routers in range(max(1, keep), 2_000):
        if System(workers, streams, routers, keep).core(costs) <= MOST_CORE:
            return routers
    return None


def busiest(workers: int, routers: int, keep: int) -> float:
    """Workers of the fullest router relative to the mean, by the hash itself."""
    names = [f"router-{n}" for n in range(routers)]
    counts = Counter(
        router
        for n in range(workers)
        for router in rendezvous_order(f"worker-{n}".encode(), names)[:keep]
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
        f"{system.reports_s(costs):,.0f}",
        f"{system.rows_a_message:.1f}",
        f"{system.token_messages_s:,.0f}",
        f"{system.gateway_messages_s:,.0f}",
        f"{system.bytes_s(costs) / 1e6:.1f}",
        f"{100 * system.core(costs):.0f}",
        f"{system.mib(costs):,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "system | routers | gateways | joins | workers a router | streams a router | reports/s "
    "| rows a message | token messages/s in | out | MB/s | % of a core | MiB"
)
SIZES = ((100, 20_000), (300, 30_000), (1_000, 100_000))
STREAMS_A_ROUTER = 2_000
KEEPS = (2, 4, 8)


def table(costs: Costs) -> list[str]:
    """Systems of each size, as a full mesh and sharded, each router with as many streams."""
    lines = [f"| {HEAD} |", "|" + "---|" * (HEAD.count("|") + 1)]
    for workers, streams in SIZES:
        routers = streams // STREAMS_A_ROUTER
        for keep in (0, *KEEPS):
            how = f"K = {keep}" if keep else "mesh"
            system = System(workers, streams, routers, keep)
            lines.append(row(f"{workers:,} workers, {streams:,} streams, {how}", system, costs))
    return lines


def sharding(workers: int = 1_000, routers: int = 50) -> list[str]:
    """The effect of sharding on prefixes, failover and balance."""
    lines = [
        "| K | sees a prefix of 1 worker | of 4 | of 16 | a router that is drawn knows the worker "
        "| a worker whose routers are all among a tenth that died | fullest router to the mean |",
        "|" + "---|" * 7,
    ]
    for keep in KEEPS:
        system = System(workers, workers * 100, routers, keep)
        seen = " | ".join(f"{100 * system.sees(n):.0f} %" for n in (1, 4, 16))
        again = f"{100 * (keep - 1) / (routers - 1):.0f} %"
        full = busiest(workers, routers, keep)
        lines.append(f"| {keep} | {seen} | {again} | {system.alone(0.1):.0e} | {full:.2f} |")
    return lines


def costs_of(report: dict[str, Any]) -> Costs:
    """The costs from a complete report of share.py (scale.json)."""
    along_workers, along_streams = report["workers"]["line"], report["streams"]["line"]
    idle, share, index = report["idle"], report["share"], report["index"]
    per_worker = along_workers["slope"]
    return Costs(
        fixed=max(0.0, along_streams["fixed"] - per_worker * share["shape"]["workers"]),
        per_worker=per_worker,
        per_stream=along_streams["slope"],
        base_mib=idle["rss_mib"] - idle["joined_mib"],
        worker_mib=index["mib_a_worker_without"],
        hash_bytes=index["bytes_a_hash"],
        stream_mib=(share["rss_mib"] - idle["rss_mib"]) / share["shape"]["streams"],
        reports_s=share["reports_s"] / share["shape"]["workers"],
    )


def main() -> None:
    costs = costs_of(json.loads(REPORT.read_text()))
    print(costs, f"full mesh up to {mesh_limit(costs)} workers", "", sep="\n")
    print(*table(costs), "", *sharding(), sep="\n")


if __name__ == "__main__":
    main()
