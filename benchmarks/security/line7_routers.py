"""Line 7: with ten routers the busiest has at most TIMES the mean of requests, and one that is
added under load has its share after SOON_S.

processes: real ones, in separate mount and network namespaces (so it needs root, or user
namespaces). Their /etc/hosts has one name for all routers, which does not resolve when the gateways
start; the added router is one more address of it. Workers have no engine (one_token_process.py).
HTTP clients send requests through all gateways, half of them in conversations of which each is more
than a router's share. The added router is compared with the mean of all, over SPAN_S from SOON_S
after its address was added. Then the same in the simulation, and for the choice alone.
"""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
from pytest_line import run_tests
from raw_http import Connection, request
from roles import make_certificates, start, trust
from systems.eventually import eventually, wait_until

ROUTERS, GATEWAYS, WORKERS = 10, 3, 2
TIMES, SOON_S, SPAN_S, REQUESTS = 1.2, 30.0, 30.0, 4000
CLIENTS = 12
POPULAR, RARE = 3, 1000  # conversations
NAME, PORT, METRICS_PORT = "routers.pdserve.test", 50050, 9090
MODEL = "tiny"
NAMESPACES = ("unshare", "--mount", "--net")
Counts = Counter[str]


def enter() -> None:
    """Set up the new namespaces: the loopback device is down in one, and mounts of the other must
    stay private."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


class Hosts:
    """/etc/hosts of this namespace."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "hosts"
        self._file.write_text("127.0.0.1 localhost\n")
        subprocess.run(["mount", "--bind", self._file, "/etc/hosts"], check=True)

    def add(self, addresses: list[str]) -> None:
        """Add addresses to the name."""
        with self._file.open("a") as out:
            out.write("".join(f"{address} {NAME}\n" for address in addresses))


class System:
    """The processes of one cluster, which trust each other by certificates."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._certificates = folder / "pem"
        make_certificates(self._certificates)
        self.routers: list[str] = []  # addresses
        self.gateways = [f"127.0.0.1:{8000 + number}" for number in range(GATEWAYS)]
        self._pids: list[int] = []  # of the gateways

    def start_gateways(self) -> None:
        for address in self.gateways:
            host, port = address.split(":")
            own = ("--host", host, "--port", port, "--routers", f"{NAME}:{PORT}")
            process = start(self._stack, "gateway", *own, *trust("gateway", self._certificates))
            self._pids.append(process.pid)
        wait_until(lambda: all(answers(f"{g}/health") for g in self.gateways), "gateways")

    def connections(self) -> list[Counts]:
        """Connections of each gateway to each router."""
        found = [psutil.Process(pid).net_connections() for pid in self._pids]
        return [
            Counter(
                c.raddr.ip.removeprefix("::ffff:")
                for c in each
                if c.status == "ESTABLISHED" and c.raddr.port == PORT
            )
            for each in found
        ]

    def start_router(self) -> str:
        address = f"127.0.0.{11 + len(self.routers)}"
        own = ("--bind", f"{address}:{PORT}", "--metrics-port", str(METRICS_PORT))
        start(self._stack, "router", *own, *trust("router", self._certificates))
        wait_until(lambda: metrics(address), f"router {address}")
        self.routers.append(address)
        return address

    def start_workers(self) -> None:
        script = str(Path(__file__).with_name("one_token_process.py"))
        for _ in range(WORKERS):
            own = (sys.executable, script, f"{NAME}:{PORT}", *trust("decode", self._certificates))
            process = subprocess.Popen(own)
            self._stack.callback(process.wait)
            self._stack.callback(process.terminate)

    def ready(self) -> bool:
        """Wait until every gateway answers and is connected to every router, which knows all
        workers."""
        known = 'pdserve_router_workers{model_name="tiny",role="decode",state="live"}'
        return (
            all(answers(f"{g}/ready") for g in self.gateways)
            and all(metric(router, known) == WORKERS for router in self.routers)
            and all(each.keys() == set(self.routers) for each in self.connections())
        )

    def counts(self) -> Counts:
        """Requests that each router has completed."""
        ended = 'pdserve_router_ended_total{outcome="ok"}'
        return Counter({router: int(metric(router, ended)) for router in self.routers})


def answers(place: str) -> str:
    """The response of http://`place`; empty if it is missing or an error."""
    try:
        return httpx.get(f"http://{place}").raise_for_status().text
    except httpx.HTTPError:
        return ""


def metrics(router: str) -> str:
    return answers(f"{router}:{METRICS_PORT}/metrics")


def metric(router: str, name: str) -> float:
    """The value of a metric; 0 while it is missing."""
    rows = [line.rsplit(" ", 1) for line in metrics(router).splitlines()]
    return sum(float(value) for key, value in rows if key == name)


