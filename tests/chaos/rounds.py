"""The rounds of `make chaos`: each runs one system of real processes, injects a fault, and reads
its rings."""

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from systems.chaos.cluster import LINKS, Cluster, Shape, with_proxies
from systems.chaos.evidence import SEND, Evidence
from systems.chaos.model import write_chaos_model
from systems.chaos.streams import Clients, Stream, reference
from systems.chaos.strikes import FAULTS, HITS, Batch, Strike, Striker, lost_tries
from systems.eventually import wait_until

TOKENS, FEW_TOKENS, MANY_TOKENS = 100, 40, 1200
PARK_S = 5.0
STOP_S = 10.0
HOLD_S = 2.0  # longer than a hand-off's peer may be silent


@dataclass
class Outcome:
    """The outcome of a round. Seconds are lists: one entry for each attempt or hand-off."""

    hits: int = 0  # faults at the intended moment
    missed: int = 0  # faults at another moment; they are repeated
    streams: int = 0
    wrong: list[str] = field(default_factory=list)
    crashed_twice: int = 0  # requests that lost two attempts to kills
    other_losses: list[str] = field(default_factory=list)  # attempts lost without a kill
    detection_s: list[float] = field(default_factory=list)
    blocks_back_s: list[float] = field(default_factory=list)
    unresumed_s: list[float] = field(default_factory=list)
    computed_again: int = 0  # prompt tokens, in rounds of router kills
    adopted: int = 0
    cells: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)  # of workers
    seconds: float = 0.0

    def take(self, batches: Sequence[Batch]) -> None:
        self.streams += sum(len(batch.streams) for batch in batches)
        self.wrong += [text for batch in batches for text in batch.wrong]


def run_round(kind: str, count: int) -> dict[str, Any]:
    """One system from start to stop, with `count` hits of a kind of ROUNDS."""
    began = time.monotonic()
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape, play = ROUNDS[kind]
        cluster = Cluster(folder, shape(write_chaos_model(folder)))
        with cluster:
            play(cluster, count, outcome)
            outcome.start_s = [round(s, 2) for s in cluster.start_s]
            tries = lost_tries(cluster.router_log())
        evidence = Evidence(cluster.rings)
        outcome.violations = evidence.violations + ["damaged"] * evidence.damaged
        judge(cluster.strikes, evidence, tries, outcome)
    outcome.seconds = time.monotonic() - began
    return asdict(outcome)


def judge(
    strikes: Sequence[Strike], evidence: Evidence, tries: dict[str, list[str]], outcome: Outcome
) -> None:
    """Determine which kills fell at the intended moment, and how soon they were noticed."""
    addresses = [s.address for s in strikes]
    for reasons in tries.values():
        struck = [r for r in reasons if any(address in r for address in addresses)]
        outcome.crashed_twice += len(struck) > 1
        outcome.other_losses += [r for r in reasons if r not in struck]
    for strike in strikes:
        lost = {r for r, reasons in tries.items() if any(strike.address in x for x in reasons)}
        fell = (
            bool(evidence.in_transfer(strike.incarnation, strike.at_ns))
            if strike.role == "prefill"
            else bool(lost & {*strike.streams})
        )
        outcome.hits += fell
        outcome.missed += not fell
        outcome.detection_s += evidence.noticed(strike.address, strike.incarnation, strike.at_ns)
        outcome.blocks_back_s += evidence.given_back(strike.incarnation, strike.at_ns)


# --- rounds


def kill_workers(role: str, tokens: int) -> Callable[[Cluster, int, Outcome], None]:
    def play(cluster: Cluster, count: int, outcome: Outcome) -> None:
        clients = Clients(cluster.url, tokens)
        striker = Striker(cluster, clients, reference(clients))
        strike = striker.prefill if role == "prefill" else striker.decode
        for _ in range(count):
            wait_until(lambda: len(cluster.joined(role)) >= 2, f"two {role} workers")
            batches = striker.hit(strike)
            outcome.take(batches)
            cluster.strikes += batches[-1].strikes

    return play


def kill_routers(cluster: Cluster, count: int, outcome: Outcome) -> None:
    clients = Clients(cluster.url, TOKENS)
    striker = Striker(cluster, clients, reference(clients))
    adopted = 0
    for _ in range(count):
        before = sum(cluster.prompt_tokens().values())
        batches = striker.hit(striker.router)
        outcome.take(batches)
        request = sum(s.usage["prompt_tokens"] for b in batches for s in b.streams if s.usage)
        outcome.computed_again += sum(cluster.prompt_tokens().values()) - before - request
        now = sum(load.adopted for load in cluster.loads().values())
        outcome.hits += now > adopted
        outcome.missed += now == adopted
        adopted = now
    outcome.adopted = adopted


