"""The CPU time that a router spends on placing a request and on knowing its workers' prefixes.

`python benchmarks/scale/placing.py` fills the fleet of one Dispatcher with workers that have joined
and reported their caches, then submits requests of three kinds: a prompt that is not cached
anywhere, one whose first half is cached at every decode worker, and one turn of a conversation,
cached at one of them. A placing is everything from `Dispatcher.submit` to the Admit that is handed
to the session. Before each, all workers report a new load. Prints one JSON object.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from pdserve.engine.kv import KvSpec, cache_seed, chain_hashes, encode_spec
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.services.common.rpc import RequestProgress
from pdserve.services.router.dispatcher import Dispatcher
from pdserve.services.router.fleet import Fleet, Worker
from pdserve.services.router.placement import Rules

BLOCK = 16
IDENTITY = b"identity of tests"[:16]
KINDS = ("new", "popular", "conversation")
HASHES_PER_EVENT = 8192


class Client:
    """The client of a request; it reads nothing."""

    key = b"gateway"
    reads_rows = True

    def put(self, event: Any) -> None:
        pass

    def put_token(self, choice: Any, position: int, id_: int) -> bool:
        return True


class Router:
    """A Dispatcher among workers that have only joined."""

    def __init__(self, decodes: int, prefills: int, rng: random.Random) -> None:
        self.rng = rng
        self.now = 100.0
        self.fleet = Fleet()
        self.admits: list[bytes] = []
        self.dispatcher = Dispatcher(self.fleet, Rules(), self._send, rng, 512, 0.0)
        self.client = Client()
        roles = [fleet_pb2.DECODE] * decodes + [fleet_pb2.PREFILL] * prefills
        self.workers = [self._join(number, role) for number, role in enumerate(roles)]
        self.decodes = self.workers[:decodes]

    def _join(self, number: int, role: fleet_pb2.Role) -> Worker:
        hello = fleet_pb2.WorkerHello(
            role=role,
            incarnation=number.to_bytes(16),
            address=f"10.0.{number >> 8}.{number & 255}:7000",
            card=pb.ModelCard(
                name="m",
                kv_identity=pb.KvIdentity(digest=IDENTITY, weights="w" * 64, numerics="n"),
                kv_spec=encode_spec(KvSpec(BLOCK, ())),
            ),
            transports=["shm", "tcp"],
            wire_version=1,
        )
        worker, _ = self.fleet.join(hello, self.now)
        self.dispatcher.joined(worker)
        self.dispatcher.connected(worker, self.now)
        return worker

    def _send(self, worker: Worker, command: Any) -> None:
        if command.HasField("admit"):
            self.admits.append(command.admit.attempt)

    def load(self) -> None:
        """Let every worker report a new load."""
        for worker in self.workers:
            self.fleet.heard(worker, self.now)
            load = fleet_pb2.Load(
                running=self.rng.randrange(150, 250),
                waiting=self.rng.randrange(3),
                waiting_tokens=self.rng.randrange(3000),
                blocks_total=40_000,
                blocks_free=self.rng.randrange(1000, 20_000),
                blocks_cached=20_000,
            )
            worker.report(load)
            self.dispatcher.on_load(worker, self.now)

    def place(self, prompt: Sequence[int]) -> float:
        """CPU seconds of one placing. The request is cancelled afterwards."""
        self.now += 0.01
        self.load()
        name = f"r{len(self.admits)}"
        params = pb.SamplingParams(max_tokens=100)
        start = pb.Start(request=name, model="m", seed=5, remaining_ms=600_000, params=params)
        progress = RequestProgress(start, prompt)
        before = len(self.admits)
        began = time.thread_time()
        self.dispatcher.submit(progress, self.client, self.now)
        seconds = time.thread_time() - began
        assert len(self.admits) == before + 1, "it was not placed"
        self.dispatcher.cancel(self.client, name, (), self.now)
        return seconds


def resident_bytes() -> int:
    with open("/proc/self/statm") as figures:
        return int(figures.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(worker: Worker, own: Sequence[bytes], num_hashes: int, rng: random.Random) -> None:
    """Report the worker's cache: `own`, and enough others to make `num_hashes`."""
    sequence = 0
    for at in range(0, num_hashes, HASHES_PER_EVENT):
        part = [rng.randbytes(16) for _ in range(min(HASHES_PER_EVENT, num_hashes - at))]
        if not at:
            part[: len(own)] = own
        events = fleet_pb2.PrefixEvents(sequence=sequence, reset=not at, added=part)
        sequence += len(part)
        worker.prefixes.apply(fleet_pb2.PrefixEvents.FromString(events.SerializeToString()))


def measure(decodes: int, prefills: int, num_hashes: int, prompt: int, requests: int) -> Any:
    rng = random.Random(7)
    router = Router(decodes, prefills, rng)
    half = [rng.randrange(50_000) for _ in range(prompt // 2)]
    seed = cache_seed(IDENTITY, b"")
    popular = chain_hashes(half, BLOCK, seed)
    turns = [[rng.randrange(50_000) for _ in range(prompt // 2)] for _ in router.decodes]
    fill(router.workers[0], popular, num_hashes, rng)  # the first fill is not measured
    resident, began = resident_bytes(), time.process_time()
    for number, worker in enumerate(router.workers[1:], 1):
        own = [*popular, *chain_hashes(turns[number], BLOCK, seed)] if number < decodes else []
        fill(worker, own, num_hashes, rng)
    filled = time.process_time() - began
    known = num_hashes * (len(router.workers) - 1)
    result: dict[str, Any] = {
        "decodes": decodes,
        "prefills": prefills,
        "hashes": num_hashes,
        "bytes_per_hash": round((resident_bytes() - resident) / max(1, known), 1),
        "fill_us_per_hash": round(filled / max(1, known) * 1e6, 2),
    }
    for kind in KINDS:
        took = []
        for _ in range(requests):
            tail = [rng.randrange(50_000) for _ in range(prompt - len(half))]
            first = [rng.randrange(50_000) for _ in half]
            if kind == "popular":
                first = half
            elif kind == "conversation":
                first = turns[rng.randrange(1, decodes)]
            took.append(router.place([*first, *tail]) * 1000)
        took.sort()
        result[f"{kind}_ms"] = round(statistics.mean(took), 3)
        result[f"{kind}_p99_ms"] = round(took[int(0.99 * len(took))], 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decodes", type=int, default=60)
    parser.add_argument("--prefills", type=int, default=40)
    parser.add_argument("--hashes", type=int, default=20_000, help="of each worker")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens")
    parser.add_argument("--requests", type=int, default=300, help="of each kind")
    args = parser.parse_args()
    figures = measure(args.decodes, args.prefills, args.hashes, args.prompt, args.requests)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