def prompt(number: int) -> str:
    """More tokens than those that identify a conversation, then unique words."""
    talk = f"popular {number // 2 % POPULAR}" if number % 2 else f"rare {number // 2 % RARE}"
    return f"{talk} begins like this and like no other that is asked of us today".ljust(80, ".") + (
        f" What about {number}?"
    )


class Load:
    """CLIENTS clients that send requests one after the other, until the end of the block;
    `statuses` of all."""

    def __init__(self, gateways: list[str]) -> None:
        self._gateways = gateways
        self._over = False
        self._numbers = itertools.count()
        self.statuses: Counter[int] = Counter()

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(CLIENTS)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, client: int) -> None:
        gateway = self._gateways[client % len(self._gateways)]
        async with Connection(gateway) as connection:
            while not self._over:
                body = {"model": MODEL, "prompt": prompt(next(self._numbers)), "max_tokens": 1}
                asked = request(gateway, "POST", "/v1/completions", body)
                status, _ = await connection.ask(asked)
                self.statuses[status] += 1


def to_mean(counts: Counts) -> float:
    """The busiest relative to the mean."""
    return round(max(counts.values()) * len(counts) / counts.total(), 3)


def shares(counts: Counts, added: str) -> dict[str, Any]:
    return {
        "requests": counts.total(),
        "busiest_to_mean": to_mean(counts),
        "added_to_mean": round(counts[added] * len(counts) / counts.total(), 3),
        "of_each": sorted(counts.values()),
    }


async def add_one(system: System, hosts: Hosts) -> dict[str, Any]:
    """Add a router under load: its requests at first, and later."""
    added = await asyncio.to_thread(system.start_router)
    before = await asyncio.to_thread(system.counts)
    began = time.monotonic()
    hosts.add([added])
    await eventually(lambda: asyncio.to_thread(lambda: system.counts()[added] > 0), "a request")
    first_s = time.monotonic() - began
    await asyncio.sleep(SOON_S - first_s)
    soon = await asyncio.to_thread(system.counts)
    await asyncio.sleep(SPAN_S)
    then = await asyncio.to_thread(system.counts)
    first, share = shares(counted(soon, before), added), shares(counted(then, soon), added)
    return {
        "ok": 1 / TIMES <= share["added_to_mean"] <= TIMES and share["busiest_to_mean"] <= TIMES,
        "first_request_s": round(first_s, 2),
        f"first_{SOON_S:g}_s": first,
        f"next_{SPAN_S:g}_s": share,
    }


def counted(now: Counts, before: Counts) -> Counts:
    """The increase of each count; unlike a difference of Counters it keeps those without one."""
    return Counter({router: now[router] - before[router] for router in now})


async def measure(stack: ExitStack, folder: Path) -> dict[str, Any]:
    hosts = Hosts(folder)
    system = System(stack, folder)
    for _ in range(ROUTERS):
        system.start_router()
    system.start_workers()
    system.start_gateways()
    hosts.add(system.routers)
    await eventually(lambda: asyncio.to_thread(system.ready), "the system")
    async with Load(system.gateways) as load:
        began = time.monotonic()
        await eventually(lambda: load.statuses.total() >= REQUESTS, "requests", limit_s=300)
        rate = REQUESTS / (time.monotonic() - began)
        counts = await asyncio.to_thread(system.counts)
        added = await add_one(system, hosts)
        connections = [sorted(each.values()) for each in system.connections()]
    return {
        "ok": to_mean(counts) <= TIMES and added["ok"] and set(load.statuses) == {200},
        "routers": ROUTERS,
        "gateways": GATEWAYS,
        "requests": counts.total(),
        "per_s": round(rate, 1),
        "busiest_to_mean": to_mean(counts),
        "of_each": sorted(counts.values()),
        "added": added,
        "connections_of_gateways": connections,
        "statuses": dict(load.statuses),
    }


def processes() -> None:
    """Run the processes within the namespaces."""
    enter()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        print(json.dumps(asyncio.run(measure(stack, Path(folder)))))


def main() -> None:
    root = () if os.geteuid() == 0 else ("--map-root-user",)
    done = subprocess.run(
        [*NAMESPACES, *root, sys.executable, __file__, "processes"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = {
        "processes": json.loads(done.stdout.strip().splitlines()[-1]),
        "simulation": run_tests("tests/simulation/test_shares.py"),
        "policy": run_tests("tests/gateway/router_client/test_routing.py"),
    }
    print(json.dumps({"ok": all(part["ok"] for part in found.values()), **found}))


if __name__ == "__main__":
    if sys.argv[1:] == ["processes"]:
        processes()
    else:
        main()