def break_network(cluster: Cluster, count: int, outcome: Outcome) -> None:
    """Apply every fault on every link, `count` times."""
    clients = Clients(cluster.url, TOKENS)
    striker = Striker(cluster, clients, reference(clients))
    for link in LINKS:
        proxy = cluster.proxies[link]
        for fault in [*FAULTS] * count:
            before = proxy.hits[HITS[fault]]
            outcome.take(striker.hit(striker.network(link, fault, HOLD_S)))
            cell = f"{link} {fault}"
            fell = proxy.hits[HITS[fault]] > before
            outcome.cells[cell] = outcome.cells.get(cell, 0) + fell
            outcome.hits += fell
            outcome.missed += not fell


def stop_prefill(cluster: Cluster, count: int, outcome: Outcome) -> None:
    """SIGSTOP for ten seconds between two frames; other streams run all the time."""
    clients = Clients(cluster.url, FEW_TOKENS)
    striker = Striker(cluster, clients, reference(clients))
    for _ in range(count):
        beside: list[Batch] = []
        batches = striker.hit(striker.stopped_prefill(STOP_S, beside))
        outcome.take([*batches, *beside])
        (strike,) = batches[-1].strikes
        resumed_ns = strike.at_ns + int(STOP_S * 1e9)
        kept = [
            h for h in Evidence(cluster.rings).handoffs.values()
            if h.sender == strike.incarnation and h.sent and h.sent[0] < strike.at_ns
            and h.freed_ns.get(SEND, 0) >= resumed_ns
        ]  # fmt: skip
        outcome.hits += bool(kept)  # it was paused while sending blocks, and resumed
        outcome.missed += not kept


def strike_twice(cluster: Cluster, count: int, outcome: Outcome) -> None:
    """Kill the worker of a request, and the next one too; the request fails with a typed 500."""
    for _ in range(count):
        cluster.wait_ready()  # the request may continue at any decode worker that the router knows
        body = Clients(cluster.url, MANY_TOKENS).batch()[0].body
        answers: list[httpx.Response] = []

        def ask(body: dict[str, Any], answers: list[httpx.Response] = answers) -> None:
            whole = {**body, "stream": False, "stream_options": None}
            answers.append(httpx.post(f"{cluster.url}/v1/completions", json=whole, timeout=60))

        thread = threading.Thread(target=ask, args=(body,))
        thread.start()
        for _ in range(2):
            before = {b: load.generation_tokens for b, load in cluster.loads().items()}

            def runs(before: dict[bytes, int] = before) -> bytes:
                return next(
                    (b for b, load in cluster.loads().items()
                     if load.running and load.generation_tokens > before.get(b, 0)), b"",
                )  # fmt: skip

            incarnation = wait_until(runs, "the request to run", limit_s=30)
            cluster.kill(next(p for p in cluster.of("decode") if p.incarnation == incarnation))
        thread.join()
        cluster.refill()
        (answer,) = answers
        struck = answer.status_code == 500 and "two workers that died" in answer.text
        outcome.hits += struck
        if not struck:
            outcome.wrong.append(f"crashed twice: {answer.status_code} {answer.text}")


def nobody_resumes(cluster: Cluster, count: int, outcome: Outcome) -> None:
    """Kill the gateway under its streams, and every second time the router as well."""
    for number in range(2 * count):
        clients = Clients(cluster.url, MANY_TOKENS)
        streams = clients.batch()
        thread = clients.start(streams)
        wait_until(partial(half_under_way, streams), "streams under way", limit_s=30)
        given_up = sum(load.park_expired for load in cluster.loads().values())
        (gateway,), (router,) = cluster.of("gateway"), cluster.of("router")
        address = router.address
        if number % 2:
            cluster.kill(router)
        cluster.kill(gateway)
        at = time.monotonic()
        if number % 2:
            cluster.start_router(address)
        thread.join()
        wait_until(cluster.blocks_back, "blocks of requests that are not resumed", limit_s=20)
        outcome.unresumed_s.append(time.monotonic() - at)
        ended = sum(s.error != "" for s in streams)
        now = sum(load.park_expired for load in cluster.loads().values())
        fell = ended and (now > given_up) == bool(number % 2)  # a surviving router cancels
        outcome.hits += bool(fell)
        outcome.missed += not fell
        cluster.start_gateway()
        cluster.wait_ready()


def half_under_way(streams: Sequence[Stream]) -> bool:
    return sum(s.under_way for s in streams) >= len(streams) // 2


Play = Callable[[Cluster, int, Outcome], None]
ROUNDS: dict[str, tuple[Callable[[Path], Shape], Play]] = {
    "prefill": (
        lambda model: Shape(model, prefills=5, decodes=2), kill_workers("prefill", FEW_TOKENS)
    ),
    "decode": (lambda model: Shape(model, prefills=2, decodes=5), kill_workers("decode", TOKENS)),
    "router": (lambda model: Shape(model, prefills=2, decodes=2), kill_routers),
    "network": (lambda model: with_proxies(Shape(model)), break_network),
    "stopped": (lambda model: Shape(model, prefills=2, decodes=2), stop_prefill),
    "twice": (lambda model: Shape(model, prefills=1, decodes=4), strike_twice),
    "unresumed": (lambda model: Shape(model, prefills=1, decodes=1), nobody_resumes),
}  # fmt: skip
