"""The faults of the chaos runs: each strikes at a chosen moment of a batch of streams.

A strike that came too late, or hit nothing, returns None and is repeated.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from systems.chaos.cluster import Cluster, Process
from systems.chaos.evidence import Watch
from systems.chaos.streams import Clients, Stream, wrong
from systems.eventually import wait_until
from systems.fault_proxy import FaultProxy, Way

LOST = re.compile(r"attempt lost: (.*)  request=(\S+)")
PAYLOAD_BYTES = 16 << 10  # a longer chunk of a data connection is mostly payload
MOST_BATCHES = 10
BACK_S = 10.0  # until a router that has just started knows the loads; the rings tell more exactly
MOMENT_S = 30.0  # within which a batch reaches its moment, or never

FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "delay": lambda proxy: proxy.delay(0.05),
    "hold": lambda proxy: proxy.hold(),
    "one-way there": lambda proxy: proxy.hold(Way.THERE),
    "one-way back": lambda proxy: proxy.hold(Way.BACK),
    "corrupt": lambda proxy: proxy.corrupt(Way.BACK, head=True),
    "half-close": lambda proxy: proxy.half_close(Way.THERE),
    "reset": lambda proxy: proxy.reset(),
}
LASTING = ("delay", "hold", "one-way there", "one-way back")
HITS = {
    "delay": "delayed", "hold": "held back", "one-way there": "held there",
    "one-way back": "held back", "corrupt": "corrupted", "half-close": "half-closed",
    "reset": "reset",
}  # fmt: skip


@dataclass
class Strike:
    """The place and time of a fault."""

    role: str
    at_ns: int
    incarnation: bytes
    address: str
    streams: list[str] = field(default_factory=list)  # ids of unfinished streams


@dataclass
class Batch:
    """Streams that ran together, the strikes among them, and differences found afterwards."""

    streams: list[Stream]
    strikes: list[Strike]
    wrong: list[str]
    seconds: float


def watch_until(condition: Callable[[], object], over: Callable[[], bool]) -> bool:
    """Poll tightly until a condition holds; False once `over`."""
    seen = ""
    with suppress(TimeoutError):
        seen = wait_until(
            lambda: "moment" if condition() else "over" if over() else "",
            limit_s=MOMENT_S,
            pause_s=0.001,
        )
    return seen == "moment"


class Striker:
    """Runs batches of streams on a cluster and strikes them."""

    def __init__(self, cluster: Cluster, clients: Clients, whole: dict[str, Stream]) -> None:
        self.cluster = cluster
        self.clients = clients
        self.whole = whole

    def run(self, strike: Callable[[Sequence[Stream]], list[Strike]], num: int = 16) -> Batch:
        """Run a batch with strikes in it; returns when its streams have ended and all blocks are
        free.
        """
        streams = self.clients.batch(num)
        began = time.monotonic()
        thread = self.clients.start(streams)
        try:
            strikes = strike(streams)
        finally:
            thread.join()
        found = wrong(streams, self.whole)
        took = time.monotonic() - began
        wait_until(self.cluster.blocks_back, "blocks back after the batch", BACK_S)
        return Batch(streams, strikes, found, took)

    def hit(self, strike: Callable[[Sequence[Stream]], list[Strike]]) -> list[Batch]:
        """Run batches until one was struck, and return it. Raises TimeoutError."""
        batches: list[Batch] = []
        while not batches or not batches[-1].strikes:
            if len(batches) == MOST_BATCHES:
                raise TimeoutError("no batch had the moment to strike at")
            batches.append(self.run(strike))
        return batches

    # --- SIGKILL

    def prefill(self, streams: Sequence[Stream]) -> list[Strike]:
        """Kill a prefill worker while it sends frames."""
        found: list[Process] = []
        struck: list[Strike] = []
        if watch_until(self._sends(found), lambda: all(s.over for s in streams)):
            struck = [self._kill(found[0], streams)]
            self.cluster.refill()
        return struck

    def decode(self, streams: Sequence[Stream]) -> list[Strike]:
        """Kill the decode worker with the most running requests, while half of the streams run."""
        half = len(streams) // 2
        if not watch_until(
            lambda: sum(s.under_way for s in streams) >= half, lambda: all(s.over for s in streams)
        ):
            return []
        loads = self.cluster.loads()
        known = [p for p in self.cluster.joined("decode") if p.incarnation in loads]
        victim = max(known, key=lambda p: loads[p.incarnation].running)
        struck = [self._kill(victim, streams)]
        self.cluster.refill()
        return struck

    def router(self, streams: Sequence[Stream]) -> list[Strike]:
        """Kill the only router, once every request is known to run; it restarts on its port."""
        half = len(streams) // 2
        if not watch_until(
            lambda: all(s.num_events for s in streams),
            lambda: sum(s.over for s in streams) > half,
        ):
            return []
        (victim,) = self.cluster.of("router")
        address = victim.address
        struck = [self._kill(victim, streams)]
        self.cluster.start_router(address)
        return struck

    def _sends(self, found: list[Process]) -> Callable[[], bool]:
        """Return whether a prefill worker sends frames: `found` then begins with it."""
        joined = self.cluster.joined("prefill")
        watches = {p: Watch(self.cluster.rings, p.incarnation) for p in joined}

        def sends() -> bool:
            found[:] = [p for p, watch in watches.items() if watch.sending()]
            return bool(found)

        return sends

    def _kill(self, victim: Process, streams: Sequence[Stream]) -> Strike:
        under_way = [s.id for s in streams if s.under_way]
        incarnation, address = victim.incarnation, victim.address
        return Strike(victim.role, self.cluster.kill(victim), incarnation, address, under_way)

    # --- the network

    def network(
        self, link: str, fault: str, seconds: float = 0.7
    ) -> Callable[[Sequence[Stream]], list[Strike]]:
        """Apply one of FAULTS to a link, while frames or tokens pass there; some last for
        a while.
        """
        proxy = self.cluster.proxies[link]
        data = link == "prefill-decode"

        def strike(streams: Sequence[Stream]) -> list[Strike]:
            found: list[Process] = []
            half = len(streams) // 2
            running = lambda: sum(s.under_way for s in streams) >= half  # noqa: E731
            moment = self._sends(found) if data else running
            if not watch_until(moment, lambda: all(s.over for s in streams)):
                return []
            at = time.monotonic_ns()
            if fault == "corrupt" and data:
                proxy.corrupt(Way.THERE, 3, least_bytes=PAYLOAD_BYTES)
            else:
                FAULTS[fault](proxy)
            if fault in LASTING:
                time.sleep(seconds)  # duration of the fault
                proxy.heal()
            return [Strike(link, at, b"", fault, [s.id for s in streams if s.under_way])]

        return strike

    # --- SIGSTOP

    def stopped_prefill(
        self, seconds: float, rounds: list[Batch]
    ) -> Callable[[Sequence[Stream]], list[Strike]]:
        """Stop a prefill worker that sends frames, and continue it in the middle of a later batch;
        batches run meanwhile.
        """

        def strike(streams: Sequence[Stream]) -> list[Strike]:
            found: list[Process] = []
            if not watch_until(self._sends(found), lambda: all(s.over for s in streams)):
                return []
            victim = found[0]
            at = time.monotonic()
            struck = Strike("prefill", time.monotonic_ns(), victim.incarnation, victim.address)
            os.kill(victim.pid, signal.SIGSTOP)
            try:
                while time.monotonic() < at + seconds - 0.5:
                    rounds.append(self._batch_beside())
                resumed = self.clients.batch()
                thread = self.clients.start(resumed)
                watch_until(
                    lambda: time.monotonic() >= at + seconds and any(s.num_events for s in resumed),
                    lambda: False,
                )
            finally:
                os.kill(victim.pid, signal.SIGCONT)
            thread.join()
            rounds.append(Batch(resumed, [], wrong(resumed, self.whole), 0.0))
            return [struck]

        return strike

    def _batch_beside(self) -> Batch:
        streams = self.clients.batch()
        self.clients.run(streams)
        return Batch(streams, [], wrong(streams, self.whole), 0.0)


def lost_tries(log: str) -> dict[str, list[str]]:
    """Return why tries were given up, by request, from the routers' logs."""
    found: dict[str, list[str]] = {}
    for reason, request in LOST.findall(log):
        found.setdefault(request, []).append(reason)
    return found
